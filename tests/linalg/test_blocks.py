"""Compare blocks with mpmath and dense linear algebra; simulate solvers that fail."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symrazor import CurvatureError
from symrazor.accelerate.devices import run_in_threads
from symrazor.linalg import eigen_jobs
from symrazor.linalg.blocks import Dense, Diag, Kron
from symrazor.linalg.factor import Factor, gram
from symrazor.testing import assert_close, dense_block

F64 = torch.float64
EPS = torch.finfo(F64).eps


def _psd(k: int, d: int, seed: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(k, d, rank or d, generator=generator, dtype=F64)
    return root @ root.mT


def _kron(k: int = 2) -> Kron:
    shape = (k, 3, 4)
    return Kron(
        "w",
        Factor.of_matrix(_psd(k, 4, 0)),
        Factor.of_matrix(_psd(k, 3, 1)),
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
    H = _psd(1, 5, 3)[0]
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
    H[1:4, 1:4] = _psd(1, 3, 5, rank=2)[0]
    values = eigen_jobs.eigenvalues(H, "w", EPS)
    assert values.shape == (6,)
    assert int((values > 1e-9).sum()) == 2
    assert float(values.sum()) == pytest.approx(float(H.trace()))


def test_non_finite_factor_names_the_layer() -> None:
    with pytest.raises(CurvatureError, match=r"conv1\.weight .input side.*NaN"):
        eigen_jobs.eigenvalues(torch.full((2, 2), math.nan), "conv1.weight (input side)", EPS)


def test_negative_eigenvalue_beyond_rounding_is_an_error() -> None:
    with pytest.raises(CurvatureError, match="factor of w is not positive semi-definite"):
        eigen_jobs.eigenvalues(torch.diag(torch.tensor([1.0, -1e-3], dtype=F64)), "w", EPS)
    rounding = torch.diag(torch.tensor([1.0, -1e-9], dtype=F64))
    assert eigen_jobs.eigenvalues(rounding, "w", torch.finfo(torch.float32).eps).min() == 0


def test_failing_solver_is_retried_and_then_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    true_solver = torch.linalg.eigvalsh
    calls = []

    def fails_once(matrix: torch.Tensor) -> torch.Tensor:
        calls.append(matrix)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("failed to converge")
        return true_solver(matrix)

    monkeypatch.setattr(torch.linalg, "eigvalsh", fails_once)
    H = _psd(1, 4, 0)[0]
    assert_close(eigen_jobs.eigenvalues(H, "w", EPS), true_solver(H), 1e-12)
    assert len(calls) == 2

    def fails(matrix: torch.Tensor) -> torch.Tensor:
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigvalsh", fails)
    with pytest.raises(CurvatureError, match="factor of fc: failed to converge"):
        eigen_jobs.eigenvalues(H, "fc", EPS)


def test_kron_rejects_one_precision_per_weight() -> None:
    with pytest.raises(ValueError, match="structure='diag', 'block' or 'full'"):
        _kron().logdet({"w": torch.zeros(6, 4, dtype=F64)})


def test_parallel_tasks_keep_their_order_and_the_thread_count() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run_in_threads([lambda i=i: i for i in range(20)]) == list(range(20))
        assert torch.get_num_threads() == 2
        with pytest.raises(CurvatureError):
            run_in_threads([lambda: 1, _raise])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _raise() -> int:
    raise CurvatureError("no")


def test_factors_of_a_dead_layer_are_zero() -> None:
    """Products of tiny float32 numbers underflow and are then not symmetric up to rounding."""
    noise = 1e-42 * torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    assert not eigen_jobs.eigenvalues(noise, "dead", eps).any()
    assert not eigen_jobs.eigenvalues(torch.stack([noise, 2 * noise]), "dead", eps).any()
    assert not eigen_jobs.eigenvalues(1e-40 * torch.eye(2, dtype=torch.float64), "dead", eps).any()
    with pytest.raises(CurvatureError, match="semi-definite"):
        eigen_jobs.eigenvalues(1e16 * noise, "alive", eps)
