"""Selection among trials: ties, counts of quantities, integer coefficients."""

import math

import pytest
import torch

from symrazor.dynamics.algebra import full_group, nbody_invariants
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import FlowTimes, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.proposals import canonical_span, round_quantities
from symrazor.dynamics.selection import _combine
from symrazor.dynamics.trained import Noise, Trained
from symrazor.dynamics.trials import (
    MAX_DEFICIT_PER_DATUM,
    TIE_STANDARD_ERRORS,
    Trial,
    finalist,
    rounded_rival,
    select_trial,
)


@pytest.fixture
def models() -> dict[str, SymmetrisedNetwork]:
    """Return oscillator models with no quantity, learned, rounded, and averaged over the group."""
    network = HamiltonianNetwork(2, width=4, generator=torch.Generator().manual_seed(0))
    learned = SymmetrisedNetwork(
        network, Quadratic.fixed(torch.eye(2)[None]), FlowTimes(1, "cube", "quasi")
    )
    rounded = round_quantities(learned)
    assert rounded is not None
    group = full_group(rounded, torch.randn(20, 2, generator=torch.Generator().manual_seed(1)))
    assert group is not None
    return {
        "none": SymmetrisedNetwork(network),
        "learned": learned,
        "rounded": rounded,
        "group": SymmetrisedNetwork(network, *group),
    }


def _trained(model: SymmetrisedNetwork) -> Trained:
    return Trained(model, Noise(), TrainConfig(), [{"step": 1.0, "seconds": 1.0}])


def test_trial_records(models: dict[str, SymmetrisedNetwork]) -> None:
    trials = {name: Trial(1.0, model, None, 0.5) for name, model in models.items()}
    assert [t.is_rounded for t in trials.values()] == [False, False, True, True]
    assert [t.has_group for t in trials.values()] == [False, False, False, True]
    assert [t.count for t in trials.values()] == [0, 1, 1, 1]
    record = trials["group"].to_record()
    assert (record["rounded"], record["group"], record["steps"]) == (1.0, 1.0, 0)
    assert (trials["rounded"].to_record()["group"], record["error"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        # costs of none, learned, rounded, group; standard error 10, of a difference 14.1
        ((500.0, 100.0, 90.0, 80.0), "group"),  # the lowest cost is also the most exact
        ((500.0, 133.0, 90.0, 120.0), "group"),  # a tie: 30 nats, within three errors
        ((500.0, 133.0, 90.0, 132.0), "group"),  # 42: just within
        ((500.0, 133.0, 90.0, 133.0), "rounded"),  # 43: outside
        ((500.0, 100.0, 90.0, 120.0), "rounded"),  # the group loses to the estimate
        ((500.0, 100.0, 140.0, 150.0), "learned"),  # both lose to the estimate, within errors
        ((500.0, 100.0, 100.1, 100.1), "learned"),
        ((80.0, 100.0, 90.0, 85.0), "none"),  # between counts the cost decides
        ((95.0, 100.0, 90.0, 96.0), "group"),  # one quantity wins; the group ties with it
        ((500.0, 100.0, math.inf, math.inf), "learned"),  # both diverged
        ((500.0, math.inf, math.inf, math.inf), "none"),
    ],
)
def test_ties_go_to_the_group_and_never_to_rounded_coefficients(
    models: dict[str, SymmetrisedNetwork], costs: tuple[float, ...], expected: str
) -> None:
    trials = {
        name: Trial(cost, model, None, 10.0 if cost < math.inf else math.inf)
        for (name, model), cost in zip(models.items(), costs, strict=True)
    }
    assert select_trial(list(trials.values())) is trials[expected]
    assert select_trial(list(trials.values())[::-1]) is trials[expected]


def test_difference_within_standard_errors_is_a_tie(models: dict[str, SymmetrisedNetwork]) -> None:
    """Costs measured for two oscillators: the group is 98 nats worse, with errors 74 and 177."""
    short = Trial(-77_612.3, models["rounded"], _trained(models["rounded"]), 74.3)
    group = Trial(-77_514.5, models["group"], _trained(models["group"]), 176.6)
    assert abs(short.cost - group.cost) < TIE_STANDARD_ERRORS * math.hypot(short.error, group.error)
    assert select_trial([short, group]) is group
    # The same rule selects among the final networks and the winner of the short trials.
    first, plain_trial = _trained(models["none"]), Trial(-75_115.7, models["none"], None, 25.5)
    winner = Trial(-76_364.8, models["rounded"], _trained(models["rounded"]), 73.6)
    result = _combine(first, [plain_trial, winner], [short, group], winner)
    assert result is group.trained and result.model is models["group"]
    assert [t["group"] for t in result.trials] == [0, 0, 0, 1]


def _two_bodies(names: tuple[str, ...]) -> SymmetrisedNetwork:
    """Return a model with some of the seven quantities of two bodies, rounded."""
    known = nbody_invariants(2, 2)
    index = [known.names.index(name) for name in names]
    A, b = known.A[index], known.b[index]
    network = HamiltonianNetwork(8, width=4, generator=torch.Generator().manual_seed(0))
    conserved = canonical_span(A, b, Quadratic.fixed(A, b))
    return SymmetrisedNetwork(network, conserved, FlowTimes(len(index), "ball"))


def test_ties_between_counts_go_to_closed_spans() -> None:
    names = nbody_invariants(2, 2).names
    seven, six = _two_bodies(names), _two_bodies(names[:-1])  # not closed without P_y^2
    plain = SymmetrisedNetwork(seven.network)
    learned = SymmetrisedNetwork(seven.network, Quadratic.fixed(torch.eye(8)[None]))
    assert Trial(0.0, seven, None).is_closed and not Trial(0.0, six, None).is_closed
    assert not Trial(0.0, plain, None).is_closed and not Trial(0.0, learned, None).is_closed
    # Costs measured for three bodies: 565 nats apart, with errors 405 and 488.
    six_trial, seven_trial = (
        Trial(-204_581.0, six, None, 405.2),
        Trial(-204_016.0, seven, None, 487.5),
    )
    loser = Trial(-179_754.0, plain, None, 30.0)
    assert select_trial([loser, six_trial, seven_trial]) is seven_trial
    worse = Trial(-200_000.0, seven, None, 487.5)  # no tie
    assert select_trial([loser, six_trial, worse]) is six_trial
    learned_trial = Trial(-204_581.0, learned, None, 405.2)
    assert select_trial([loser, learned_trial, seven_trial]) is seven_trial
    # The two momenta are closed, too: the cost decides.
    momenta = Trial(-204_300.0, _two_bodies(names[:2]), None, 400.0)
    assert select_trial([six_trial, momenta, seven_trial]) is momenta
    # Against no quantities the cost decides.
    plain_trial = Trial(-204_581.0, plain, None, 400.0)
    assert select_trial([plain_trial, seven_trial]) is plain_trial


def test_equal_costs_are_a_tie(models: dict[str, SymmetrisedNetwork]) -> None:
    rounded, group = Trial(1.0, models["rounded"], None), Trial(1.0, models["group"], None)
    assert rounded.ties_with(group) and select_trial([rounded, group]) is group
    diverged = Trial(math.inf, models["group"], None)
    assert not rounded.ties_with(diverged)
    assert diverged.ties_with(Trial(math.inf, models["none"], None))
    group.cost = math.nextafter(1.0, 2.0)
    assert select_trial([rounded, group]) is rounded


def test_finalist_includes_a_narrow_loser_to_no_quantities(
    models: dict[str, SymmetrisedNetwork],
) -> None:
    free = models["learned"]
    plain_trial = Trial(50.0, models["none"], _trained(models["none"]))
    near, far = (
        Trial(50 + 100 * MAX_DEFICIT_PER_DATUM + difference, free, _trained(free))
        for difference in (-1, 1)
    )
    assert finalist([plain_trial, near], plain_trial, 100) is near
    assert finalist([plain_trial, far], plain_trial, 100) is None
    assert finalist([plain_trial, Trial(math.inf, free, None)], plain_trial, 100) is None
    better = Trial(10.0, free, _trained(free))
    assert finalist([plain_trial, better], better, 100) is better


def test_rounded_coefficients_are_trained_in_full_if_they_tie(
    models: dict[str, SymmetrisedNetwork],
) -> None:
    learned = Trial(10.0, models["learned"], _trained(models["learned"]), 5.0)
    rounded = Trial(20.0, models["rounded"], _trained(models["rounded"]), 5.0)
    diverged = Trial(math.inf, models["rounded"], None)
    assert rounded_rival([learned, rounded, diverged], learned) is rounded
    rounded.cost = 44.0  # 34 nats worse, with an error of 7 in the difference
    assert rounded_rival([learned, rounded, diverged], learned) is None
    assert rounded_rival([learned, diverged], learned) is None
    assert rounded_rival([learned, rounded], rounded) is None
