"""Known algebras, exact quadratic invariants, and the analysis of learned generators."""

import math

import pytest
import torch

from symrazor.dynamics import analysis, systems
from symrazor.dynamics.algebra import (
    Algebra,
    closure,
    energies,
    euclidean,
    from_generators,
    nbody_invariants,
    rotations,
    translations,
    unitary,
)
from symrazor.dynamics.analysis import quadratic_invariants
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.systems import System, nbody
from symrazor.dynamics.trajectories import Trajectories, noise_variance, simulate

CASES = [
    (systems.oscillators([1.0]), 1, unitary(1)),
    (systems.oscillators([1.0] * 2), 4, unitary(2)),
    (systems.oscillators([1.0] * 3), 9, unitary(3)),
    (systems.oscillators((1.0, 2.0, 3.0)), 3, energies(3)),
    (nbody(3, 2), 7, nbody_invariants(3, 2)),
    (nbody(2, 3, masses=(1.0, 3.0)), 15, nbody_invariants(2, 3, masses=(1.0, 3.0))),
    (systems.kepler(2, softening=0.5).with_normal_start(), 1, rotations(2)),
    (systems.kepler(2), 1, rotations(2)),  # orbits start with q orthogonal to p
    (systems.kepler(3), 3, rotations(3)),
    (systems.pendulum(), 0, None),
    (systems.henon_heiles(), 0, None),
]


@pytest.mark.parametrize(
    ("system", "dimension", "known"), CASES, ids=lambda c: getattr(c, "name", "")
)
def test_quadratic_invariants_of_systems_match_known_algebras(
    system: System, dimension: int, known: Algebra | None
) -> None:
    result = quadratic_invariants(system)
    assert result.dimension == dimension
    if known is None:
        return
    assert len(known.basis()) == dimension
    inside = analysis.parallelness(result.algebra.generators(), known)
    torch.testing.assert_close(inside, torch.ones(dimension).double(), rtol=0, atol=1e-6)
    assert closure(known.generators()).outside < 1e-9
    data = simulate(system, 3, 3, 0.4, seed=0)
    assert analysis.drift(known, data).max() < 1e-6


def test_quadratic_invariants_from_trajectories() -> None:
    data = simulate(nbody(2, 2), 40, 8, 0.5, seed=0)
    result = quadratic_invariants(data)
    assert result.dimension == 7
    known = nbody_invariants(2, 2)
    assert analysis.parallelness(result.algebra.generators(), known).min() > 1 - 1e-5
    assert quadratic_invariants(simulate(systems.pendulum(), 10, 8, 0.5, seed=0)).dimension == 0
    with pytest.raises(ValueError, match="need at least 44 states, got 18"):
        quadratic_invariants(simulate(nbody(2, 2), 2, 8, 0.5, seed=0))
    with pytest.raises(ValueError, match="Pass phase="):
        quadratic_invariants(lambda x: x.sum(-1))
    with pytest.raises(ValueError, match="even number of entries, got 5"):
        quadratic_invariants(lambda x: x.sum(-1), phase=5)


def test_structure_constants_of_so3() -> None:
    result = closure(rotations(3).generators())
    assert result.outside < 1e-12 and not result.commutes
    c = result.constants
    torch.testing.assert_close(c, -c.transpose(0, 1))
    size = float(c[0, 1, 2].abs())
    assert size == pytest.approx(0.5)  # generators of norm 2 in an orthonormal basis
    torch.testing.assert_close(c.square().sum(), torch.tensor(6 * size**2, dtype=torch.float64))


def test_closure_of_se2_and_of_an_incomplete_subset() -> None:
    algebra = euclidean(3, 2)
    assert closure(algebra.generators()).outside < 1e-12
    kept = [name != "momentum y" for name in algebra.names]
    assert closure(algebra.generators()[kept]).outside > 0.5
    assert closure(translations(3, 2).generators()).commutes


def test_spectrum_recovers_mixed_quantities() -> None:
    """Use K = 8 random combinations of u(2) with small noise."""
    known = unitary(2)
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(8, 4, generator=g, dtype=torch.float64)
    learned = Quadratic(4, 8)
    with torch.no_grad():
        learned.A_raw.copy_(torch.einsum("ks,sij->kij", mix, known.A))
        learned.b.zero_()
        noise = torch.randn(8, 4, 4, generator=g)
        learned.A_raw.add_(1e-3 * noise)
    result = analysis.spectrum(learned)
    assert result.dimension == 4
    inside = analysis.parallelness(result.directions, known)
    assert inside[:4].min() > 0.999 and inside[4:].max() < 0.1
    assert analysis.recovered(result.learned(), known).min() > 0.999
    assert analysis.weighted_parallelness(result, known) > 0.999
    report = analysis.describe(
        learned, known, simulate(systems.oscillators([1.0] * 2), 5, 5, 0.3, 0)
    )
    assert report["dimension"] == 4 and max(report["drift"]) < 0.01
    assert report["closure"] < 0.02


def test_best_names() -> None:
    known = nbody_invariants(3, 2)
    spin = known.generators()[[known.names.index("angular momentum")]]
    assert analysis.best_names(spin, known) == ["angular momentum"]
    momenta = known.generators()[:1] + known.generators()[1:2]
    assert analysis.best_names(momenta, known) == ["mix of momentum x, momentum y"]
    other = torch.zeros(1, 12, 13, dtype=torch.float64)
    other[0, 0, 0] = 1.0
    assert analysis.best_names(other, known) == ["unknown"]
    A, b = from_generators(known.generators())
    torch.testing.assert_close(A, known.A)
    torch.testing.assert_close(b, known.b)


def test_tiny_quantities_have_dimension_zero() -> None:
    unlearned = Quadratic(2, 2, std=1e-4)
    result = analysis.spectrum(unlearned)
    assert result.dimension == 0 and len(result.learned()) == 0
    assert analysis.recovered(result.learned(), unitary(1)).tolist() == [0.0]
    assert math.isclose(closure(result.directions[:0]).outside, 0.0)


def test_noise_variance_from_divided_differences() -> None:
    """Estimate each entry separately, along a fast motion with missing states."""
    system = systems.oscillators([1.0, 2.0])
    data = simulate(system, 200, 20, 0.1, seed=0)
    clean = noise_variance(data)
    assert float(clean.max()) < 1e-5
    sizes = torch.tensor([0.1, 0.02, 0.3, 0.05], dtype=torch.float64)
    noise = torch.randn(data.states.shape, generator=torch.Generator().manual_seed(1)).double()
    observed = torch.rand(data.observed.shape, generator=torch.Generator().manual_seed(2)) > 0.1
    noisy = Trajectories(data.states + sizes * noise, data.times, observed)
    result = noise_variance(noisy)
    torch.testing.assert_close(result, sizes.square(), rtol=0.1, atol=1e-5)
    pairs = Trajectories(noisy.states[:, :2], data.times[:, :2], observed[:, :2])
    assert (noise_variance(pairs) > sizes.square()).all()  # overestimates


def test_noise_variance_with_irregular_time_steps() -> None:
    random = torch.Generator().manual_seed(0)
    times = 5 * torch.rand(200, 30, generator=random, dtype=torch.float64).sort(dim=1).values
    system = systems.oscillators()
    data = Trajectories.of(solve(system.field, system.start(200, random), times), times)
    assert float(noise_variance(data).max()) < 1e-4
    result = noise_variance(data.with_noise(1e-2, seed=1))
    torch.testing.assert_close(result, torch.full((2,), 1e-2).double(), rtol=0.1, atol=0)


def test_drift_by_noise_equals_drift_of_a_conserved_quantity() -> None:
    data = simulate(systems.oscillators(), 200, 20, 0.1, seed=0).with_noise(1e-2, seed=1)
    energy = unitary(1)
    expected = analysis.drift(energy, data)
    torch.testing.assert_close(analysis.drift_by_noise(energy, data), expected, rtol=0.1, atol=0)
