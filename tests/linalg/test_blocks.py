"""Compare blocks with mpmath and dense linear algebra; simulate solvers that fail."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import random_psd

from symrazor.linalg import eigen_jobs
from symrazor.linalg.blocks import Dense, Diag, Kron
from symrazor.linalg.factor import Factor, gram
from symrazor.testing import assert_close, dense_block

F64 = torch.float64
EPS = torch.finfo(F64).eps


def _kron(k: int = 2) -> Kron:
    shape = (k, 3, 4)
    return Kron(
        "w",
        Factor.of_matrix(random_psd(k, 4, 0)),
        Factor.of_matrix(random_psd(k, 3, 1)),
        0.3,
        EPS,
        lambda w: w.reshape(shape),
        lambda blocks: blocks.reshape(shape[0] * shape[1], shape[2]),
    )


def _log(delta: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(math.log(delta), dtype=F64)}


@pytest.mark.parametrize("delta", [1e-8, 1e-4, 1.0, 1e4, 1e6, 1e8, 1e12])
@pytest.mark.parametrize("kind", ["kron", "dense", "diag"])
def test_logdet_against_mpmath(delta: float, kind: str) -> None:
    """The relative error is below 1e-10 for precisions from 1e-8 to 1e12; float32 fails at 1e6."""
    kron = _kron()
    dense = dense_block(kron)
    block = {
        "kron": kron,
        "dense": Dense({"w": torch.Size([24])}, dense, EPS),
        "diag": Diag("w", dense.diagonal().reshape(6, 4)),
    }[kind]
    matrix = torch.diag(dense.diagonal()) if kind == "diag" else dense
    with mpmath.workdps(60):
        exact = mpmath.matrix(matrix.tolist()) / mpmath.mpf(math.exp(math.log(delta)))
        truth = mpmath.log(mpmath.det(mpmath.eye(24) + exact))
        assert float(block.logdet(_log(delta))) == pytest.approx(float(truth), rel=1e-10)


def test_dense_logdet_with_several_precisions() -> None:
    H = random_psd(1, 5, 3)[0]
    block = Dense({"a": torch.Size([2]), "b": torch.Size([3])}, H, EPS)
    delta = {"a": torch.tensor(-3.0, dtype=F64), "b": torch.tensor([0.0, 5.0, 12.0], dtype=F64)}
    prior = torch.diag(torch.cat([delta["a"].expand(2), delta["b"]]).exp())
    expected = torch.linalg.slogdet(torch.eye(5) + torch.linalg.solve(prior, H))[1]
    assert float(block.logdet(delta)) == pytest.approx(float(expected), rel=1e-10)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(1, 3), st.integers(1, 300), st.integers(0, 99))
def test_gram_is_the_sum_of_outer_products(rows: int, k: int, i: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, k, i, generator=generator, dtype=F64)
    assert_close(gram(a), torch.einsum("rki,rkj->kij", a, a), 1e-12)


@pytest.mark.parametrize("kind", ["kron", "dense", "diag"])
def test_draws_and_covariance_match_the_dense_posterior(kind: str) -> None:
    kron = _kron()
    dense = dense_block(kron)
    block = {
        "kron": kron,
        "dense": Dense({"w": torch.Size([24])}, dense, EPS),
        "diag": Diag("w", dense.diagonal()),
    }[kind]
    matrix = torch.diag(dense.diagonal()) if kind == "diag" else dense
    posterior = torch.linalg.inv(matrix + 2.0 * torch.eye(24))
    # Draws are linear in the noise, so the images of unit vectors give their covariance exactly.
    root = block.draw(_log(2.0), torch.eye(24, dtype=F64))
    assert_close(root.T @ root, posterior, 1e-9)
    J = torch.randn(3, 2, 24, dtype=F64)
    assert_close(block.covariance(_log(2.0), J), J @ posterior @ J.mT, 1e-9)


def test_zero_rows_and_singular_factors() -> None:
    H = torch.zeros(6, 6, dtype=F64)
    H[1:4, 1:4] = random_psd(1, 3, 5, rank=2)[0]
    values = eigen_jobs.eigenvalues(H, "w", EPS)
    assert values.shape == (6,)
    assert int((values > 1e-9).sum()) == 2
    assert float(values.sum()) == pytest.approx(float(H.trace()))


def test_kron_rejects_one_precision_per_weight() -> None:
    with pytest.raises(ValueError, match="structure='diag', 'block' or 'full'"):
        _kron().logdet({"w": torch.zeros(6, 4, dtype=F64)})
