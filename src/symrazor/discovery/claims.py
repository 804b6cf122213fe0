r"""Decide whether the data have a symmetry, from all starts of the candidates.

A claim compares the structure that has the symmetry with its rivals, which do not. Two margins are
measured for each rival, positive if the rival is better:

- **evidence**: the difference of the log evidence of the samples that both were trained on,
- **left-out data**: the difference of the log likelihood of samples that neither was trained on,
  summed over all starts.

All differences are paired: both structures have the same samples and, if one contains the other,
the same state to start from. A start that learned nothing is a failed training if the same
structure learned something from other starts; it does not count. A rival that contains the
structure has at least its evidence once its prior is optimal, because it could switch its other
paths off. If its evidence is lower, its training failed to do so, and the margin counts as 0.

The standard error of a margin says how far the margin of another run, with other data and starts,
is typically off. It has three parts: the scatter over starts, multiplied by the quantile of
Student's t for so few starts; the scatter over samples, which all starts share; and what a run
shares otherwise, such as too short a training. The last is an error in nats and a part of the
margin itself, calibrated on tasks with known answers. It is also the scatter that is expected
before any start is seen, worth `PRIOR_STARTS` starts.

The probability of the symmetry is a logistic function of both margins, divided by their standard
errors and compressed,

$$ p = \sigma\big(w_0 - w_1 \operatorname{asinh}(z_1) - w_2 \operatorname{asinh}(z_2)\big), $$

for the rival with the smallest $p$. The constants were fitted to the development half of
`symrazor bench truth`, which cannot tell probabilities above `MAX_PROBABILITY` apart.

A claim is stated from a probability of 0.95. It remains undecided if the two margins contradict
each other, or if the symmetry seems to hold only because nothing was learned: the structure that
has it must predict left-out samples better than a guess.

`remedy` says what would decide an undecided claim, from projected margins. Further starts reduce
the scatter over starts, and leave out further samples. More data let both margins grow in
proportion, and their scatter over starts and samples with the square root. Either projection
assumes that the differences between the networks stay as they are.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, variance
from typing import Any, Literal

import torch

from symrazor.core.validation import counted
from symrazor.discovery.members import Member, has_learned
from symrazor.discovery.question import Symmetry

MIN_PROBABILITY, MAX_PROBABILITY = 0.95, 0.98
"""Probability from which a claim is stated, and the largest one: 50 claims of development tasks, of
which none is wrong, cannot show more."""
MIN_STARTS = 2
"""Starts without which there is no scatter, and nothing is stated."""
TRAINING_ERRORS = (8.0, 3.0)
"""Typical errors of both margins in nats that all starts of a run share."""
SHARED_ERROR = 0.12
"""The same, relative to the margin."""
WEIGHTS = (4.3, 0.9, 2.5)
"""Weights $w_0, w_1, w_2$ of the probability."""
CONTRADICTION = 2.0
"""Standard errors of both margins from which they contradict each other."""
PRIOR_STARTS = 2
"""Weight of the expected scatter over starts."""
T_QUANTILES = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)
"""97.5 % quantiles of Student's t for 2, 3, ... degrees of freedom."""
NORMAL_QUANTILE = 1.96
MAX_STARTS = 10
"""Starts of a structure after which a comparison ends undecided."""
GROWTH, MAX_DATA_FACTOR = 1.25, 100.0
"""Step of the search for the amount of data that decides a claim, and the largest factor."""
Reason = Literal["", "one start", "close", "contradiction", "nothing learned"]
"""Why a claim is undecided."""


@dataclass(frozen=True)
class Margin:
    """A difference in nats and its standard error between runs.

    Args:
        mean: the difference.
        standard_error: its standard error.
        over_starts: the part of it that is scatter over starts.
    """

    mean: float
    standard_error: float
    over_starts: float = 0.0

    @property
    def z(self) -> float:
        """The difference in standard errors."""
        return self.mean / max(self.standard_error, 1e-9)

    def __str__(self) -> str:
        return f"{self.mean:+,.0f} ± {self.standard_error:,.0f}"


@dataclass(frozen=True)
class Claim:
    """Whether the data have a symmetry.

    Args:
        name: the symmetry.
        holds: True or False if it is stated; None if it is undecided.
        probability: calibrated probability of the more probable answer.
        rival: the structure without the symmetry that decides.
        evidence: log evidence of the rival minus that of the structure with the symmetry.
        left_out: the same for the log likelihood of left-out samples; None if there are none.
        starts: number of starts that count.
        structure: the structure with the symmetry.
        reason: why it is undecided; "" if it is stated.
        failed: number of further starts, which do not count because a network learned nothing.
    """

    name: str
    holds: bool | None
    probability: float
    rival: str
    evidence: Margin
    left_out: Margin | None
    starts: int
    structure: str = ""
    reason: Reason = ""
    failed: int = 0

    @property
    def origin(self) -> str:
        """The number of starts behind the claim, in words."""
        failed = f" ({self.failed} more learned nothing)" if self.failed else ""
        return f"{counted(self.starts, 'start')} of each network{failed}"

    @property
    def leaning(self) -> bool:
        """The more probable answer, stated or not."""
        return probability_of(self.evidence, self.left_out) >= 0.5

    @property
    def margin(self) -> float:
        """Nats of evidence and left-out data by which the rival is better."""
        return self.evidence.mean + (0.0 if self.left_out is None else self.left_out.mean)

    @property
    def standard_error(self) -> float:
        """Standard error of `margin`; the errors of both parts come from the same data."""
        error = 0.0 if self.left_out is None else self.left_out.standard_error
        return self.evidence.standard_error + error

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {**asdict(self), "margin": self.margin, "standard_error": self.standard_error}


def claim_of(
    symmetry: Symmetry, members: Sequence[Member], nested: Collection[str] = ()
) -> Claim | None:
    """Return the claim about a symmetry; None if no rival was trained.

    `nested` names the rivals that contain the structure of the symmetry.
    """
    by_name: dict[str, dict[int, Member]] = {}
    for member in members:
        by_name.setdefault(member.structure, {})[member.start] = member
    symmetric = by_name.get(symmetry.structure, {})
    margins = {
        rival: margins_between(symmetric, by_name[rival], rival in nested)
        for rival in symmetry.rivals
        if set(by_name.get(rival, {})) & set(symmetric)
    }
    if not margins:
        return None
    rival = min(margins, key=lambda name: _log_odds(*margins[name]))
    evidence, left_out = margins[rival]
    p = probability_of(evidence, left_out)
    starts = len(_valid_starts(symmetric, by_name[rival]))
    failed = len(set(symmetric) & set(by_name[rival])) - starts
    reason = _doubt(p, evidence, left_out, starts)
    if not reason and p > 0.5 and not has_learned(list(symmetric.values())):
        reason = "nothing learned"
    return Claim(
        symmetry.name,
        None if reason else p > 0.5,
        max(p, 1 - p),
        rival,
        evidence,
        left_out,
        starts,
        symmetry.structure,
        reason,
        failed,
    )


def _doubt(p: float, evidence: Margin, left_out: Margin | None, starts: int) -> Reason:
    """Return why the margins do not decide; "" if they do."""
    if starts < MIN_STARTS:
        return "one start"
    if max(p, 1 - p) < MIN_PROBABILITY:
        return "close"
    if left_out is not None and evidence.z * left_out.z < 0:
        is_contradiction = min(abs(evidence.z), abs(left_out.z)) > CONTRADICTION
        return "contradiction" if is_contradiction else ""
    return ""


def margins_between(
    first: dict[int, Member], second: dict[int, Member], contains_first: bool = False
) -> tuple[Margin, Margin | None]:
    """Return by how much the second structure is better, over the starts that both have."""
    starts = _valid_starts(first, second)
    n = len(starts)
    gains = [second[s].left_out - first[s].left_out for s in starts]
    scores = torch.cat(gains)
    deviation = float(scores.std()) if len(scores) > 1 else 0.0
    values = [second[s].log_evidence - first[s].log_evidence for s in starts]
    n_data = fmean(first[s].evidence.n_data for s in starts)
    evidence = _mean(values, deviation * math.sqrt(n_data), TRAINING_ERRORS[0])
    if contains_first:
        evidence = replace(evidence, mean=max(0.0, evidence.mean))
    if len(scores) < 2:
        return evidence, None
    sums = [float(gain.sum()) for gain in gains]
    mean = _mean(sums, deviation * math.sqrt(len(scores)) / n, TRAINING_ERRORS[1] / n)
    return evidence, Margin(n * mean.mean, n * mean.standard_error, n * mean.over_starts)


def _valid_starts(first: dict[int, Member], second: dict[int, Member]) -> list[int]:
    """Return the starts that both have, without failed trainings if enough others are left."""
    common = sorted(set(first) & set(second))
    for members in (first, second):
        learned = [start for start in common if has_learned([members[start]])]
        common = learned if len(learned) >= MIN_STARTS else common
    return common


def _mean(values: Sequence[float], over_samples: float, training: float) -> Margin:
    """Return the mean over starts and its standard error."""
    n, mean = len(values), fmean(values)
    shared = math.hypot(training, SHARED_ERROR * mean)
    squares = PRIOR_STARTS * shared**2 + (n - 1) * (variance(values) if n > 1 else 0.0)
    degrees = PRIOR_STARTS + n - 1
    t_factor = T_QUANTILES[min(degrees, len(T_QUANTILES) + 1) - 2] / NORMAL_QUANTILE
    over_starts = t_factor * math.sqrt(squares / degrees / n)
    return Margin(mean, math.hypot(over_starts, over_samples, shared), over_starts)


def probability_of(evidence: Margin, left_out: Margin | None) -> float:
    """Return the probability that the symmetry holds."""
    probability = 1 / (1 + math.exp(-_log_odds(evidence, left_out)))
    return min(max(probability, 1 - MAX_PROBABILITY), MAX_PROBABILITY)


def _log_odds(evidence: Margin, left_out: Margin | None) -> float:
    """Return the log odds of the symmetry."""
    z = (evidence.z, 0.0 if left_out is None else left_out.z)
    return WEIGHTS[0] - WEIGHTS[1] * math.asinh(z[0]) - WEIGHTS[2] * math.asinh(z[1])


def remedy(claim: Claim, minutes: float | None, samples: int) -> str:
    """Return what would decide an undecided claim, as a sentence.

    Args:
        claim: the claim.
        minutes: time of the run; None if it had a number of epochs.
        samples: training samples of the run.
    """
    if claim.reason == "one start":
        return "One start does not show how much results vary: run with `--starts 3`."
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
        trained = claim.starts + claim.failed
        needed = math.ceil(trained * starts / claim.starts)
        option = f"`--starts {needed}`"
        if minutes is not None:
            option = f"`--minutes {math.ceil(minutes * needed / trained)}`"
        return f"About {needed} starts ({option}) would decide it if the further ones agree."
    factor = decisive_data(claim)
    if factor is None:
        margins = (
            f"the evidence ({claim.evidence} nats) and the left-out data ({claim.left_out} nats)"
        )
        is_split = claim.left_out is not None and claim.evidence.z * claim.left_out.z < 0
        reason = "point in opposite directions" if is_split else "show hardly any difference"
        return (
            f"More data of this kind would not decide it: {margins} {reason}. Check with "
            "`sr.prequential`."
        )
    samples_needed = int(float(f"{factor * samples:.1e}"))  # two digits
    return (
        f"About {samples_needed:,} training samples, {factor:.2g} times as many, "
        "would decide it if the difference per sample stays the same. More time alone would "
        "probably not."
    )


def _longer(minutes: float | None) -> str:
    return "" if minutes is None else f" (`--minutes {math.ceil(2 * minutes)}`)"


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
