"""What the pieces of `symrazor.dynamics` refuse, and what masks and short records mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from symrazor.dynamics import analysis, systems
from symrazor.dynamics.algebra import translations, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.observables import AnyFunctions
from symrazor.dynamics.result import describe_quantities
from symrazor.dynamics.trained import ScaledSimulator, Simulator, long_rollout
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Trajectories, simulate, transitions
from symrazor.dynamics.units import as_trajectories, choose_units

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
    (lambda: TrainConfig(target="derivatives"), "target must be rollout"),  # type: ignore[arg-type]
    (lambda: TrainConfig(batch_size=0), "batch_size must be at least 1"),
    (lambda: TrainConfig(minutes=-1.0), "minutes must be positive"),
    (lambda: _train(width=4), "states of 4 entries.*got 2"),
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
def test_refused_with_the_reason(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_simulators_keep_fractions_of_whole_numbers() -> None:
    simulator = Simulator(_train())
    own = ScaledSimulator(simulator, choose_units(DATA))
    whole = torch.tensor([[2, 1], [0, 3]])
    for one in (simulator, own):
        expected = one(whole.double(), 0.5)
        torch.testing.assert_close(one(whole, torch.tensor(0.5)), expected, check_dtype=False)


def test_masked_positions_are_not_used() -> None:
    """A state that is there but masked makes no velocity."""
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[0, 2] = False
    wild = STATES[..., :1].clone()
    wild[0, 2] = 1e6
    found = as_trajectories(Trajectories(wild, DATA.times, seen), None, positions=True)
    assert not found.observed[0, 1:4].any() and found.observed[1:].all()
    assert float(found.states[found.observed].abs().max()) < 1e2


def test_two_states_are_no_excuse_for_a_drift() -> None:
    """Then all motion might be noise; the momentum of an oscillator is not conserved for that."""
    short = simulate(OSCILLATOR, 40, 1, 0.4, seed=0)
    own = choose_units(short)
    holds, doubtful, _ = describe_quantities(
        translations(1, 1).quadratic(), own, own.to_scaled(short)
    )
    assert not holds and doubtful[0]["drift"] > 0.15
