"""The simulator that a user gets is the most accurate one."""

import pytest
import torch

from symrazor.dynamics.conserving import ConservingSimulator
from symrazor.dynamics.delivery import candidates, linear_field, most_accurate
from symrazor.dynamics.fields import HamiltonianField
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.noise import noise_estimate
from symrazor.dynamics.rollouts import Rollouts, baselines, compare_rollouts
from symrazor.dynamics.systems import oscillators
from symrazor.dynamics.trajectories import Trajectories, observed_states, simulate, split


def test_linear_equations_have_the_flow_of_the_linear_map() -> None:
    matrix = torch.tensor([[0.0, 1.0], [-2.0, -0.1]], dtype=torch.float64)
    shift = torch.tensor([0.3, -0.2], dtype=torch.float64)
    start = torch.randn(9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    times = 0.2 * torch.arange(12, dtype=torch.float64)
    states = solve(lambda x: x @ matrix.mT + shift, start, times)
    field = linear_field(Trajectories.of(states, times))
    assert field is not None
    expected = torch.cat([shift[None], matrix.mT])
    torch.testing.assert_close(field.coefficients, expected, atol=1e-6, rtol=1e-6)


def test_no_linear_equations_for_a_map_that_reflects() -> None:
    """-x after each step is the flow of no real linear equation in one coordinate."""
    signs = (-1.0) ** torch.arange(12, dtype=torch.float64)
    states = torch.stack([signs * a for a in (1.0, 2.0, 3.0)])[..., None]
    states = torch.cat([states, 0.5 ** torch.arange(12.0).double().expand(3, -1)[..., None]], -1)
    assert linear_field(Trajectories.of(states, torch.arange(12.0))) is None


def _oscillator(stiffness: float, x: torch.Tensor) -> ConservingSimulator:
    """Return a simulator of p^2/2 + stiffness q^2/2."""
    library = Library("squares", ["q", "p"], [], [(0, 0), (1, 1)])
    parameters = torch.tensor([stiffness / 2, 0.5], dtype=torch.float64)
    return ConservingSimulator(HamiltonianField(library, parameters, parameters), [], 0.05, x)


def test_equations_are_compared_by_what_they_leave_of_whole_trajectories() -> None:
    """From noisy first states, the errors of a stiffness of 1 and of 1.02 do not differ clearly."""
    data = simulate(oscillators((1.0,)), 12, 39, 0.25, seed=3).with_noise(0.1**2, seed=4)
    deviation, x = torch.full((2,), 0.1, dtype=torch.float64), observed_states(data)
    models = {f"{k}": _oscillator(k, x) for k in (0.98, 1.0, 1.02)}
    equal = Rollouts([1.0], {name: [0.1] for name in models}, 0.0)
    assert most_accurate(models, equal, data, deviation) == "1.0"


def test_the_first_equations_win_ties() -> None:
    data = simulate(oscillators((1.0,)), 12, 39, 0.25, seed=3).with_noise(0.1**2, seed=4)
    deviation, x = torch.full((2,), 0.1, dtype=torch.float64), observed_states(data)
    tied = {"first": _oscillator(1.0001, x), "second": _oscillator(1.0, x)}
    rollouts = Rollouts([1.0], {"first": [0.11], "second": [0.1]}, 0.0)
    assert most_accurate(tied, rollouts, data, deviation) == "first"


def test_if_no_equations_reach_the_noise_rollouts_decide() -> None:
    data = simulate(oscillators((1.0,)), 12, 39, 0.25, seed=3).with_noise(1e-6, seed=4)
    deviation, x = torch.full((2,), 1e-3, dtype=torch.float64), observed_states(data)
    wrong = {"worse": _oscillator(1.6, x), "better": _oscillator(1.5, x)}
    for other in ([0.5, 0.49], [0.49, 0.5]):
        rollouts = Rollouts([1.0], dict(zip(wrong, [[e] for e in other], strict=True)), 0.0)
        assert most_accurate(wrong, rollouts, data, deviation) == min(wrong, key=rollouts.mean)


@pytest.mark.parametrize("noise", [0.002, 0.05])
def test_no_baseline_is_more_accurate(noise: float) -> None:
    data = simulate(oscillators((1.0,)), 30, 39, 0.25, seed=0).with_noise(noise**2, seed=1)
    findings, x = find_conserved(data), observed_states(data)
    deviation = noise_estimate(data).deviation(x)
    training, held_out = split(data, 0)
    models = candidates(findings, training, deviation, x)
    assert "linear equations" in models and "sparse regression of velocities" in models
    rollouts = compare_rollouts({**models}, held_out, deviation)
    chosen = most_accurate(models, rollouts, held_out, deviation)
    clean = simulate(oscillators((1.0,)), 20, 100, 0.25, seed=5)
    others = baselines(training, deviation)
    errors = compare_rollouts({"own": models[chosen], **others}, clean, deviation)
    assert errors.mean("own") <= 1.1 * min(errors.mean(name) for name in others)
