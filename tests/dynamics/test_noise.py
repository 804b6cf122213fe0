"""Noise estimates of trajectories against known noise."""

import pytest
import torch

from symrazor.dynamics.noise import noise_estimate, without_gaps
from symrazor.dynamics.systems import kepler, oscillators
from symrazor.dynamics.trajectories import Trajectories, divided_difference_weights, simulate


def test_noise_of_smooth_motion_is_recovered() -> None:
    data = simulate(oscillators((1.0, 3.0)), 40, 20, 0.2, seed=0).with_noise(0.03**2, seed=1)
    noise = noise_estimate(data)
    assert bool(noise.converged.all())
    assert noise.variance.sqrt().tolist() == pytest.approx([0.03] * 4, rel=0.12)


def test_fast_passages_do_not_inflate_the_noise() -> None:
    data = simulate(kepler(), 60, 40, 0.25, seed=0).with_noise(0.01**2, seed=1)
    # The mean of squared differences would give seven times the noise of the momenta.
    assert noise_estimate(data).variance.sqrt().tolist() == pytest.approx([0.01] * 4, rel=0.4)


def test_irregular_times_and_gaps() -> None:
    generator = torch.Generator().manual_seed(0)
    times = torch.rand(60, 30, generator=generator, dtype=torch.float64).sort(1).values * 6
    states = torch.stack([times.sin(), times.cos()], -1)
    data = Trajectories.of(states, times).with_noise(0.02**2, seed=1)
    data = Trajectories(data.states, data.times, torch.rand(60, 30, generator=generator) > 0.2)
    assert noise_estimate(data).variance.sqrt().tolist() == pytest.approx([0.02] * 2, rel=0.15)


def test_two_distant_states_have_no_finite_estimate() -> None:
    states = torch.randn(3, 2, 2, dtype=torch.float64)
    observed = torch.tensor([[True, False]] * 3)
    data = Trajectories(states, torch.tensor([[0.0, 1.0]] * 3), observed)
    assert bool(noise_estimate(data).variance.isinf().all())


def test_observed_states_come_first() -> None:
    times = torch.arange(3.0, dtype=torch.float64)[None]
    data = Trajectories(times[..., None], times, torch.tensor([[False, True, True]]))
    states, clock = without_gaps(data)
    assert states[0, :2, 0].tolist() == clock[0, :2].tolist() == [1.0, 2.0]
    assert bool(states[0, 2].isnan())


def test_weights_annihilate_polynomials() -> None:
    times = torch.tensor([0.0, 0.3, 0.4, 1.0, 1.7], dtype=torch.float64)
    weights = divided_difference_weights(times)
    assert float(weights.norm()) == pytest.approx(1)
    for power in range(4):
        assert float(weights @ times**power) == pytest.approx(0, abs=1e-12)
