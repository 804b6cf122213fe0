"""Vector fields from noisy trajectories, against the equations that made them."""

import pytest
import torch
from torch import Tensor

from symrazor.bench.conserved import with_relative_noise
from symrazor.bench.conserved_systems import Case
from symrazor.dynamics import systems
from symrazor.dynamics.conserving import ConservingSimulator
from symrazor.dynamics.field_invariants import field_invariants, sparse_basis
from symrazor.dynamics.fields import FreeField, HamiltonianField
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.libraries import libraries_for
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.noise import noise_estimate
from symrazor.dynamics.shooting import Fit
from symrazor.dynamics.simulators import Choice, choose_field
from symrazor.dynamics.trajectories import Trajectories, simulate, split


def lotka_volterra(x: Tensor) -> Tensor:
    a, b = x.unbind(-1)
    return torch.stack([a * (1 - b), b * (a - 1)], -1)


def observed_populations() -> Trajectories:
    generator = torch.Generator().manual_seed(0)
    start = 0.4 + 1.6 * torch.rand(30, 2, generator=generator, dtype=torch.float64)
    times = 0.25 * torch.arange(24, dtype=torch.float64)
    return Trajectories.of(solve(lotka_volterra, start, times), times).with_noise(1e-4, seed=1)


def chosen(data: Trajectories, names: list[str]) -> Choice:
    training, held_out = split(data, 0)
    libraries = libraries_for(data.states[data.observed], names)
    return choose_field(training, held_out, libraries, noise_estimate(data))


def test_equations_of_a_free_field() -> None:
    best = chosen(observed_populations(), ["a", "b"]).adequate
    assert best is not None and isinstance(best.fit.field, FreeField)
    assert best.error == pytest.approx(1.0, abs=0.25) and best.parameters == 4
    x = 0.4 + 1.6 * torch.rand(50, 2, generator=torch.Generator().manual_seed(3)).double()
    torch.testing.assert_close(best.fit.field(x), lotka_volterra(x), rtol=0, atol=0.02)
    torch.testing.assert_close(
        best.fit.field.velocity(x[None], best.fit.field.parameters[None])[0], best.fit.field(x)
    )


def test_energy_of_a_pendulum_within_its_error() -> None:
    system = systems.pendulum().with_normal_start(1.2, 0.8)
    best = chosen(simulate(system, 40, 24, 0.25, seed=0).with_noise(4e-4, seed=1), ["q", "p"]).best
    assert best is not None
    x = system.start(50, torch.Generator().manual_seed(3))
    torch.testing.assert_close(best.fit.field(x), system.field(x), rtol=0, atol=0.02)
    assert float(best.fit.errors.max()) < 0.02


def pendulum_field() -> tuple[Library, HamiltonianField]:
    x = torch.linspace(-1, 1, 9).double()[:, None].expand(9, 2)
    title = "quadratic functions and sines and cosines"
    library = next(one for one in libraries_for(x, ["q", "p"]) if one.title == title)
    used = library.subset([library.names.index(name) for name in ("p^2", "cos q")])
    values = torch.tensor([0.5, -1.0], dtype=torch.float64)
    return library, HamiltonianField(used, values.abs(), values)


def test_fields_have_the_energy_as_their_only_invariant() -> None:
    library, field = pendulum_field()
    fit = Fit(field, 1e-8 * torch.eye(2).double(), 1.0)
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)).double()
    conserved, unclear = field_invariants(fit, library, x)
    assert len(conserved.vectors) == 1 and len(unclear.vectors) == 0
    energy = field.energy_in(library, field.parameters)
    assert energy is not None
    expected, _ = energy
    ratio = conserved.vectors[0] / conserved.vectors[0].abs().max()
    torch.testing.assert_close(ratio * -ratio[library.names.index("cos q")], expected)
    # Errors of the parameters as large as themselves leave it open.
    wide, _ = field_invariants(Fit(field, torch.eye(2).double(), 1.0), library, x)
    assert len(wide.vectors) <= 1


@pytest.mark.parametrize("seed", [3, 4])
def test_parameters_of_a_chaotic_field_are_within_their_errors(seed: int) -> None:
    """Long windows determine them best; their error is not that of short ones."""

    def field(x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.unbind(-1)
        return torch.stack([b * c, a - b, 1 - a * a], -1)

    def start(count: int, generator: torch.Generator) -> torch.Tensor:
        return 2 * torch.rand(count, 3, generator=generator, dtype=torch.float64) - 1

    clean = Case("Sprott C", 0, field, start, 0.2, 8.0).simulate(seed)
    best = find_conserved(with_relative_noise(clean, 0.002, seed), seed=seed).fields.best
    assert best is not None
    fit = best.fit
    error = fit.field.parameters - fit.field.parameters.sign()  # all are 1 or -1
    squares = float(error @ torch.linalg.solve(fit.covariance, error))
    assert len(error) == 5 and squares < 15.1  # 99 % of a chi-squared variable


def test_sparse_basis_separates_mixed_combinations() -> None:
    plain = torch.zeros(12, 3).double()
    plain[[0, 1], 0], plain[[4, 5, 6], 1], plain[[8, 9], 2] = 1.0, 1.0, 1.0
    generator = torch.Generator().manual_seed(0)
    mixed = plain @ torch.randn(3, 3, generator=generator).double()
    basis = sparse_basis(mixed)
    assert sorted((basis.abs() > 1e-6).sum(0).tolist()) == [2, 2, 3]


def test_simulator_conserves_what_was_found() -> None:
    data = observed_populations()
    findings = find_conserved(data, ["a", "b"])
    best = findings.fields.adequate
    assert best is not None
    x = data.states[data.observed]
    simulator = ConservingSimulator(best.fit.field, findings.quantities, 0.1, x)
    states = data.states[:, 0]
    (quantity,) = findings.quantities
    after = simulator(simulator(states, 3.0), -1.0)
    torch.testing.assert_close(quantity(after), quantity(states), rtol=0, atol=1e-6)
    truth = solve(lotka_volterra, states, torch.tensor([0.0, 2.0]))[:, 1]
    torch.testing.assert_close(after, truth, rtol=0, atol=0.05)
    with pytest.raises(ValueError, match=r"States must have shape \[..., 2\]"):
        simulator(torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match="The time must be finite"):
        simulator(states, float("nan"))
