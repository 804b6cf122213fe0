"""Decide about symmetries from the trainings of several starts."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symrazor.discovery.claims import (
    MAX_PROBABILITY,
    MIN_PROBABILITY,
    NORMAL_QUANTILE,
    SHARED_ERROR,
    T_QUANTILES,
    TRAINING_ERRORS,
    WEIGHTS,
    Margin,
    claim_of,
    margins_between,
)
from symrazor.discovery.question import Symmetry

N_DATA = 400
SYMMETRY = Symmetry("translation", "strict", ("relaxed", "dense"))


def trained(
    name: str, evidence: list[float], left_out: list[list[float]], guess: float = -4.0
) -> list[Any]:
    """Return stand-ins for trained members: the log evidence and scores of each start."""
    return [
        SimpleNamespace(
            structure=name,
            start=start,
            log_evidence=value,
            evidence=SimpleNamespace(n_data=N_DATA),
            left_out=torch.tensor(scores, dtype=torch.float64),
            guess=torch.full((len(scores),), guess, dtype=torch.float64),
        )
        for start, (value, scores) in enumerate(zip(evidence, left_out, strict=True))
    ]


def test_margins_by_hand() -> None:
    first = trained("strict", [-10.0, -14.0], [[-1.0, -2.0], [-3.0, -1.0]], -9.0)
    second = trained("relaxed", [-9.0, -11.0], [[-1.5, -1.0], [-3.0, 0.0]], -9.0)
    evidence, left_out = margins_between(dict(enumerate(first)), dict(enumerate(second)))
    # differences of the scores: -0.5, 1, 0, 1, with sums 0.5 and 1 of the two starts
    deviation, t = torch.tensor([-0.5, 1.0, 0.0, 1.0]).std().item(), 3.18 / 1.96
    # differences of the evidence: 1 and 3, with variance 2
    assert evidence.mean == 2.0
    shared = math.hypot(TRAINING_ERRORS[0], 2.0 * SHARED_ERROR)
    scatter = math.sqrt((2 * shared**2 + 2.0) / 3 / 2)
    parts = (t * scatter, deviation * math.sqrt(N_DATA), shared)
    assert evidence.standard_error == pytest.approx(math.hypot(*parts))
    assert left_out is not None and left_out.mean == pytest.approx(1.5)
    shared = math.hypot(TRAINING_ERRORS[1], 1.5 * SHARED_ERROR)  # of the sum over both starts
    scatter = math.sqrt((2 * shared**2 + 4 * 0.125) / 3 / 2)
    parts = (t * scatter, deviation * 2, shared)
    assert left_out.standard_error == pytest.approx(math.hypot(*parts))


def test_the_quantiles_are_those_of_student() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees, quantile in enumerate(T_QUANTILES, 2):
        assert quantile == pytest.approx(stats.t.ppf(0.975, degrees), abs=0.006)
    assert pytest.approx(stats.norm.ppf(0.975), abs=0.001) == NORMAL_QUANTILE


@pytest.mark.parametrize("shared", [0.0, 30.0])
def test_two_standard_errors_contain_the_margin_of_another_run(shared: float) -> None:
    """Draw runs of three starts; starts of a run share an error proportional to the margin."""
    generator = torch.Generator().manual_seed(0)
    margins = []
    for _ in range(300):
        mean = 300 + shared * float(torch.randn(1, generator=generator))
        values = (mean + 20 * torch.randn(3, generator=generator)).tolist()
        first = trained("strict", [0.0] * 3, [[]] * 3)
        second = trained("relaxed", values, [[]] * 3)
        margins.append(margins_between(dict(enumerate(first)), dict(enumerate(second)))[0])
    pairs = zip(margins[::2], margins[1::2], strict=True)
    inside = [abs(a.mean - b.mean) <= 2 * a.standard_error for a, b in pairs]
    assert sum(inside) >= 0.9 * len(inside)


def test_a_start_that_learned_nothing_does_not_count_if_others_did() -> None:
    first = trained("strict", [-10.0, -900.0, -12.0], [[-1.0] * 9, [-4.0] * 9, [-1.0] * 9])
    second = trained("relaxed", [-11.0, -11.0, -11.0], [[-1.0] * 9] * 3)
    evidence, left_out = margins_between(dict(enumerate(first)), dict(enumerate(second)))
    assert evidence.mean == 0.0
    assert left_out is not None and left_out.mean == 0.0
    claim = claim_of(Symmetry("a", "strict", ("relaxed",)), first + second)
    assert claim is not None and claim.starts == 2
    nothing = trained("strict", [-900.0] * 3, [[-4.0] * 9] * 3)  # the symmetry itself is wrong
    evidence, _ = margins_between(dict(enumerate(nothing)), dict(enumerate(second)))
    assert evidence.mean == 889.0


def test_a_rival_below_the_network_that_it_contains_counts_as_equal() -> None:
    """Its optimiser failed: it could have switched its other paths off."""
    left_out = [[-1.0, -1.1]] * 3
    members = trained("strict", [-500.0] * 3, left_out) + trained("relaxed", [-700.0] * 3, left_out)
    claims = [claim_of(SYMMETRY, members, nested) for nested in ((), ("relaxed",))]
    assert claims[0] is not None and claims[1] is not None
    assert (claims[0].evidence.mean, claims[1].evidence.mean) == (-200.0, 0.0)
    assert claims[1].holds  # nested models that are equal: the smaller one
    better = trained("strict", [-500.0] * 3, left_out) + trained("relaxed", [-9.0] * 3, left_out)
    claim = claim_of(SYMMETRY, better, ("relaxed",))
    assert claim is not None and claim.evidence.mean == 491.0


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
        (25.0, 0.03, None),
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
    members = trained("strict", [0.0, 0.0], [[], []]) + trained("dense", [20.0, 20.0], [[], []])
    claim = claim_of(SYMMETRY, members)
    assert claim is not None
    shared = math.hypot(TRAINING_ERRORS[0], 20 * SHARED_ERROR)
    z = 20 / math.hypot(shared, 3.18 / 1.96 * shared * math.sqrt(2 / 3 / 2))
    p = 1 / (1 + math.exp(-(WEIGHTS[0] - WEIGHTS[1] * math.asinh(z))))
    assert claim.probability == pytest.approx(max(p, 1 - p))
    assert str(Margin(1234.0, 5.4)) == "+1,234 ± 5"


def test_no_probability_is_larger_than_the_calibration_can_tell() -> None:
    members = trained("strict", [0.0] * 3, [[-0.1] * 9] * 3)
    members += trained("dense", [-9e9] * 3, [[-9.0] * 9] * 3)
    claim = claim_of(SYMMETRY, members)
    assert claim is not None and claim.probability == MAX_PROBABILITY
