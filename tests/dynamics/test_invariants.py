"""Conserved quantities from data, against exact ones."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.dynamics import simulators, systems
from symrazor.dynamics.eigen_search import normal_quantile
from symrazor.dynamics.findings import Findings, Quantity
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.trajectories import Trajectories, simulate

NAMES = {2: ["q", "p"], 4: ["q1", "q2", "p1", "p2"]}


def observed(system: systems.System, noise: float = 0.01, seed: int = 0) -> Trajectories:
    return simulate(system, 60, 39, 0.25, seed=seed).with_noise(noise**2, seed=100 + seed)


def rotated(quantity: Quantity, x: Tensor, field: Tensor) -> float:
    """Return the rate of change of a quantity, relative to |gradient| |field|."""
    gradient = quantity.gradient(x)
    rate = (gradient * field).sum(1).square().mean()
    return float((rate / (gradient.square().sum(1) * field.square().sum(1)).mean()).sqrt())


def check_exact(findings: Findings, system: systems.System, tolerance: float = 0.02) -> None:
    x = system.start(200, torch.Generator().manual_seed(9))
    for quantity in findings.all:
        assert rotated(quantity, x, system.field(x)) < tolerance


def stiff(stiffness: float) -> systems.System:
    return systems.from_energy(lambda x: 0.5 * (stiffness * x[..., 0] ** 2 + x[..., 1] ** 2), 2)


@pytest.mark.parametrize("stiffness", [1.0, 1.5, 3.0])
def test_coefficients_are_not_rounded(stiffness: float) -> None:
    findings = find_conserved(observed(stiff(stiffness)), NAMES[2])
    (energy,) = findings.quantities
    names = energy.library.names
    q, p = (float(energy.coefficients[names.index(name)]) for name in ("q^2", "p^2"))
    error = float(energy.errors.max())
    assert q / p == pytest.approx(stiffness, rel=0.02)
    assert 0 < error < 0.05
    check_exact(findings, stiff(stiffness))


def test_simple_formula_only_where_the_data_allow_it() -> None:
    (energy,) = find_conserved(observed(stiff(1.0))).quantities
    assert energy.simple is not None and energy.simple.p_value >= 0.05
    assert energy.simple.formula in ("0.5 x1^2 + 0.5 x2^2", "0.5 x2^2 + 0.5 x1^2")
    # 1.1 is near 1, and the data can tell the two apart.
    (energy,) = find_conserved(observed(stiff(1.1), noise=0.005)).quantities
    assert energy.simple is None or "0.5 x1^2" not in energy.simple.formula


def test_pendulum_conserves_its_energy() -> None:
    system = systems.pendulum().with_normal_start(1.2, 0.8)
    findings = find_conserved(observed(system), NAMES[2])
    (energy,) = findings.quantities
    names = energy.library.names
    p, cosine = (float(energy.coefficients[names.index(name)]) for name in ("p^2", "cos q"))
    assert p / cosine == pytest.approx(-0.5, rel=0.02)
    check_exact(findings, system)


def test_dependent_quantities_are_recognised() -> None:
    findings = find_conserved(observed(systems.oscillators((1.0, 1.0))), NAMES[4])
    assert len(findings.quantities) == 3 and len(findings.functions) == 1
    check_exact(findings, systems.oscillators((1.0, 1.0)))


def test_runge_lenz_vector() -> None:
    findings = find_conserved(observed(systems.kepler(), noise=0.002), NAMES[4])
    assert len(findings.quantities) == 3
    formulas = [quantity.formula for quantity in findings.quantities]
    assert formulas[0] in ("q1 p2 - q2 p1", "q2 p1 - q1 p2")
    assert "1/r" in formulas[1] and "1/r" in formulas[2]
    check_exact(findings, systems.kepler())


def test_squares_of_momenta_are_not_new() -> None:
    springs = systems.from_energy(
        lambda x: 0.5 * (x[..., 2:].square().sum(-1) + (x[..., 0] - x[..., 1]) ** 2), 4
    )
    findings = find_conserved(observed(springs), NAMES[4])
    assert findings.quantities[0].formula in ("p2 + p1", "p1 + p2")
    assert len(findings.quantities) == 2 and findings.functions == []  # and the energy
    check_exact(findings, springs)


def test_nothing_is_conserved_by_a_damped_oscillator() -> None:
    matrix = torch.tensor([[0.0, 1.0], [-1.0, -0.3]], dtype=torch.float64)
    start = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    times = 0.25 * torch.arange(40, dtype=torch.float64)
    states = solve(lambda x: x @ matrix.mT, start, times)
    for noise in (0.002, 0.02, 0.1):
        findings = find_conserved(Trajectories.of(states, times).with_noise(noise**2, seed=1))
        assert findings.all == []


def test_user_functions_irregular_times_and_different_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    system = systems.from_energy(lambda x: 0.5 * x[..., 1] ** 2 + x[..., 0].cosh().log(), 2)
    times = (0.05 + 0.4 * torch.rand(60, 40, generator=generator, dtype=torch.float64)).cumsum(1)
    states = solve(system.field, system.start(60, generator), times)
    data = Trajectories.of(states, times).with_noise(0.01**2, seed=1)
    lengths = torch.randint(12, 40, (60, 1), generator=generator)
    data = Trajectories(data.states, data.times, torch.arange(40) < lengths)
    functions = {"log cosh q": lambda x: x[:, 0].cosh().log()}
    findings = find_conserved(data, NAMES[2], functions)
    (energy,) = findings.quantities
    assert "log cosh q" in energy.formula
    check_exact(findings, system)


def test_false_refutations_are_rare_and_p_values_calibrated() -> None:
    system, values = systems.oscillators((1.0,)), []
    for seed in range(10):
        findings = find_conserved(observed(system, 0.03, seed=seed))
        assert len(findings.quantities) == 1
        values.append(findings.quantities[0].p_value)
    # p is twice the smaller of two, so that it is conservative.
    assert 0.02 < sum(value < 0.25 for value in values) / len(values) < 0.6
    assert min(values) > 1e-4


def test_units_do_not_matter() -> None:
    data = observed(stiff(1.5))
    scaled = Trajectories(data.states * torch.tensor([1e9, 1e-3]), data.times, data.observed)
    (plain,), (other,) = find_conserved(data).quantities, find_conserved(scaled).quantities
    names = plain.library.names
    q, p = names.index("x1^2"), names.index("x2^2")
    ratio = float(plain.coefficients[q] / plain.coefficients[p])
    assert float(other.coefficients[q] / other.coefficients[p]) * 1e24 == pytest.approx(ratio, 1e-3)


def test_a_hidden_coordinate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the third coordinate no vector field fits, and the data are searched directly."""
    monkeypatch.setattr(simulators, "MAX_CANDIDATES", 2)
    system = systems.oscillators([1.0, 1.6180339887])
    data = simulate(system, 40, 29, 0.25, seed=0)
    seen = Trajectories(data.states[..., [0, 2, 1]], data.times, data.observed)
    findings = find_conserved(seen.with_noise(1e-4, seed=1), ["q1", "p1", "q2"])
    assert findings.fields.best is not None and findings.fields.best.error > 2
    (energy,) = findings.quantities
    names = energy.library.names
    q, p = (float(energy.coefficients[names.index(name)]) for name in ("q1^2", "p1^2"))
    assert q / p == pytest.approx(1.0, rel=0.02)


def test_large_libraries_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulators, "MAX_CANDIDATES", 1)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(10, 6, 2, generator=generator, dtype=torch.float64)
    times = torch.tensor([0.0, 0.1, 2.0, 2.1, 9.0, 9.1])  # differences over 0.1 show the noise
    states[:, 1::2] = states[:, ::2] + 1e-3 * states[:, 1::2]
    findings = find_conserved(Trajectories.of(states, times))
    assert any(
        text.startswith("quartic functions: 14 functions need 56") for text in findings.skipped
    )


def test_too_few_states_are_an_error() -> None:
    with pytest.raises(ValueError, match="0 trajectories have 4 states or more; at least 1"):
        find_conserved(simulate(systems.oscillators(), 7, 2, 0.2, seed=0))
    few = simulate(systems.oscillators(), 7, 4, 0.2, seed=0).with_noise(1e-3, seed=1)
    with pytest.raises(ValueError, match="7 trajectories have 4 states or more; at least 8"):
        find_conserved(few)


def test_normal_quantile() -> None:
    assert normal_quantile(0.975) == pytest.approx(1.959964, abs=1e-6)
    assert math.isclose(normal_quantile(0.5), 0.0, abs_tol=1e-12)
