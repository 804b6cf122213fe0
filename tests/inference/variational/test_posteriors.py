"""Gaussian posteriors against dense covariances and torch's own multivariate normal."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from symrazor.inference.variational import (
    BlockCholesky,
    Diagonal,
    Full,
    GaussianPosterior,
    LowRank,
    MatrixNormal,
    Point,
    best_variance,
    collapsed_kl,
    kl,
)

F64 = torch.float64
Make = Callable[..., GaussianPosterior]
KINDS: dict[str, Make] = {
    "diagonal": Diagonal,
    "low-rank": LowRank,
    "block": BlockCholesky,
    "full": Full,
    "matrix-normal": MatrixNormal,
}
SHAPES = [(3, 4), (5,), (2, 3, 2), ()]


def _random(kind: str, shape: tuple[int, ...], batch: int | None = None) -> GaussianPosterior:
    torch.manual_seed(0)
    q = KINDS[kind](shape, scale=0.5, batch=batch, dtype=F64)
    for parameter in q.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return q.requires_grad_(False)


def _triangle(log_diagonal: Tensor, lower: Tensor) -> Tensor:
    return torch.tril(lower, -1) + torch.diag(log_diagonal.exp())


def _dense(q: GaussianPosterior) -> Tensor:
    """The covariance of the flat weights, written out from the parameters."""
    if isinstance(q, MatrixNormal):
        S, A = (_triangle(r.log_diagonal, r.lower) for r in (q.rows, q.columns))
        return torch.kron(S @ S.T, A @ A.T)
    if isinstance(q, BlockCholesky):
        roots = zip(q.root.log_diagonal, q.root.lower, strict=True)
        return torch.block_diag(*[_triangle(*root) @ _triangle(*root).T for root in roots])
    assert isinstance(q, Diagonal | LowRank)
    diagonal = torch.diag((2 * q.log_scale).exp().reshape(-1))
    return diagonal + q.factor.T @ q.factor if isinstance(q, LowRank) else diagonal


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_divergence_density_and_moments_of_the_dense_gaussian(
    kind: str, shape: tuple[int, ...]
) -> None:
    q = _random(kind, shape)
    dense, flat = _dense(q), q.mean.reshape(-1)
    reference = MultivariateNormal(flat, dense)
    delta = 1.7
    prior = MultivariateNormal(torch.zeros_like(flat), torch.eye(q.size, dtype=F64) / delta)
    assert float(kl(q, delta)) == pytest.approx(float(kl_divergence(reference, prior)), abs=1e-10)
    assert torch.allclose(q.variance().reshape(-1), dense.diagonal(), rtol=1e-12)
    assert float(q.trace()) == pytest.approx(float(dense.trace()), rel=1e-12)
    assert float(q.second_moment()) == pytest.approx(float(dense.trace() + flat @ flat))
    assert float(q.log_det()) == pytest.approx(float(torch.logdet(dense)), abs=1e-10)
    w = torch.randn(3, *shape, dtype=F64)
    assert torch.allclose(q.log_prob(w), reference.log_prob(w.reshape(3, -1)), atol=1e-10)
    each = torch.rand(shape, dtype=F64) + 0.5
    prior = MultivariateNormal(torch.zeros_like(flat), torch.diag(1 / each.reshape(-1)))
    if shape:
        assert float(kl(q, each)) == pytest.approx(float(kl_divergence(reference, prior)))


@pytest.mark.parametrize("kind", list(KINDS))
def test_draws_have_the_dense_covariance(kind: str) -> None:
    q = _random(kind, (3, 2))
    n = 200_000
    draws = q.deviation(n, torch.Generator().manual_seed(1)).reshape(n, -1)
    dense = _dense(q)
    error = (draws.T @ draws / n - dense).abs().max() / dense.diagonal().max()
    assert error < 0.02
    pairs = q.sample(6, torch.Generator().manual_seed(1), antithetic=True)
    assert torch.allclose(pairs.mean(0), q.mean, atol=1e-12)
    assert len(q.sample(5, antithetic=True)) == 5


@pytest.mark.parametrize("kind", list(KINDS))
def test_local_reparameterisation_has_the_exact_distribution_of_each_output(kind: str) -> None:
    q = _random(kind, (3, 2))
    x, n = torch.randn(2, 2, dtype=F64), 200_000
    dense = _dense(q).detach().reshape(3, 2, 3, 2)
    expected = torch.einsum("ni,oipj,nj->nop", x, dense, x)
    drawn = q.linear(x, n, torch.Generator().manual_seed(2)).detach()
    assert drawn.shape == (n, 2, 3)
    variances = torch.einsum("noo->no", expected)
    assert torch.allclose(q.output_variance(x), variances, rtol=1e-10)
    centred = drawn - x @ q.mean.detach().T
    covariance = torch.einsum("sno,snp->nop", centred, centred) / n
    assert (covariance - expected).abs().max() < 0.02 * expected.abs().max()
    assert centred.mean(0).abs().max() < 0.02 * expected.abs().max().sqrt()
    pair = q.linear(x, 2, antithetic=True)
    assert torch.allclose(pair.mean(0), x @ q.mean.T, atol=1e-12)


@pytest.mark.parametrize("kind", list(KINDS))
def test_models_side_by_side_are_the_models_one_by_one(kind: str) -> None:
    batched = _random(kind, (3, 2), batch=4)
    deltas = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=F64)
    x = torch.randn(4, 5, 2, dtype=F64)
    assert batched.sample(7).shape == (7, 4, 3, 2)
    assert batched.linear(x, 7).shape == (7, 4, 5, 3)
    assert batched.log_prob(batched.sample(7)).shape == (7, 4)
    for index in range(4):
        single = KINDS[kind]((3, 2), dtype=F64).requires_grad_(False)
        state = {name: value[index] for name, value in batched.state_dict().items()}
        single.load_state_dict(state)
        assert float(kl(batched, deltas)[index]) == pytest.approx(float(kl(single, deltas[index])))
        assert float(collapsed_kl(batched)[index]) == pytest.approx(float(collapsed_kl(single)))
        w = torch.randn(2, 3, 2, dtype=F64)
        together = w.unsqueeze(1).expand(2, 4, 3, 2)
        assert torch.allclose(batched.log_prob(together)[:, index], single.log_prob(w))
        assert torch.allclose(batched.variance()[index], single.variance())
    # Local reparameterisation: the spread of each model's outputs, by the dense covariance.
    drawn = batched.linear_deviation(x, 20_000, torch.Generator().manual_seed(0)).detach()
    single.load_state_dict({name: value[3] for name, value in batched.state_dict().items()})
    dense = _dense(single).detach().reshape(3, 2, 3, 2)
    expected = torch.einsum("ni,oioj,nj->no", x[3], dense, x[3])
    assert torch.allclose(drawn[:, 3].square().mean(0), expected, rtol=0.06)


@pytest.mark.parametrize("kind", list(KINDS))
def test_best_variance_and_collapsed_divergence(kind: str) -> None:
    q = _random(kind, (3, 4))
    best = float(best_variance(q))
    assert float(collapsed_kl(q)) == pytest.approx(float(kl(q, 1 / best)), abs=1e-10)
    for other in (0.9 * best, 1.1 * best):
        assert float(kl(q, 1 / other)) > float(collapsed_kl(q))
    variance = torch.tensor(best, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(kl(q, 1 / variance), variance)
    assert abs(float(slope)) < 1e-9


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_parameter_gets_a_gradient_also_at_zero_inputs(kind: str) -> None:
    q = KINDS[kind]((3, 2), dtype=F64)
    x = torch.tensor([[0.0, 0.0], [1.0, -1.0]], dtype=F64)
    value = kl(q, 1.0) + q.linear(x, 2).square().sum() + q.sample(2).square().sum()
    for gradient in torch.autograd.grad(value, list(q.parameters())):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


def test_point_estimate_has_no_divergence() -> None:
    q = Point((2, 3), mean=torch.ones(2, 3, dtype=F64)).requires_grad_(False)
    assert q.mean.dtype == F64
    assert float(kl(q, 3.0)) == float(collapsed_kl(q)) == float(q.log_det()) == 0
    assert torch.equal(q.sample(2), torch.ones(2, 2, 3, dtype=F64))
    assert float(q.second_moment()) == 6
    x = torch.randn(4, 3, dtype=F64)
    assert torch.allclose(q.linear(x, 2)[1], x @ q.mean.T)


def test_scale_is_the_starting_standard_deviation() -> None:
    for kind, make in KINDS.items():
        spread = make((3, 4), scale=0.2).variance().sqrt()
        assert torch.allclose(spread, torch.full((3, 4), 0.2), rtol=0.02), kind


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MatrixNormal((2, 3), mean=torch.zeros(3, 2)), r"mean must have shape \[2, 3\]"),
        (lambda: Diagonal((2, 3), scale=0.0), "scale must be positive"),
        (lambda: Diagonal((2, 0)), "at least one weight"),
        (lambda: Full((2,), batch=0), "batch must be at least 1"),
        (lambda: LowRank((2,), rank=0), "rank must be at least 1"),
        (lambda: Diagonal((2, 3)).sample(0), "number of samples must be at least 1"),
        (lambda: Point((2, 3)).sample(0), "number of samples must be at least 1"),
        (lambda: Diagonal((2, 3)).linear(torch.zeros(4, 2)), r"Inputs must be \[\.\.\., 3\]"),
        (lambda: Diagonal((2, 3, 3)).linear(torch.zeros(4, 3)), "must be a matrix"),
        (lambda: kl(Diagonal((2, 3)), -1.0), "prior precision must be positive"),
        (
            lambda: kl(Diagonal((2, 3)), torch.ones(3)),
            "must be one number or have shape",
        ),
        (lambda: Point((2,)).log_prob(torch.zeros(1, 2)), "A point estimate has no density"),
    ],
)
def test_invalid_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_float32_sums_are_taken_in_float64() -> None:
    q = Diagonal((300, 300), scale=math.exp(-1))
    assert q.log_det().dtype == F64
    assert float(q.log_det().detach()) == pytest.approx(-2 * 90_000, rel=1e-7)
