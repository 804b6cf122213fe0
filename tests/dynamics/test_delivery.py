"""The simulator that a user gets is the most accurate one."""

import pytest
import torch

from symrazor.dynamics.delivery import candidates, linear_field, most_accurate
from symrazor.dynamics.invariants import find_conserved
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


def test_the_first_simulator_wins_ties_only() -> None:
    rollouts = Rollouts([1.0], {"own": [0.101], "a": [0.1], "b": [0.2]}, 0.0)
    assert most_accurate(["own", "a", "b"], rollouts) == "own"
    assert most_accurate(["b", "own", "a"], rollouts) == "a"


@pytest.mark.parametrize("noise", [0.002, 0.05])
def test_no_baseline_is_more_accurate(noise: float) -> None:
    data = simulate(oscillators((1.0,)), 30, 39, 0.25, seed=0).with_noise(noise**2, seed=1)
    findings, x = find_conserved(data), observed_states(data)
    deviation = noise_estimate(data).deviation(x)
    training, held_out = split(data, 0)
    models = candidates(findings, training, deviation, x)
    assert "linear equations" in models and "sparse regression of velocities" in models
    chosen = most_accurate(list(models), compare_rollouts({**models}, held_out, deviation))
    clean = simulate(oscillators((1.0,)), 20, 100, 0.25, seed=5)
    others = baselines(training, deviation)
    errors = compare_rollouts({"own": models[chosen], **others}, clean, deviation)
    assert errors.mean("own") <= 1.1 * min(errors.mean(name) for name in others)
