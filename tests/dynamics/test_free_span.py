"""What a field changes least, spans that are free, and rounding, compare_spans known algebras."""

import math

import pytest
import torch

from symrazor.dynamics import analysis, systems
from symrazor.dynamics.algebra import Algebra, generators, nbody_invariants, unitary
from symrazor.dynamics.conserved import (
    FixedSpan,
    FreeSpan,
    Quadratic,
    matrices,
    monomial_gradients,
    orthonormalise,
)
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.proposals import (
    bic_cost,
    echelon,
    integer_span,
    most_conserved,
    round_quadratic,
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
def test_true_invariants_come_first(system: systems.System, known: Algebra | None) -> None:
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
def test_a_free_span_has_flows_of_one_length(m: int) -> None:
    """Whatever the coefficients are: gradients are orthonormal over the data, times the length."""
    g = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(300, 6, generator=g, dtype=torch.float64) + 0.5
    made = FreeSpan(torch.randn(m, 27, generator=g), x, 0.7, Quadratic(6, 1))
    with torch.no_grad():
        made.coefficients.add_(0.2 * torch.randn(made.coefficients.shape, generator=g))
    slopes = torch.einsum("kij,nj->nki", made.A.double(), x) + made.b.double()
    inner = torch.einsum("nki,nli->kl", slopes, slopes) / len(x)
    expected = 0.49 * torch.eye(m, dtype=torch.float64)
    torch.testing.assert_close(inner.detach(), expected, rtol=0, atol=2e-4)
    parts = torch.cat([made.A, made.b[..., None]], dim=-1)
    torch.testing.assert_close(made.generators(), made.J @ parts)
    assert made.count == m and made.flow_count == m


def test_the_inverse_root_is_that_of_an_eigendecomposition() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 8, generator=g, dtype=torch.float64)
    root = torch.randn(8, 8, generator=g, dtype=torch.float64)
    metric = root @ root.mT + 8 * torch.eye(8, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(rows @ metric @ rows.mT)
    expected = vectors @ torch.diag(values**-0.5) @ vectors.mT @ rows
    torch.testing.assert_close(orthonormalise(rows, metric), expected)
    scaled = orthonormalise(1e3 * rows, metric)  # only the span counts
    torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize(
    "known", [unitary(1), unitary(3), nbody_invariants(3, 2)], ids=["so2", "u3", "bodies"]
)
def test_rounding_finds_the_exact_span(known: Algebra) -> None:
    """Mixed by a random matrix and with 1 % of noise, every algebra comes back exactly."""
    g = torch.Generator().manual_seed(1)
    m, d = known.b.shape
    mix = torch.linalg.qr(torch.randn(m, m, generator=g).double())[0]
    A = torch.einsum("km,mij->kij", mix, known.A)
    noise = 0.01 * torch.randn(m, d, d, generator=g)
    b = mix @ known.b + 0.01 * torch.randn(m, d, generator=g)
    learned = Quadratic.fixed(A + noise + noise.mT, b)
    model = round_quadratic(SymmetrisedNetwork(HamiltonianNetwork(d), learned, FlowTimes(m)))
    assert model is not None and isinstance(model.conserved, FixedSpan)
    found = analysis.spectrum(model.conserved)
    inside = analysis.parallelness(found.directions, known)
    torch.testing.assert_close(inside, torch.ones_like(inside), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        model.conserved.A.double(), learned.A.double(), rtol=0, atol=0.15
    )  # the learned ones, projected


def test_a_span_far_from_simple_is_left_alone() -> None:
    A = torch.diag(torch.tensor([1.0, 0.45]))[None]
    assert integer_span(Quadratic.fixed(A)) is None  # would become q^2 alone
    rows = echelon(torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 7.0]]))
    assert sorted(rows.abs().sum(1).tolist()) == pytest.approx([1.0, 1.5])
    assert bic_cost(1, 5, 28) == pytest.approx(2 * math.log(28))
