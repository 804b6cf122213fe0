"""Proposals, free spans and rounding, against known algebras."""

import math

import pytest
import torch
from dynamics_case import proposal_template

from symrazor.dynamics import analysis, proposals, systems
from symrazor.dynamics.algebra import Algebra, generators, nbody_invariants, unitary
from symrazor.dynamics.conserved import (
    FixedSpan,
    FreeSpan,
    Quadratic,
    matrices,
    monomial_gradients,
    orthonormalise,
)
from symrazor.dynamics.hamiltonian import FlowTimes, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.mechanics import symplectic_form
from symrazor.dynamics.observables import Combination
from symrazor.dynamics.proposals import (
    RELATIVE_FLOW_LENGTH,
    Proposals,
    bic_cost,
    coefficient_cost,
    echelon,
    integer_span,
    largest_gaps,
    most_conserved,
    round_quantities,
)
from symrazor.dynamics.systems import nbody


@pytest.mark.parametrize(
    ("system", "known"),
    [
        (nbody(3, 2), nbody_invariants(3, 2)),
        (systems.oscillators([1.0] * 3), unitary(3)),
        (systems.pendulum(), None),
    ],
    ids=["bodies", "oscillators", "pendulum"],
)
def test_most_conserved_ranks_true_invariants_first(
    system: systems.System, known: Algebra | None
) -> None:
    x = system.start(500, torch.Generator().manual_seed(0))
    rates, rows = most_conserved(monomial_gradients(x), system.field(x))
    A, b = matrices(rows, x.shape[1])
    slopes = torch.einsum("kij,mj->mki", A, x) + b
    torch.testing.assert_close(
        slopes.square().sum(-1).mean(0), torch.ones(len(A), dtype=torch.float64)
    )
    count = 0 if known is None else len(known)
    assert (rates < 1e-12).sum() == count and (rates[count:] > 1e-5).all()
    if known is not None:
        inside = analysis.parallelness(generators(A[:count], b[:count]), known)
        torch.testing.assert_close(inside, torch.ones_like(inside))


@pytest.mark.parametrize("m", [1, 2, 9])
def test_free_span_has_orthogonal_gradients_of_fixed_length(m: int) -> None:
    """Check that for perturbed coefficients."""
    g = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(300, 6, generator=g, dtype=torch.float64) + 0.5
    span = FreeSpan(torch.randn(m, 27, generator=g), x, 0.7, Quadratic(6, 1))
    with torch.no_grad():
        span.coefficients.add_(0.2 * torch.randn(span.coefficients.shape, generator=g))
    slopes = torch.einsum("kij,nj->nki", span.A.double(), x) + span.b.double()
    inner = torch.einsum("nki,nli->kl", slopes, slopes) / len(x)
    expected = 0.49 * torch.eye(m, dtype=torch.float64)
    torch.testing.assert_close(inner.detach(), expected, rtol=0, atol=2e-4)
    parts = torch.cat([span.A, span.b[..., None]], dim=-1)
    torch.testing.assert_close(span.generators(), symplectic_form(3).float() @ parts)
    assert span.count == m and span.flow_count == m


def test_orthonormalise_matches_eigendecomposition() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 8, generator=g, dtype=torch.float64)
    root = torch.randn(8, 8, generator=g, dtype=torch.float64)
    metric = root @ root.mT + 8 * torch.eye(8, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(rows @ metric @ rows.mT)
    expected = vectors @ torch.diag(values**-0.5) @ vectors.mT @ rows
    torch.testing.assert_close(orthonormalise(rows, metric), expected)
    scaled = orthonormalise(1e3 * rows, metric)  # depends on the span only
    torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize(
    "known", [unitary(1), unitary(3), nbody_invariants(3, 2)], ids=["so2", "u3", "bodies"]
)
def test_rounding_recovers_the_exact_span(known: Algebra) -> None:
    """Use a random mixture of a known algebra with 1 % noise."""
    g = torch.Generator().manual_seed(1)
    m, d = known.b.shape
    mix = torch.linalg.qr(torch.randn(m, m, generator=g).double())[0]
    A = torch.einsum("km,mij->kij", mix, known.A)
    noise = 0.01 * torch.randn(m, d, d, generator=g)
    b = mix @ known.b + 0.01 * torch.randn(m, d, generator=g)
    learned = Quadratic.fixed(A + noise + noise.mT, b)
    model = round_quantities(SymmetrisedNetwork(HamiltonianNetwork(d), learned, FlowTimes(m)))
    assert model is not None and isinstance(model.conserved, FixedSpan)
    candidates = analysis.spectrum(model.conserved)
    inside = analysis.parallelness(candidates.directions, known)
    torch.testing.assert_close(inside, torch.ones_like(inside), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        model.conserved.A.double(), learned.A.double(), rtol=0, atol=0.15
    )  # projections of the learned quantities


def test_spans_far_from_integers_are_not_rounded() -> None:
    A = torch.diag(torch.tensor([1.0, 0.45]))[None]
    assert integer_span(Quadratic.fixed(A)) is None  # would be rounded to q^2
    rows = echelon(torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 7.0]]))
    assert sorted(rows.abs().sum(1).tolist()) == pytest.approx([1.0, 1.5])
    assert bic_cost(1, 5, 28) == pytest.approx(2 * math.log(28))


def test_largest_gaps_are_ordered_by_ratio() -> None:
    rates = torch.tensor([1e-4, 1e-4, 2e-3, 2e-3, 1e-1, 1.0])
    assert largest_gaps(rates, max_count=5)[:3] == [4, 2, 5]
    assert largest_gaps(rates, max_count=3)[:1] == [2]
    assert largest_gaps(rates, max_count=1) == [1]


def test_proposal_from_noisy_dynamics_rounds_to_the_exact_algebra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 3 % noise on the true field, seven quantities come first and are rounded exactly."""
    system = nbody(3, 2)
    g = torch.Generator().manual_seed(0)
    x = system.start(2000, g)
    field = system.field(x)
    field = field + 0.03 * field.std() * torch.randn(field.shape, generator=g, dtype=field.dtype)
    model = proposal_template(12, 10)
    monkeypatch.setattr(proposals, "mean_weight_field", lambda model, x: (x, field))
    candidates = Proposals(model, SymmetrisedNetwork(model.network), x)
    assert candidates.best_counts(1) == [7]
    assert candidates.next_count(0, {0}) == candidates.next_count(6, {0, 6, 8}) == 7
    assert (
        candidates.next_count(0, {0, 7}) is None and candidates.next_count(7, {0, 7}) is None
    )  # no such rise
    free = candidates.model_with(7)
    assert isinstance(free.conserved, FreeSpan) and free.conserved.coefficients.requires_grad
    assert coefficient_cost(free.conserved, 100) == pytest.approx(
        0.5 * 7 * (90 - 7) * math.log(100)
    )
    rounded = round_quantities(free)
    assert (
        rounded is not None
        and isinstance(rounded.conserved, FixedSpan)
        and rounded.times is not None
    )
    assert not any(p.requires_grad for p in rounded.conserved.parameters())
    assert coefficient_cost(rounded.conserved, 100) == 0
    known = nbody_invariants(3, 2)
    spectrum = analysis.spectrum(rounded.conserved)
    assert spectrum.dimension == 7
    inside = analysis.parallelness(generators(rounded.conserved.A, rounded.conserved.b), known)
    torch.testing.assert_close(inside, torch.ones_like(inside), rtol=0, atol=1e-6)
    slopes = (
        torch.einsum("kij,mj->mki", rounded.conserved.A.double(), x) + rounded.conserved.b.double()
    )
    speed = slopes.square().sum((1, 2)).mean().sqrt() * rounded.times.variance**0.5
    reach = torch.pi * float(speed / x.square().sum(-1).mean().sqrt())
    assert reach == pytest.approx(RELATIVE_FLOW_LENGTH, rel=0.05)
    with pytest.raises(ValueError, match="must have Quadratic or Combination quantities"):
        Proposals(SymmetrisedNetwork(model.network), model, x)


def test_pendulum_energy_is_proposed_from_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = systems.pendulum().with_normal_start(1.5, 1.0)
    x = system.start(500, torch.Generator().manual_seed(0))
    functions = [
        lambda x: 0.5 * x[..., 1] ** 2,
        lambda x: -x[..., 0].cos(),
        lambda x: x[..., 0] * x[..., 1],
        lambda x: x[..., 0].sin(),
    ]
    network = HamiltonianNetwork(2, width=4)
    template = SymmetrisedNetwork(network, Combination(functions, 2), FlowTimes(2, "ball"))
    monkeypatch.setattr(proposals, "mean_weight_field", lambda model, x: (x, system.field(x)))
    candidates = Proposals(template, SymmetrisedNetwork(network), x)
    assert candidates.best_counts(1) == [1]
    assert candidates.next_count(0, {0}) is None  # both counts are tried anyway
    rounded = round_quantities(candidates.model_with(1))
    rounded = None if rounded is None else rounded.conserved
    assert isinstance(rounded, Combination) and rounded.rounded
    assert not rounded.coefficients.requires_grad
    c = rounded.coefficients.detach().double()[0]
    torch.testing.assert_close(c / c[0], torch.tensor([1.0, 1.0, 0.0, 0.0]).double())
    free = Combination(functions, 2)
    assert coefficient_cost(free, 100) == pytest.approx(0.5 * 2 * 2 * math.log(100))
