"""From trajectories in files to named conserved quantities and figures."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from symrazor.dynamics import figures, systems
from symrazor.dynamics.algebra import Algebra, euclidean, nbody_invariants, unitary
from symrazor.dynamics.config import DiscoverConfig, TrainConfig
from symrazor.dynamics.discovery import (
    as_trajectories,
    choose_stride,
    choose_units,
    discover,
    interleave,
)
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.network_result import (
    NetworkResult,
    Units,
    describe_quantities,
    formula,
    name_quantities,
)
from symrazor.dynamics.systems import nbody
from symrazor.dynamics.trained import Noise, Trained
from symrazor.dynamics.trajectories import (
    Trajectories,
    read_trajectories,
    simulate,
    with_velocities,
)


def test_npz_and_csv_give_equal_trajectories(tmp_path: Path) -> None:
    data = simulate(systems.oscillators(), 3, 4, 0.2, seed=0)
    np.savez(tmp_path / "a.npz", states=data.states, times=data.times[0])
    lines = ["trajectory,time,q1,p1"]
    for b in range(3):
        for t in range(5):
            row = [b, *data.times[b, t : t + 1].tolist(), *data.states[b, t].tolist()]
            lines.append(",".join(repr(cell) for cell in row))
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    for name in ("a.npz", "a.csv"):
        read = read_trajectories(tmp_path / name)
        torch.testing.assert_close(read.states, data.states)
        torch.testing.assert_close(read.times, data.times)
    short = "\n".join([*lines[:8], "1,0.4,,"])  # trajectories of five and three states
    (tmp_path / "b.csv").write_text(short)
    read = read_trajectories(tmp_path / "b.csv")
    assert read.observed.sum(1).tolist() == [5, 2]
    assert (read.times.diff(dim=1) > 0).all()
    reversed_rows = "\n".join([lines[0], *reversed(lines[1:])])  # rows are sorted by time
    (tmp_path / "c.csv").write_text(reversed_rows.replace(",", ";"))
    read = read_trajectories(tmp_path / "c.csv")
    torch.testing.assert_close(read.states, data.states.flip(0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "k,t,q,p\n0,0.0,1,2\n0,1.0,x,2\n", "column 'q', data row 2: not a number"),
        ("a.csv", "k,t,q,p\n0,0.0,1\n", "row 2: 3 fields, but the first row has 4"),
        ("a.csv", "k,t,q,p\n", "a.csv has fewer than two rows"),
        (
            "a.csv",
            "k,t,q,p\n0,1.0,1,2\n0,1.0,1,2\n",
            "rows 1 and 2: .* at time 1",
        ),
        ("a.csv", "k,s,q,p\n0,1.0,1,2\n0,1.0,1,2\n", "has no column 'time'"),
        ("a.txt", "", "must be in a .npz or .csv file"),
        ("a.csv", "0,0.0,1,2\n0,0.1,1,2\n", "needs a header .* starts with '0,0.0,1,2'"),
        ("a.npz", "junk", "a.npz as an .npz file with plain numbers"),
    ],
)
def test_invalid_files_raise(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_trajectories(tmp_path / name)


def test_npz_without_times_or_numbers_raises(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", states=np.zeros((2, 3, 2)))
    with pytest.raises(ValueError, match="needs arrays 'states' and 'times', but has states"):
        read_trajectories(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", states=np.array([["a"]]), times=np.zeros(1))
    with pytest.raises(ValueError, match="'states' must hold numbers"):
        read_trajectories(tmp_path / "b.npz")


def test_csv_that_is_not_utf8_raises(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"k,t,q,p\n0,0,\xff,1\n")
    with pytest.raises(ValueError, match="a.csv as a UTF-8 CSV file"):
        read_trajectories(str(tmp_path / "a.csv"))


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


def test_formula_is_relative_to_centre_and_weighted_by_scale() -> None:
    """Both terms of (q - 10)^2 / 200 + 50 p^2 are equally large with scales 11 and 0.1."""
    A = torch.diag(torch.tensor([0.01, 100.0]).double())
    b = torch.tensor([-0.1, 0.0]).double()
    centre, scale = torch.tensor([10.0, 0.0]).double(), torch.tensor([11.0, 0.1]).double()
    assert formula(A, b, centre, scale) == "0.005 (q1 - 10)^2 + 50 p1^2"


def test_quantities_of_centred_states_in_user_coordinates() -> None:
    """The energy of an oscillator around q = 10 is constant up to scale in user coordinates."""
    data = simulate(systems.oscillators(), 8, 6, 0.2, seed=0)
    shifted = data.states + torch.tensor([10.0, 0.0])
    units = choose_units(as_trajectories(shifted, data.times[0], False))
    assert float(units.centre[0]) == pytest.approx(10, abs=0.5) and float(units.centre[1]) == 0
    x = units.to_scaled(as_trajectories(shifted, data.times[0], False)).states
    centre, scale = units.centre[0], units.scale
    q, p = (x * scale + units.centre).unbind(-1)
    A = torch.diag(scale.square())  # of ((q - 10)^2 + p^2) / 2, scaled
    b = torch.stack([(centre - 10) * scale[0], 0 * centre])
    inner = 0.5 * torch.einsum("...i,ij,...j->...", x, A, x) + x @ b
    matrix, linear = units.to_user(A, b)
    states = torch.stack([q, p], -1)
    outer = 0.5 * torch.einsum("...i,ij,...j->...", states, matrix, states) + states @ linear
    ratio = outer.diff(dim=0) / inner.diff(dim=0)
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))


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


def test_finite_differences_are_exact_for_a_parabola() -> None:
    t = torch.tensor([0.0, 0.1, 0.3, 0.4, 0.6], dtype=torch.float64)
    q = (3 * t**2 - t)[None, :, None]
    states = with_velocities(q, t)
    torch.testing.assert_close(states[0, 1:-1, 1], (6 * t - 1)[1:-1])
    assert states.shape == (1, 5, 2)
    with pytest.raises(ValueError, match="times >= 3"):
        with_velocities(q[:, :2], t[:2])


def test_formula_shows_the_largest_terms() -> None:
    A = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert formula(A, torch.tensor([0.0, -0.7])) == "1 q1^2 - 0.7 p1 + 0.5 p1^2"
    total = "0.5 q1^2 + 0.5 q2^2 + 0.5 q3^2 + 0.5 p1^2 + ..."  # incomplete
    assert formula(torch.eye(6), torch.zeros(6)) == total


@pytest.mark.parametrize(
    "known", [unitary(2), unitary(3), nbody_invariants(3, 2), nbody_invariants(2, 3)]
)
def test_name_quantities_recovers_the_names_of_a_mixed_algebra(known: Algebra) -> None:
    """Names and quantities are recovered from a random mixture."""
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(len(known), len(known), generator=g, dtype=torch.float64)
    A, b = torch.einsum("km,mij->kij", mix, known.A), mix @ known.b
    named, overlaps = name_quantities(A, b)
    assert named.names == known.names
    assert overlaps == pytest.approx([1.0] * len(known))
    for matrix, expected in zip(named.A, known.A, strict=True):
        torch.testing.assert_close(matrix * expected.norm(), expected * matrix.norm())


def test_unknown_quantities_get_a_formula() -> None:
    zero = torch.zeros(1, 2, dtype=torch.float64)
    named, overlaps = name_quantities(torch.diag(torch.tensor([1.0, -1.0]).double())[None], zero)
    assert named.names == ("",) and overlaps == [0.0]
    assert formula(named.A[0], named.b[0]) == "0.35 q1^2 - 0.35 p1^2"
    named, _ = name_quantities(torch.diag(torch.tensor([-1.0, -4.0]).double())[None], zero)
    assert named.names == ("energy-like",)
    assert formula(named.A[0], named.b[0]) == "0.49 p1^2 + 0.12 q1^2"


def test_described_quantities_are_in_user_units() -> None:
    data = simulate(systems.oscillators(), 6, 6, 0.2, seed=0)
    trajectories = as_trajectories(data.states * torch.tensor([10.0, 0.1]), data.times[0], False)
    scale = choose_units(trajectories)
    accepted, doubtful, algebra = describe_quantities(
        unitary(1).quadratic(), scale, scale.to_scaled(trajectories)
    )
    (entry,) = (*accepted, *doubtful)
    assert entry["name"] == "energy (rotation of phase space)"
    A = np.array(entry["matrix"])
    ratio = float(scale.scale[0] / scale.scale[1]) ** 2
    assert A[1, 1] / A[0, 0] == pytest.approx(ratio, rel=1e-4)
    assert algebra == {"closure": 0.0, "structure_constants": [[[0.0]]]}
    assert describe_quantities(None, scale, data)[0] == []
    entries, _, algebra = describe_quantities(unitary(2).quadratic(), choose_units(_two()), _two())
    assert algebra["closure"] == pytest.approx(0.0, abs=1e-9)
    constants = np.array(algebra["structure_constants"])
    np.testing.assert_allclose(constants, -constants.transpose(1, 0, 2), atol=1e-9)
    assert all(entry["drift"] < 1e-6 for entry in entries)


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


def _two() -> Trajectories:
    return simulate(systems.oscillators([1.0, 1.0]), 6, 6, 0.2, seed=0)


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


def test_animations_are_gif_files_that_move(tmp_path: Path) -> None:
    data = simulate(systems.oscillators(), 2, 7, 0.2, seed=0)
    motion = data.states.transpose(0, 1)
    file = figures.motion_animation({"true": motion, "same": motion}, tmp_path / "m.gif")
    with Image.open(file) as picture:
        assert picture.format == "GIF" and picture.n_frames == 8
        panels = np.asarray(picture.convert("RGB"))
        half = panels.shape[1] // 2
        picture.seek(4)
        later = np.asarray(picture.convert("RGB"))
    assert (panels != later).any(-1).sum() > 20  # it moves
    assert panels[:, :half].shape == panels[:, half : 2 * half].shape
    with pytest.raises(ValueError, match=r"must have the same length, got \[5, 8\]"):
        figures.motion_animation({"a": motion, "b": motion[:5]}, tmp_path / "x.gif")


def test_animation_panels_share_axis_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    panels = figures._panels
    monkeypatch.setattr(figures, "_panels", lambda *size: drawn.append(panels(*size)) or drawn[-1])
    angle = torch.linspace(0.0, 3.0, 4)[:, None]
    true = torch.stack([100 + angle.cos(), angle.sin()], dim=-1)  # centred far from zero
    for other, widest in ((true / 1.001, 2.5), (50 * true, 4.5), (true[:1].expand(4, 1, 2), 2.3)):
        figures.motion_animation({"true": true, "learned": other}, tmp_path / "m.gif")
        left, right = drawn[-1][1]
        assert left.get_xlim() == right.get_xlim() and left.get_ylim() == right.get_ylim()
        low, high = left.get_xlim()
        assert low < 99.01 and high > 101 and high - low < widest
    still = torch.ones(3, 1, 2)
    figures.motion_animation({"true": still}, tmp_path / "m.gif")
    low, high = drawn[-1][1][0].get_xlim()
    assert low < 1 < high


def _verdict(names: list[str], drifts: list[float], doubtful: list[str], margin: float) -> str:
    """Return the verdict for entries with these names, and the log odds `margin`."""
    bounds = {"learned": 0.0, "plain": margin / 10}
    learned, plain = (
        Trained(SymmetrisedNetwork(HamiltonianNetwork(2, width=2)), Noise(), TrainConfig())
        for _ in bounds
    )
    learned.bound, plain.bound = ({"neg_elbo": value} for value in bounds.values())
    entries = [
        {"name": name, "formula": "0.5 q1^2 + 0.5 p1^2", "drift": drift}
        for name, drift in zip(names, drifts, strict=True)
    ]
    unconfirmed = [{"name": name, "formula": name, "drift": 0.6} for name in doubtful]
    units = Units(torch.zeros(2), torch.ones(2), 1.0)
    errors = {"learned": 0.01, "plain": 0.02}
    return NetworkResult(learned, plain, units, entries, unconfirmed, {}, errors, 10).verdict


def test_verdict_gives_the_answer_first() -> None:
    assert _verdict(["energy"], [0.003], [], 41.0) == (
        "Conserved: energy = 0.5 q1^2 + 0.5 p1^2 (drift 0.3 % of its spread, log odds +41)."
    )
    assert _verdict(["momentum x", "momentum y"], [0.003, 0.02], [], 1234.0) == (
        "Conserved: momentum x, momentum y (drift at most 2.0 % of the spread, log odds +1,234)."
    )
    assert _verdict([], [], [], 0.0).startswith("No quadratic conserved quantity was found.")
    uncertain = _verdict(["energy"], [0.0], ["q1 p1"], -2.0)
    assert "Not confirmed: q1 p1 (drift 60 %)." in uncertain
    assert "The evidence is higher without conserved quantities" in uncertain
