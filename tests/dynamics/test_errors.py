"""Error messages, masked states and very short trajectories."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from symrazor.dynamics import analysis, systems
from symrazor.dynamics.algebra import translations, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.discovery import as_trajectories, choose_units
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.network_result import ScaledSimulator, describe_quantities
from symrazor.dynamics.observables import AnyFunctions
from symrazor.dynamics.trained import Simulator, long_rollout
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Trajectories, simulate, transitions

OSCILLATOR = systems.oscillators()
DATA = simulate(OSCILLATOR, 5, 4, 0.2, seed=0)
STATES, TIMES = DATA.states, DATA.times[0]


def _train(width: int = 2, horizon: int = 1, **changes: Any) -> Any:
    model = SymmetrisedNetwork(HamiltonianNetwork(width, width=4))
    return train(model, transitions(DATA, horizon=horizon), TrainConfig(steps=1, **changes))


CASES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: Trajectories.of(STATES, TIMES, torch.ones(2, 2).bool()),
        r"shape \[5, 5\], got",
    ),
    (lambda: Trajectories.of(STATES, TIMES, torch.ones(5, 5)), "got torch.float32"),
    (lambda: Trajectories.of(STATES, torch.tensor([0.0, 1, 2, 3, torch.inf])), "rows 3 and 4"),
    (lambda: transitions(DATA, noise=-1e-3), "noise variance must not be negative"),
    (lambda: DATA.with_noise(-1e-3, seed=0), "noise variance must not be negative"),
    (lambda: simulate(OSCILLATOR, 0, 4, 0.2, seed=0), "needs count >= 1"),
    (lambda: simulate(OSCILLATOR, 1, 4, -0.2, seed=0), "dt > 0"),
    (lambda: TrainConfig(target="derivatives"), "target must be .rollout"),  # type: ignore[arg-type]
    (lambda: TrainConfig(batch_size=0), "batch_size must be at least 1"),
    (lambda: TrainConfig(minutes=-1.0), "minutes must be positive"),
    (lambda: _train(width=4), "states of 4 entries, the data have 2"),
    (lambda: _train(horizon=3, target="derivative"), "windows of 3 steps"),
    (
        lambda: analysis.parallelness(unitary(1).generators(), unitary(2)),
        "have 2 variables",
    ),
    (lambda: Simulator(_train())(torch.zeros(3, 4), 0.5), r"\[\.\.\., 2\], got \[3, 4\]"),
    (lambda: Simulator(_train())(torch.zeros(3, 2), torch.nan), "time must be finite"),
    (
        lambda: AnyFunctions([lambda x: x[..., 0], lambda x: x])(STATES),
        "Function 1 must return",
    ),
    (lambda: long_rollout(_train(), STATES[0, 0], 0.2, 3), r"initial states \[b, 2n\]"),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_invalid_arguments_raise(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_simulators_return_floats_for_integer_states() -> None:
    simulator = Simulator(_train())
    scaled = ScaledSimulator(simulator, choose_units(DATA))
    integers = torch.tensor([[2, 1], [0, 3]])
    for module in (simulator, scaled):
        expected = module(integers.double(), 0.5)
        torch.testing.assert_close(module(integers, torch.tensor(0.5)), expected, check_dtype=False)


def test_masked_positions_give_no_velocity() -> None:
    """A masked state is not used for the velocities of its neighbours."""
    observed = torch.ones(5, 5, dtype=torch.bool)
    observed[0, 2] = False
    positions = STATES[..., :1].clone()
    positions[0, 2] = 1e6
    result = as_trajectories(Trajectories(positions, DATA.times, observed), None, positions=True)
    assert not result.observed[0, 1:4].any() and result.observed[1:].all()
    assert float(result.states[result.observed].abs().max()) < 1e2


def test_two_states_per_trajectory_do_not_excuse_drift_as_noise() -> None:
    """With two states all motion could be noise; the momentum still counts as drifting."""
    short = simulate(OSCILLATOR, 40, 1, 0.4, seed=0)
    units = choose_units(short)
    accepted, doubtful, _ = describe_quantities(
        translations(1, 1).quadratic(), units, units.to_scaled(short)
    )
    assert not accepted and doubtful[0]["drift"] > 0.15
