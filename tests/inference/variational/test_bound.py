"""The evidence lower bound of linear-Gaussian models against the exact evidence."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from variational_case import linear_gaussian_bound

from symrazor.inference.exact import exact_evidence
from symrazor.inference.variational import (
    BlockCholesky,
    Diagonal,
    Full,
    GaussianPosterior,
    LowRank,
    MatrixNormal,
    Point,
)

F64 = torch.float64


def _case(n: int = 12, m: int = 4, k: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.eye(m, dtype=F64) + 0.5  # correlated features
    phi = torch.randn(n, m, generator=generator, dtype=F64) @ mixed
    return phi, torch.randn(n, k, generator=generator, dtype=F64)


def _posterior_precision(phi: Tensor, delta: float, sigma: float) -> Tensor:
    return phi.T @ phi / sigma**2 + delta * torch.eye(phi.shape[1], dtype=F64)


def _set_mean(q: GaussianPosterior, phi: Tensor, y: Tensor, delta: float, sigma: float) -> None:
    P = _posterior_precision(phi, delta, sigma)
    q.mean.data = torch.linalg.solve(P, phi.T @ y / sigma**2).T.contiguous()


def _optimise(q: GaussianPosterior, phi: Tensor, y: Tensor, delta: float, sigma: float) -> float:
    optimiser = torch.optim.LBFGS(
        q.parameters(),
        max_iter=400,
        max_eval=800,
        history_size=50,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -linear_gaussian_bound(phi, y, q, delta, sigma).log_evidence
        loss.backward()
        return loss

    optimiser.step(closure)
    return float(linear_gaussian_bound(phi, y, q, delta, sigma).log_evidence.detach())


def _exact(phi: Tensor, y: Tensor, delta: float, sigma: float) -> float:
    columns = [exact_evidence(phi, column, delta, sigma) for column in y.T]
    return sum(float(result.evidence.log_evidence) for result in columns)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.floats(0.1, 10),
    st.floats(0.3, 3),
    st.floats(0.01, 2),
    st.sampled_from([Diagonal, LowRank, BlockCholesky, Full, MatrixNormal]),
    st.integers(0, 1000),
)
def test_the_bound_is_never_above_the_exact_evidence(
    n: int, m: int, delta: float, sigma: float, scale: float, kind: type, seed: int
) -> None:
    phi, y = _case(n, m, 2, seed)
    q = kind((2, m), scale=scale, dtype=F64)
    torch.manual_seed(seed)
    for parameter in q.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if seed % 2:  # close to the truth, where a wrong constant would show
        _set_mean(q, phi, y, delta, sigma)
    with torch.no_grad():
        bound = float(linear_gaussian_bound(phi, y, q, delta, sigma).log_evidence)
    assert bound <= _exact(phi, y, delta, sigma) + 1e-9


def test_with_the_exact_posterior_the_bound_is_the_evidence() -> None:
    """Full, by its closed form; effective parameters are those of the exact posterior."""
    delta, sigma = 0.7, 0.5
    phi, y = _case()
    P = _posterior_precision(phi, delta, sigma)
    q = Full((1, 4), dtype=F64).requires_grad_(False)
    _set_mean(q, phi, y, delta, sigma)
    q.root.set_(torch.linalg.cholesky(torch.linalg.inv(P)).unsqueeze(0))
    bound = linear_gaussian_bound(phi, y, q, delta, sigma)
    exact = exact_evidence(phi, y.squeeze(1), delta, sigma).evidence
    assert float(bound.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-9)
    H = P - delta * torch.eye(4, dtype=F64)
    gamma = float((H @ torch.linalg.inv(P)).trace())
    assert bound.effective_parameters["weights"] == pytest.approx(gamma, abs=1e-9)
    assert float(bound.log_prior) == pytest.approx(float(exact.log_prior), abs=1e-9)
    assert float(bound.log_det) == pytest.approx(float(exact.log_det) - gamma, abs=1e-9)


@pytest.mark.parametrize("kind", [Full, BlockCholesky, MatrixNormal])
def test_rich_posteriors_reach_the_exact_evidence_by_gradients(kind: type) -> None:
    """Outputs of equal noise have the posterior I x A: each of the three contains it."""
    phi, y = _case(k=2)
    q = kind((2, 4), dtype=F64)
    assert _optimise(q, phi, y, 0.7, 0.5) == pytest.approx(_exact(phi, y, 0.7, 0.5), abs=1e-6)


def test_diagonal_posterior_by_its_closed_form() -> None:
    delta, sigma = 0.7, 0.5
    phi, y = _case()
    q = Diagonal((1, 4), dtype=F64)
    optimum = _optimise(q, phi, y, delta, sigma)
    P = _posterior_precision(phi, delta, sigma)
    assert torch.allclose(q.variance().detach(), 1 / P.diagonal(), rtol=1e-4)
    # The gap is KL(q || posterior) = (sum log P_ii - log |P|) / 2.
    gap = 0.5 * (P.diagonal().log().sum() - torch.logdet(P))
    assert optimum == pytest.approx(_exact(phi, y, delta, sigma) - float(gap), abs=1e-6)


def test_richer_posteriors_have_higher_bounds() -> None:
    phi, y = _case(k=2)
    kinds: list[GaussianPosterior] = [
        Diagonal((2, 4), dtype=F64),
        LowRank((2, 4), rank=1, dtype=F64),
        LowRank((2, 4), rank=3, dtype=F64),
        BlockCholesky((2, 4), dtype=F64),
    ]
    bounds = [_optimise(q, phi, y, 0.7, 0.5) for q in kinds]
    assert all(low < high - 1e-3 for low, high in pairwise(bounds)), bounds
    full = _optimise(Full((2, 4), dtype=F64), phi, y, 0.7, 0.5)
    assert full == pytest.approx(bounds[-1], abs=1e-6)


def test_gradient_in_precision_and_noise_is_that_of_the_exact_evidence() -> None:
    """At the exact posterior the bound touches the evidence, so their slopes are equal."""
    delta = torch.tensor(0.7, dtype=F64, requires_grad=True)
    sigma = torch.tensor(0.5, dtype=F64, requires_grad=True)
    phi, y = _case()
    q = Full((1, 4), dtype=F64)
    _optimise(q, phi, y, 0.7, 0.5)
    bound = linear_gaussian_bound(phi, y, q, delta, sigma).log_evidence
    exact = exact_evidence(phi, y.squeeze(1), delta, sigma).evidence.log_evidence
    for actual, expected in zip(
        torch.autograd.grad(bound, [delta, sigma]),
        torch.autograd.grad(exact, [delta, sigma]),
        strict=True,
    ):
        assert float(actual) == pytest.approx(float(expected), rel=1e-5)


def test_wrong_shapes_are_rejected() -> None:
    phi, y = _case()
    for shape in ((4,), (2, 4), (1, 5)):
        with pytest.raises(ValueError, match=r"the posterior over \[k, m\]"):
            linear_gaussian_bound(phi, y, Diagonal(shape, dtype=F64))
    with torch.no_grad():
        point = linear_gaussian_bound(phi, y, Point((1, 4), dtype=F64))
    assert float(point.complexity) == 0
