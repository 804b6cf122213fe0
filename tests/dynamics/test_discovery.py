"""From trajectories to named conserved quantities."""

import json
import math
import re

import numpy as np
import pytest
import torch

from symrazor.dynamics import systems
from symrazor.dynamics.algebra import euclidean, unitary
from symrazor.dynamics.config import DiscoverConfig
from symrazor.dynamics.discovery import (
    as_trajectories,
    choose_stride,
    choose_units,
    discover,
    interleave,
)
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.network_result import (
    describe_quantities,
)
from symrazor.dynamics.systems import nbody
from symrazor.dynamics.trajectories import (
    Trajectories,
    simulate,
)


def test_scaled_states_and_rates_have_unit_size() -> None:
    data = simulate(systems.oscillators(), 8, 6, 0.2, seed=0)
    for size, time_scale in ((1.0, 1.0), (1e200, 1e-6), (1e-200, 1e6)):
        data_in_units = as_trajectories(
            size * data.states.numpy(), (time_scale * data.times[0]).numpy(), False
        )
        scaled = choose_units(data_in_units).to_scaled(data_in_units)
        assert float(scaled.states.square().mean()) == pytest.approx(1.0)
        rates = scaled.states.diff(dim=1) / scaled.times.diff(dim=1)[..., None]
        assert float(rates.square().mean()) == pytest.approx(1.0)


def test_time_unit_ignores_very_short_and_very_long_steps() -> None:
    """An oscillator of frequency 1 has the time unit 1."""
    gaps = torch.tensor([0.2, 1e-6, 0.2, 0.3, 0.25, 60.0, 0.2, 0.2], dtype=torch.float64)
    times = torch.cat([torch.zeros(1), gaps.cumsum(0)]).double()
    system = systems.oscillators()
    start = system.start(40, torch.Generator().manual_seed(0))
    data = Trajectories.of(solve(system.field, start, times), times).with_noise(1e-4, seed=1)
    assert choose_units(data).time == pytest.approx(1.0, rel=0.05)
    result = discover(data, minutes=0.05, steps=2, progress=False, network=True).network
    assert result is not None
    assert result.n_data == 7 * 32  # the long step is left out, and so is a fifth of the data


@pytest.mark.parametrize(
    ("dt", "length", "every"), [(0.25, 16, 1), (2.0, 16, 1), (1e-3, 800, 128), (1e-3, 40, 8)]
)
def test_densely_recorded_states_get_a_larger_stride(dt: float, length: int, every: int) -> None:
    """A step should change a state by at least 0.08 of its size beyond the noise, here 0.05."""
    data = simulate(systems.oscillators(), 20, length - 1, dt, seed=0).with_noise(2.5e-3, seed=1)
    stride = choose_stride(data)
    assert stride == every
    interleaved = interleave(data, stride)
    assert interleaved.states.shape == (20 * stride, length // stride, 2)
    for values, all_values in ((interleaved.states, data.states), (interleaved.times, data.times)):
        first = all_values[3, 1::stride][: length // stride] if stride > 1 else all_values[3]
        torch.testing.assert_close(values[3 * stride + int(stride > 1)], first)
    assert bool((interleaved.times.diff(dim=1) > 0).all())


def test_every_second_state_missing() -> None:
    data = simulate(systems.oscillators(), 6, 31, 0.1, seed=0)
    states = data.states.clone()
    states[:, 1::2] = torch.nan
    holes = Trajectories.of(states, data.times)
    assert choose_stride(holes) == 2
    result = discover(holes, minutes=0.05, steps=2, progress=False, network=True)
    assert result.network is not None and result.network.n_data == 5 * 15


def test_long_time_steps_use_several_integrator_steps() -> None:
    data = simulate(systems.oscillators(), 8, 6, 2.0, seed=0)
    result = discover(data, minutes=0.05, steps=2, progress=False, network=True).network
    assert result is not None
    longest = 2.0 / result.units.time
    assert result.learned.config.integrator == "rk4"
    assert result.learned.config.substeps == math.ceil(longest / 1.0) > 1


def test_as_trajectories_validates_its_input() -> None:
    data = simulate(systems.oscillators(), 4, 6, 0.2, seed=0)
    assert as_trajectories(data, None, False) is data
    with pytest.raises(ValueError, match="Trajectories have their own times"):
        as_trajectories(data, data.times, False)
    with pytest.raises(ValueError, match="Pass the times of the states"):
        as_trajectories(data.states, None, False)
    with pytest.raises(ValueError, match="got list .* Pad trajectories of unequal length"):
        as_trajectories([[[1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]]], data.times[0], False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="all are missing"):
        choose_units(as_trajectories(torch.nan * data.states, data.times, False))
    with pytest.raises(ValueError, match="States are constant in time"):
        rows = torch.tensor([[1.0, 2.0], [-1.0, 3.0]])[:, None].expand(2, 3, 2)
        choose_units(as_trajectories(rows, torch.arange(3.0), False))


def test_quantities_that_drift_more_than_noise_explains_are_doubtful() -> None:
    """A pendulum does not conserve rotations; momenta near zero drift by noise only."""
    data = simulate(systems.pendulum().with_normal_start(1.5, 1.0), 30, 20, 0.3, seed=0)
    units = choose_units(data)
    accepted, doubtful, _ = describe_quantities(
        unitary(1).quadratic(), units, units.to_scaled(data)
    )
    assert not accepted and doubtful[0]["drift"] > 0.3
    q, p = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(0)).double()
    p = p - p.view(20, 2, 2).mean(1, keepdim=True).expand(20, 2, 2).reshape(20, 4)
    system = nbody(2, 2)
    start = torch.cat([q, p], 1)
    still = simulate(system.with_start(lambda n, g: start[:n]), 20, 8, 0.2, seed=0).with_noise(
        1e-4, seed=1
    )
    units = choose_units(still)
    inner = units.to_scaled(still)
    accepted, doubtful, _ = describe_quantities(euclidean(2, 2).quadratic(), units, inner)
    assert [entry["name"] for entry in accepted] == list(euclidean(2, 2).names) and not doubtful
    assert accepted[0]["drift"] > 0.5


def test_drifting_quantities_are_rejected_after_a_short_training() -> None:
    """Noise-free trajectories expose the drift of whatever four steps select."""
    data = simulate(systems.pendulum().with_normal_start(1.5, 1.0), 10, 12, 0.2, seed=0)
    result = discover(data, minutes=0.05, steps=4, progress=False, network=True)
    assert result.network is not None
    assert all(entry["drift"] <= 0.15 for entry in result.network.conserved)


def test_energy_of_a_pendulum_in_seconds() -> None:
    """No network is trained; the simulator follows the true motion and keeps the energy."""
    system = systems.pendulum().with_normal_start(1.2, 0.8)
    data = simulate(system, 30, 24, 0.25, seed=0).with_noise(4e-4, seed=1)
    result = discover(data, progress=False)
    assert result.network is None and result.is_decided
    assert result.verdict.startswith("Energy is conserved: 0.5 p^2 - cos q; no other within the")
    (entry,) = json.loads(json.dumps(result.to_dict()))["conserved"]
    assert entry["name"] == "energy" and entry["by"] == "noise test"
    value, error = entry["coefficients"]["p^2"]
    assert abs(value - 0.5) < 4 * error < 0.02
    assert result.model_name.startswith("equations of motion")
    own, *others = (result.rollouts.mean(name) for name in result.rollouts.errors)
    assert others and own < 0.5 * min(others)
    test = simulate(system, 10, 40, 0.25, seed=5)
    x = test.states[:, 0]
    for _ in range(40):
        x = result.simulator()(x, 0.25)
    torch.testing.assert_close(x, test.states[:, -1], rtol=0, atol=0.1)
    start, end = system.energy(test.states[:, 0]), system.energy(x)
    torch.testing.assert_close(end, start, rtol=0, atol=0.02)


def test_names_and_group_of_isotropic_oscillators() -> None:
    data = simulate(systems.oscillators([1.0, 1.0]), 30, 24, 0.25, seed=0).with_noise(4e-4, seed=1)
    result = discover(data, progress=False)
    names = [entry["name"] for entry in result.conserved]
    assert names[0] == "energy" and len(names) == 3
    assert result.noether.group == "U(2)" and "They generate U(2)." in result.verdict
    constants = np.array(result.to_dict()["structure_constants"])
    np.testing.assert_allclose(constants, -constants.transpose(1, 0, 2), atol=1e-9)


def test_unequal_masses_keep_both_angular_momenta() -> None:
    """That of the centre of mass has coefficients 1, 1 / 1.7 and 0.7 / 1.7."""
    system = systems.nbody(bodies=2, dimension=2, masses=(1.0, 1.7))
    data = simulate(system, 40, 19, 0.2, seed=0).with_noise(1e-6, seed=1)
    result = discover(data, progress=False, network=False)
    names = [entry["name"] for entry in result.conserved]
    assert names == ["momentum", "momentum", "angular momentum", ""]
    sizes = {abs(c) for c, _ in result.conserved[-1]["coefficients"].values() if abs(c) > 0.05}
    assert {min((1, 1 / 1.7, 0.7 / 1.7), key=lambda c: abs(c - size)) for size in sizes} == {
        1,
        1 / 1.7,
        0.7 / 1.7,
    }


def test_four_species_are_not_called_positions_and_momenta() -> None:
    """Their logarithms are conserved, but nothing is known about a group or an energy."""
    rates = torch.tensor(
        [[0, -1.0, 0, -0.5], [1.0, 0, -0.8, 0], [0, 0.8, 0, -0.6], [0.5, 0, 0.6, 0]]
    ).double()
    balance = torch.tensor([1.0, 1.2, 0.9, 1.1]).double()
    uniform = torch.rand(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    times = 0.25 * torch.arange(30, dtype=torch.float64)
    states = solve(lambda x: x * ((x - balance) @ rates.mT), 0.5 + 1.3 * uniform, times)
    data = Trajectories.of(states, times).with_noise(4e-6, seed=1)
    result = discover(data, progress=False, network=False)
    (entry,) = result.conserved
    assert entry["name"] == "" and not result.noether.group and not result.noether.masses
    for name, weight in zip(("q1", "q2", "p1", "p2"), balance.tolist(), strict=True):
        ratio = entry["coefficients"][f"log {name}"][0] / entry["coefficients"][name][0]
        assert ratio == pytest.approx(-weight, rel=0.01)


def test_damped_oscillator_conserves_nothing_and_decays() -> None:
    matrix = torch.tensor([[0.0, 1.0], [-1.0, -0.3]], dtype=torch.float64)
    start = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    times = 0.25 * torch.arange(24, dtype=torch.float64)
    data = Trajectories.of(solve(lambda x: x @ matrix.mT, start, times), times)
    result = discover(data.with_noise(1e-4, seed=1), progress=False)
    assert result.conserved == [] and result.is_decided
    assert result.verdict.startswith("No quantity within the library is conserved. ")
    rates = [float(rate) for rate in re.findall(r"at rate ([\d.]+\d)", result.verdict)]
    assert rates == pytest.approx([0.3, 0.3], rel=0.02)
    assert "The volume of phase space shrinks" in result.verdict


def test_evidence_judges_few_short_trajectories() -> None:
    data = simulate(systems.oscillators(), 7, 4, 0.2, seed=0).with_noise(1e-3, seed=1)
    shares: list[float] = []
    result = discover(
        data.states,
        data.times[0],
        minutes=0.05,
        seed=0,
        steps=8,
        progress=lambda share, _: shares.append(share),
    )
    assert result.findings is None and result.network is not None and not result.is_decided
    assert result.verdict.startswith("Undecided by the noise test: 7 trajectories have 4 states")
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    network = json.loads(json.dumps(result.to_dict()))["network"]
    assert {"evidence", "held_out_mse", "trials", "structure_constants"} <= set(network)
    moved = result.simulator()(data.states[:, 0], 0.2)
    assert moved.shape == (7, 2) and moved.dtype == torch.float64


def test_discover_warns_about_positions_and_validates_its_input() -> None:
    data = simulate(systems.oscillators(), 6, 6, 0.2, seed=0)
    with pytest.warns(UserWarning, match="momenta are finite differences"):
        result = discover(data.states[..., :1], data.times[0], positions=True, steps=4)
    assert result.names == ["q", "p"]
    with pytest.raises(ValueError, match="minutes must be positive"):
        discover(data.states, data.times[0], minutes=0)
    with pytest.raises(ValueError, match="even number of entries, got 1"):
        discover(data.states[..., :1], data.times[0])
    with pytest.raises(ValueError, match="Coordinates 1 and 3 are the same up to unit and offset"):
        discover(torch.cat([data.states, 2 * data.states[..., :1] + 1], 2), data.times[0])
    constant = torch.cat([data.states, torch.ones_like(data.states[..., :1])], 2)
    with pytest.raises(ValueError, match="Coordinate 3 is constant. Remove it"):
        discover(constant, data.times[0])
    for wrong in (0 * data.states, 0 * data.states + 3):
        with pytest.raises(ValueError, match="Positions or momenta are constant"):
            discover(wrong, data.times[0])
    with pytest.raises(ValueError, match="complex numbers"):
        discover(data.states + 1j, data.times[0])
    with pytest.raises(ValueError, match="Device 'tpu' is not available"):
        discover(data, device="tpu")
    with pytest.raises(ValueError, match="count must be at least 1"):
        discover(data, count=0)
    with pytest.raises(ValueError, match="Unknown option .hours.. Options: minutes"):
        discover(data, hours=1)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        discover(data, config=DiscoverConfig(minutes=1), steps=0)
