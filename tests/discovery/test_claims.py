"""Decide about symmetries from the trainings of several starts."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symrazor.discovery.claims import (
    MIN_PROBABILITY,
    TRAINING_ERRORS,
    WEIGHTS,
    Margin,
    claim_of,
    margins_between,
)
from symrazor.discovery.question import Symmetry

SYMMETRY = Symmetry("translation", "strict", ("relaxed", "dense"))


def trained(name: str, evidence: list[float], left_out: list[list[float]]) -> list[Any]:
    """Return stand-ins for trained members: the log evidence and scores of each start."""
    return [
        SimpleNamespace(
            structure=name,
            start=start,
            log_evidence=value,
            left_out=torch.tensor(scores, dtype=torch.float64),
            guess=torch.full((len(scores),), -4.0, dtype=torch.float64),
        )
        for start, (value, scores) in enumerate(zip(evidence, left_out, strict=True))
    ]


def test_margins_by_hand() -> None:
    first = trained("strict", [-10.0, -14.0], [[-1.0, -2.0], [-3.0, -1.0]])
    second = trained("relaxed", [-9.0, -11.0], [[-1.5, -1.0], [-3.0, 0.0]])
    evidence, left_out = margins_between(dict(enumerate(first)), dict(enumerate(second)))
    # differences of the evidence: 1 and 3, with standard deviation sqrt(2)
    assert evidence.mean == 2.0
    assert evidence.standard_error == pytest.approx(1.0)
    # differences of the scores: -0.5, 1, 0, 1, with sums 0.5 and 1 of the two starts
    assert left_out is not None and left_out.mean == pytest.approx(1.5)
    over_samples = torch.tensor([-0.5, 1.0, 0.0, 1.0]).std().item() * 2
    assert left_out.standard_error == pytest.approx(max(over_samples, 0.5, 1.0))


def test_starts_that_only_one_structure_has_do_not_count() -> None:
    first = trained("strict", [0.0, 5.0, 9.0], [[], [], []])
    second = trained("relaxed", [1.0, 6.0], [[], []])
    evidence, left_out = margins_between(dict(enumerate(first)), dict(enumerate(second)))
    assert evidence.mean == 1.0 and left_out is None


@pytest.mark.parametrize(
    ("evidence", "gain", "holds"),
    [
        (-60.0, -0.1, True),
        (-60.0, -0.01, True),
        (900.0, 1.0, False),
        (5.0, 0.05, None),
        (900.0, -1.0, None),  # left-out data contradict the evidence
        (-900.0, 1.0, None),
    ],
)
def test_decisions(evidence: float, gain: float, holds: bool | None) -> None:
    """The relaxed network has this much more evidence, and gains this much per left-out sample."""
    generator = torch.Generator().manual_seed(0)
    noise = [(0.1 * torch.randn(100, generator=generator)).tolist() for _ in range(3)]
    strict = trained("strict", [-500.0, -510.0, -490.0], [[-1.0] * 100] * 3)
    relaxed = trained(
        "relaxed",
        [evidence - 501.0, evidence - 508.0, evidence - 490.0],
        [[gain - 1 + e for e in start] for start in noise],
    )
    claim = claim_of(SYMMETRY, [*strict, *relaxed])
    assert claim is not None
    assert (claim.holds, claim.starts, claim.rival) == (holds, 3, "relaxed")
    if holds is not None:
        assert claim.probability >= MIN_PROBABILITY
        assert claim.leaning is holds


def test_the_strongest_rival_decides() -> None:
    left_out = [[-1.0, -1.1]] * 3
    members = trained("strict", [-500.0] * 3, left_out) + trained("relaxed", [-520.0] * 3, left_out)
    members += trained("dense", [-100.0] * 3, [[-0.1, -0.2]] * 3)
    claim = claim_of(SYMMETRY, members)
    assert claim is not None and claim.rival == "dense" and claim.leaning is False
    assert claim.margin == pytest.approx(400 + 6 * 0.9)


def test_one_start_states_nothing_and_no_rival_claims_nothing() -> None:
    members = trained("strict", [0.0], [[]]) + trained("dense", [-900.0], [[]])
    claim = claim_of(SYMMETRY, members)
    assert claim is not None and claim.holds is None and claim.probability > MIN_PROBABILITY
    assert claim_of(SYMMETRY, members[:1]) is None


def test_a_network_that_only_guesses_has_no_symmetry() -> None:
    """The plain network is not worse than the relaxed one, but neither has learned anything."""
    members = trained("strict", [-500.0] * 3, [[-4.0, -3.9, -4.1]] * 3)
    members += trained("relaxed", [-520.0] * 3, [[-4.0, -4.0, -4.0]] * 3)
    claim = claim_of(SYMMETRY, members)
    assert claim is not None and claim.leaning and claim.holds is None


def test_probability_by_hand() -> None:
    members = trained("strict", [0.0, 0.0], [[], []]) + trained("dense", [10.0, 10.0], [[], []])
    claim = claim_of(SYMMETRY, members)
    assert claim is not None
    z = 10 / TRAINING_ERRORS[0]
    p = 1 / (1 + math.exp(-(WEIGHTS[0] - WEIGHTS[1] * math.asinh(z))))
    assert claim.probability == pytest.approx(max(p, 1 - p))
    assert str(Margin(1234.0, 5.4)) == "+1,234 ± 5"
