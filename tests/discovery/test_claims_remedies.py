"""Say what would decide an undecided claim."""

import math
from dataclasses import replace

import pytest

from symrazor.discovery.claims import (
    MIN_PROBABILITY,
    SHARED_ERROR,
    TRAINING_ERRORS,
    Claim,
    Margin,
    Reason,
    decisive_data,
    decisive_starts,
    probability_of,
    remedy,
)


def margin(kind: int, mean: float, over_starts: float, over_samples: float) -> Margin:
    """Return a margin of given parts of its standard error."""
    shared = math.hypot(TRAINING_ERRORS[kind], SHARED_ERROR * mean)
    parts = (over_starts, over_samples, shared)
    return Margin(mean, math.hypot(*parts), over_starts)


def claim(evidence: Margin, left_out: Margin, reason: Reason = "close", starts: int = 3) -> Claim:
    probability = probability_of(evidence, left_out)
    names = ("translation", None, max(probability, 1 - probability), "relaxed")
    return Claim(*names, evidence, left_out, starts, "convolutional", reason)


def test_scatter_over_starts_is_reduced_by_starts() -> None:
    undecided = claim(margin(0, 60, 30, 4), margin(1, 40, 12, 4))
    starts = decisive_starts(undecided)
    assert starts is not None
    ratio = starts / 3
    evidence = margin(0, 60, 30 / math.sqrt(ratio), 4)
    left_out = margin(1, 40 * ratio, 12 * math.sqrt(ratio), 4 * math.sqrt(ratio))
    assert 1 - probability_of(evidence, left_out) >= MIN_PROBABILITY
    assert f"--minutes {math.ceil(2 * ratio)}" in remedy(undecided, 2.0, 400)
    assert f"--starts {starts}" in remedy(undecided, None, 400)


def test_starts_that_learned_nothing_are_counted_in_the_option() -> None:
    undecided = claim(margin(0, 60, 30, 4), margin(1, 40, 12, 4), starts=2)
    starts = decisive_starts(undecided)
    assert starts is not None and f"--starts {starts}`" in remedy(undecided, None, 400)
    with_failed = replace(undecided, failed=2)  # every second start counts
    assert with_failed.origin == "2 starts of each network (2 more learned nothing)"
    assert f"--starts {2 * starts}`" in remedy(with_failed, None, 400)
    assert remedy(with_failed, 2.0, 400).count(f"--minutes {starts}`") == 1


def test_scatter_over_samples_needs_data() -> None:
    undecided = claim(margin(0, 10, 1, 12), margin(1, 3, 1, 5))
    assert decisive_starts(undecided) is None
    factor = decisive_data(undecided)
    assert factor is not None and factor > 1
    evidence = margin(0, 10 * factor, math.sqrt(factor), 12 * math.sqrt(factor))
    left_out = margin(1, 3 * factor, math.sqrt(factor), 5 * math.sqrt(factor))
    assert 1 - probability_of(evidence, left_out) >= MIN_PROBABILITY
    text = remedy(undecided, 2.0, 400)
    assert f"About {float(f'{400 * factor:.1e}'):,.0f} training samples" in text


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("one start", "--starts 3"),
        ("nothing learned", "no better than a guess. Train longer (`--minutes 4`)"),
        ("contradiction", "contradict each other"),
    ],
)
def test_other_reasons_have_their_own_remedy(reason: Reason, words: str) -> None:
    assert words in remedy(claim(Margin(90, 9), Margin(-30, 9), reason), 2.0, 400)


def test_margins_of_opposite_sign_are_not_decided_by_more_data() -> None:
    undecided = claim(margin(0, -1000, 1, 12), margin(1, 400, 1, 5))
    assert undecided.probability < MIN_PROBABILITY
    assert "point in opposite directions" in remedy(undecided, 2.0, 400)


def test_margins_near_zero_are_not_called_opposite() -> None:
    undecided = claim(margin(0, 0, 4, 8), margin(1, 3, 3, 3))
    assert decisive_starts(undecided) is None and decisive_data(undecided) is None
    assert "show hardly any difference" in remedy(undecided, None, 400)
