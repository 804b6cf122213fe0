"""Say what would decide a claim that is undecided: more time, more data, or something else.

The margins of the claim are projected. Further starts reduce the scatter over starts, and leave out
further samples. More data let both margins grow in proportion, and their scatter over starts and
samples with the square root. Either projection assumes that the differences between the networks
stay as they are.
"""

import math
from dataclasses import replace

from symrazor.discovery.claims import (
    MIN_PROBABILITY,
    SHARED_ERROR,
    TRAINING_ERRORS,
    Claim,
    Margin,
    probability_of,
)

MAX_STARTS = 10
"""Starts of a structure after which a comparison ends undecided."""
GROWTH, MAX_DATA_FACTOR = 1.25, 100.0
"""Step of the search for the amount of data, and the largest factor."""


def remedy(claim: Claim, minutes: float | None, samples: int) -> str:
    """Return what would decide an undecided claim, as a sentence.

    Args:
        claim: the claim.
        minutes: time of the run; None if it had a number of epochs.
        samples: training samples of the run.
    """
    if claim.reason == "one start":
        return "One start has no scatter to compare with: run with `--starts 3`."
    if claim.reason == "nothing learned":
        return (
            "The network that has the symmetry predicts left-out data no better than a guess. "
            f"Train longer{_longer(minutes)}, or check that the inputs determine the labels."
        )
    if claim.reason == "contradiction":
        return (
            f"The evidence ({claim.evidence} nats) and the left-out data ({claim.left_out} nats) "
            f"contradict each other. Train longer{_longer(minutes)}, or add data."
        )
    starts = decisive_starts(claim)
    if starts is not None:
        option = f"`--starts {starts}`"
        if minutes is not None:
            total = math.ceil(minutes * starts / claim.starts)
            option = f"`--minutes {total}`"
        return f"About {starts} starts ({option}) decide it if further ones agree."
    factor = decisive_data(claim)
    if factor is None:
        return (
            f"More data of this kind would not decide it: the evidence ({claim.evidence} nats) and "
            f"the left-out data ({claim.left_out} nats) point in opposite directions. Check with "
            "`sr.prequential`."
        )
    return (
        f"About {_rounded(factor * samples):,} training samples, {factor:.2g} times as many, "
        "decide it if the difference per sample stays the same. More time alone is unlikely to."
    )


def _longer(minutes: float | None) -> str:
    return "" if minutes is None else f" (`--minutes {math.ceil(2 * minutes)}`)"


def _rounded(value: float) -> int:
    """Return a number rounded to two digits."""
    return int(float(f"{value:.1e}"))


def decisive_starts(claim: Claim) -> int | None:
    """Return the number of starts from which the projected claim is stated, or None."""
    for starts in range(claim.starts + 1, MAX_STARTS + 1):
        growth = starts / claim.starts
        evidence = _projected(claim.evidence, 0, 1.0, 1 / growth, 1.0)
        left_out = claim.left_out and _projected(claim.left_out, 1, growth, growth, growth)
        if _is_stated(evidence, left_out):
            return starts
    return None


def decisive_data(claim: Claim) -> float | None:
    """Return the factor of the data from which the projected claim is stated; None above 100."""
    factor = GROWTH
    while factor <= MAX_DATA_FACTOR:
        evidence = _projected(claim.evidence, 0, factor, factor, factor)
        left_out = claim.left_out and _projected(claim.left_out, 1, factor, factor, factor)
        if _is_stated(evidence, left_out):
            return factor
        factor *= GROWTH
    return None


def _is_stated(evidence: Margin, left_out: Margin | None) -> bool:
    probability = probability_of(evidence, left_out)
    return max(probability, 1 - probability) >= MIN_PROBABILITY


def _projected(
    margin: Margin, kind: int, growth: float, over_starts: float, over_samples: float
) -> Margin:
    """Return a margin whose mean, and whose variances over starts and samples, grow by factors.

    The error that all starts share is computed from the new mean.
    """
    shared = math.hypot(TRAINING_ERRORS[kind], SHARED_ERROR * margin.mean)
    square = margin.standard_error**2 - margin.over_starts**2 - shared**2
    mean = growth * margin.mean
    squares = (
        over_starts * margin.over_starts**2,
        over_samples * max(0.0, square),
        TRAINING_ERRORS[kind] ** 2 + (SHARED_ERROR * mean) ** 2,
    )
    return replace(margin, mean=mean, standard_error=math.sqrt(sum(squares)))
