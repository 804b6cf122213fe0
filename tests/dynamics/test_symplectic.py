"""Masses and symplectic forms from data, against known ones."""

import pytest
import torch
from torch import Tensor

from symrazor.dynamics import simulators
from symrazor.dynamics.discovery import discover
from symrazor.dynamics.fields import FreeField, NewtonianField
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.libraries import libraries_for, polynomials
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.noise import NoiseEstimate
from symrazor.dynamics.shooting import Fit
from symrazor.dynamics.simulators import choose_field
from symrazor.dynamics.symplectic import find_structure
from symrazor.dynamics.trajectories import Trajectories

NAMES = ["q1", "q2", "v1", "v2"]
MASSES = torch.tensor([1.0, 1.7], dtype=torch.float64)


def anharmonic(x: Tensor) -> Tensor:
    """V = q1^2 + q2^2 + q1^2 q2 - q2^3 / 3."""
    q, v = x.chunk(2, -1)
    a, b = q.unbind(-1)
    force = -torch.stack([2 * a + 2 * a * b, 2 * b + a.square() - b.square()], -1)
    return torch.cat([v, force / MASSES], -1)


def states(count: int = 300) -> Tensor:
    return 0.4 * torch.randn(count, 4, generator=torch.Generator().manual_seed(0)).double()


def exact_fit(x: Tensor, velocity: Tensor, names: list[str]) -> Fit:
    library = Library("quadratic functions", names, [], polynomials(4, 2))
    values = torch.cat([torch.ones_like(x[:, :1]), library(x)], 1)
    coefficients = torch.linalg.lstsq(values, velocity).solution
    active = torch.ones_like(coefficients, dtype=torch.bool)
    field = FreeField(library, active, torch.ones_like(coefficients), coefficients.flatten())
    torch.testing.assert_close(field(x), velocity)
    return Fit(field, 1e-16 * torch.eye(len(field.parameters)).double(), 1.0)


def test_masses_of_positions_and_velocities() -> None:
    x = states()
    found = find_structure(exact_fit(x, anharmonic(x), NAMES), libraries_for(x, NAMES), x)
    assert found is not None and found.masses is not None
    torch.testing.assert_close(found.masses, torch.diag(MASSES), rtol=0, atol=1e-6)
    library = found.energy.library
    energy = dict(zip(library.names, found.energy.vectors[0].tolist(), strict=True))
    expected = {"v1^2": 0.5, "v2^2": 0.85, "q1^2": 1.0, "q2^2": 1.0, "q1^2 q2": 1.0, "q2^3": -1 / 3}
    for name, value in energy.items():
        assert value == pytest.approx(expected.get(name, 0.0), abs=1e-5), name


def test_form_of_sheared_coordinates() -> None:
    """For x = T y, the form of y is T' form T, up to a factor."""
    y = states()
    T = torch.tensor([[1, 0.4, 0, 0.2], [0, 1, 0.3, 0], [0.5, 0, 1, 0], [0, 0.1, 0, 1]]).double()
    x = y @ T.mT
    velocity = anharmonic(x) @ torch.linalg.inv(T).mT
    names = ["a", "b", "c", "d"]
    found = find_structure(exact_fit(y, velocity, names), libraries_for(y, names), y)
    assert found is not None
    form = torch.zeros(4, 4).double()
    form[:2, 2:], form[2:, :2] = -torch.diag(MASSES), torch.diag(MASSES)
    expected = T.mT @ form @ T
    ratio = expected[0, 2] / found.form[0, 2]
    torch.testing.assert_close(found.form * ratio, expected, rtol=0, atol=1e-5)


def test_friction_has_no_form() -> None:
    x = states()
    velocity = anharmonic(x) - 0.1 * x * torch.tensor([0, 0, 1.0, 1.0]).double()
    assert find_structure(exact_fit(x, velocity, NAMES), libraries_for(x, NAMES), x) is None


def observed(noise: float) -> Trajectories:
    times = 0.3 * torch.arange(30, dtype=torch.float64)
    return Trajectories.of(solve(anharmonic, 0.6 * states(40), times), times).with_noise(
        noise**2, seed=1
    )


def test_masses_from_noisy_trajectories() -> None:
    result = discover(observed(0.01), progress=False)
    assert result.findings is not None and result.findings.fields.adequate is not None
    field = result.findings.fields.adequate.fit.field
    assert isinstance(field, NewtonianField)
    x = states(50)
    torch.testing.assert_close(field(x), anharmonic(x), rtol=0, atol=0.02)
    torch.testing.assert_close(field.velocity(x[None], field.parameters[None])[0], field(x))
    mass, error = result.noether.masses["q2"]
    assert 0 < error < 0.05 and mass == pytest.approx(1.7, abs=4 * error)
    assert [entry["name"] for entry in result.conserved] == ["energy"]
    assert "Masses of the coordinates, relative to the first: q1 1, q2 1." in result.verdict


def test_energy_of_a_particle_in_a_magnetic_field() -> None:
    """The canonical energies that noise makes attractive must not keep out the linear equations."""

    def field(x: Tensor) -> Tensor:
        v = x[..., 3:]
        a, b, c = v.unbind(-1)
        return torch.cat([v, torch.stack([1.3 * b, -1.3 * a, 0 * c], -1)], -1)

    generator = torch.Generator().manual_seed(0)
    times = 0.25 * torch.arange(20, dtype=torch.float64)
    start = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    data = Trajectories.of(solve(field, start, times), times).with_noise(0.02, seed=1)
    findings = find_conserved(data)
    assert findings.fields.adequate is not None and len(findings.quantities) == 4
    assert findings.quantities[0].name == "energy" and findings.structure is not None
    # Brackets of velocities are the magnetic field.
    assert float(findings.structure.form[0, 1]) == pytest.approx(1.3, abs=0.02)


def test_equal_candidates_are_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = observed(0.01)
    fitted: list[object] = []

    def record(field: object, *arguments: object) -> None:
        fitted.append(field.terms)  # type: ignore[attr-defined]

    monkeypatch.setattr(simulators, "fit_field", record)
    x = data.states.flatten(0, 1)
    noise = NoiseEstimate(torch.full((4,), 1e-4).double(), 1e3, torch.ones(4).bool())
    choose_field(data, data, libraries_for(x, NAMES), noise)
    assert len(fitted) == len(set(fitted)) > 3


def test_names_of_functions_differ() -> None:
    """Six positions are three bodies in the plane or two in space."""
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)).double()
    for library in libraries_for(x, [f"x{i}" for i in range(12)]):
        assert len(set(library.names)) == len(library), library.title
