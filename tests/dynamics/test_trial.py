"""The one rule by which trials are decided: ties, and who is trained in full."""

import math

import pytest
import torch

from symrazor.dynamics.algebra import nbody_invariants
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.group import full_group
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.likelihoods import Noise
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.proposals import canonical_span, round_quantities
from symrazor.dynamics.selection import (
    MAX_DEFICIT_PER_DATUM,
    TIE_STANDARD_ERRORS,
    Trial,
    _combine,
    best_rounded,
    finalist,
    select_trial,
)
from symrazor.dynamics.trained import Trained


@pytest.fixture
def models() -> dict[str, SymmetrisedNetwork]:
    """The energy of an oscillator: no quantity, learned, with whole coefficients, its group."""
    network = HamiltonianNetwork(2, width=4, generator=torch.Generator().manual_seed(0))
    learned = SymmetrisedNetwork(
        network, Quadratic.fixed(torch.eye(2)[None]), FlowTimes(1, "cube", "quasi")
    )
    whole = round_quantities(learned)
    assert whole is not None
    group = full_group(whole, torch.randn(20, 2, generator=torch.Generator().manual_seed(1)))
    assert group is not None
    return {
        "none": SymmetrisedNetwork(network),
        "learned": learned,
        "whole": whole,
        "group": SymmetrisedNetwork(network, *group),
    }


def _trained(model: SymmetrisedNetwork) -> Trained:
    return Trained(model, Noise(), TrainConfig(), [{"step": 1.0, "seconds": 1.0}])


def test_records_tell_the_kinds_apart(models: dict[str, SymmetrisedNetwork]) -> None:
    trials = {name: Trial(1.0, model, None, 0.5) for name, model in models.items()}
    assert [t.exactness for t in trials.values()] == [0, 0, 1, 2]
    assert [t.count for t in trials.values()] == [0, 1, 1, 1]
    record = trials["group"].to_record()
    assert (record["rounded"], record["group"], record["steps"]) == (1.0, 1.0, 0)
    assert (trials["whole"].to_record()["group"], record["error"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        # none, learned, whole, group; the standard error of each is 10, of a difference 14.1
        ((500.0, 100.0, 90.0, 80.0), "group"),  # the least cost is also the most exact
        ((500.0, 100.0, 90.0, 120.0), "group"),  # a tie: 30 nats, within three errors
        ((500.0, 100.0, 90.0, 132.0), "group"),  # 42.0: just within
        ((500.0, 100.0, 90.0, 133.0), "whole"),  # 43.0: not any more
        ((500.0, 100.0, 140.0, 150.0), "whole"),  # the group is out, whole coefficients tie
        ((500.0, 100.0, 150.0, 150.0), "learned"),  # both are out
        ((80.0, 100.0, 90.0, 85.0), "none"),  # between numbers of quantities the cost decides
        ((95.0, 100.0, 90.0, 96.0), "group"),  # one quantity wins; then its own rule
        ((500.0, 100.0, math.inf, math.inf), "learned"),  # they diverged
        ((500.0, math.inf, math.inf, math.inf), "none"),
    ],
)
def test_a_tie_goes_to_the_most_exact(
    models: dict[str, SymmetrisedNetwork], costs: tuple[float, ...], expected: str
) -> None:
    trials = {
        name: Trial(cost, model, None, 10.0 if cost < math.inf else math.inf)
        for (name, model), cost in zip(models.items(), costs, strict=True)
    }
    assert select_trial(list(trials.values())) is trials[expected]
    assert select_trial(list(trials.values())[::-1]) is trials[expected]


def test_a_difference_of_half_an_error_is_a_tie(models: dict[str, SymmetrisedNetwork]) -> None:
    """As of two oscillators once: the group was 98 nats worse, with errors of 74 and 177."""
    short = Trial(-77_612.3, models["whole"], _trained(models["whole"]), 74.3)
    group = Trial(-77_514.5, models["group"], _trained(models["group"]), 176.6)
    assert abs(short.cost - group.cost) < TIE_STANDARD_ERRORS * math.hypot(short.error, group.error)
    assert select_trial([short, group]) is group
    # the last trainings are decided by the same rule, beside the winner of the short trials
    first, none = _trained(models["none"]), Trial(-75_115.7, models["none"], None, 25.5)
    winner = Trial(-76_364.8, models["whole"], _trained(models["whole"]), 73.6)
    done = _combine(first, [none, winner], [short, group], winner)
    assert done is group.trained and done.model is models["group"]
    assert [t["group"] for t in done.trials] == [0, 0, 0, 1]


def _whole(names: tuple[str, ...]) -> SymmetrisedNetwork:
    """Some of the seven quantities of two bodies, with whole coefficients."""
    known = nbody_invariants(2, 2)
    index = [known.names.index(name) for name in names]
    A, b = known.A[index], known.b[index]
    network = HamiltonianNetwork(8, width=4, generator=torch.Generator().manual_seed(0))
    made = canonical_span(A, b, Quadratic.fixed(A, b))
    return SymmetrisedNetwork(network, made, FlowTimes(len(index), "ball"))


def test_a_tie_of_different_numbers_goes_to_what_closes() -> None:
    names = nbody_invariants(2, 2).names
    seven, six = _whole(names), _whole(names[:-1])  # without P_y^2, to which P_x P_y turns
    none = SymmetrisedNetwork(seven.network)
    learned = SymmetrisedNetwork(seven.network, Quadratic.fixed(torch.eye(8)[None]))
    assert Trial(0.0, seven, None).is_closed and not Trial(0.0, six, None).is_closed
    assert not Trial(0.0, none, None).is_closed and not Trial(0.0, learned, None).is_closed
    # three bodies once: 565 nats, with errors of 405 and 488
    first, other = Trial(-204_581.0, six, None, 405.2), Trial(-204_016.0, seven, None, 487.5)
    lost = Trial(-179_754.0, none, None, 30.0)
    assert select_trial([lost, first, other]) is other
    assert select_trial([lost, first, Trial(-200_000.0, seven, None, 487.5)]) is first  # no tie
    assert select_trial([lost, Trial(-204_581.0, learned, None, 405.2), other]) is other
    few = _whole(names[:2])  # both momenta alone close too: then the cost decides
    assert select_trial([first, Trial(-204_300.0, few, None, 400.0), other]).model is few
    assert (
        select_trial([Trial(-204_581.0, none, None, 400.0), other]).model is none
    )  # nothing invented


def test_equal_costs_tie_without_errors(models: dict[str, SymmetrisedNetwork]) -> None:
    whole, group = Trial(1.0, models["whole"], None), Trial(1.0, models["group"], None)
    assert whole.ties_with(group) and select_trial([whole, group]) is group
    lost = Trial(math.inf, models["group"], None)
    assert not whole.ties_with(lost) and lost.ties_with(Trial(math.inf, models["none"], None))
    group.cost = math.nextafter(1.0, 2.0)
    assert select_trial([whole, group]) is whole


def test_who_loses_narrowly_to_none_is_trained_in_full(
    models: dict[str, SymmetrisedNetwork],
) -> None:
    free = models["learned"]
    none = Trial(50.0, models["none"], _trained(models["none"]))
    near, far = (
        Trial(50 + 100 * MAX_DEFICIT_PER_DATUM + by, free, _trained(free)) for by in (-1, 1)
    )
    assert finalist([none, near], none, 100) is near
    assert finalist([none, far], none, 100) is None
    assert finalist([none, Trial(math.inf, free, None)], none, 100) is None
    better = Trial(10.0, free, _trained(free))
    assert finalist([none, better], better, 100) is better


def test_a_group_is_made_of_whole_coefficients(models: dict[str, SymmetrisedNetwork]) -> None:
    learned = Trial(10.0, models["learned"], _trained(models["learned"]))
    whole = Trial(99.0, models["whole"], _trained(models["whole"]))
    diverged = Trial(math.inf, models["whole"], None)
    assert best_rounded([learned, whole, diverged], learned) is whole
    assert best_rounded([learned, diverged], learned) is learned
