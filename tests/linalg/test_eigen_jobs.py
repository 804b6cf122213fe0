"""Test eigenvalue jobs: errors name the layer, failing solvers are retried."""

import math

import pytest
import torch
from matrices import random_psd

from symrazor import CurvatureError
from symrazor.linalg import eigen_jobs
from symrazor.testing import assert_close

F64 = torch.float64


EPS = torch.finfo(F64).eps


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
    H = random_psd(1, 4, 0)[0]
    assert_close(eigen_jobs.eigenvalues(H, "w", EPS), true_solver(H), 1e-12)
    assert len(calls) == 2

    def fails(matrix: torch.Tensor) -> torch.Tensor:
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigvalsh", fails)
    with pytest.raises(CurvatureError, match="factor of fc: failed to converge"):
        eigen_jobs.eigenvalues(H, "fc", EPS)


def test_factors_of_a_dead_layer_are_zero() -> None:
    """Products of tiny float32 numbers underflow and are then not symmetric up to rounding."""
    noise = 1e-42 * torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    assert not eigen_jobs.eigenvalues(noise, "dead", eps).any()
    assert not eigen_jobs.eigenvalues(torch.stack([noise, 2 * noise]), "dead", eps).any()
    assert not eigen_jobs.eigenvalues(1e-40 * torch.eye(2, dtype=torch.float64), "dead", eps).any()
    with pytest.raises(CurvatureError, match="semi-definite"):
        eigen_jobs.eigenvalues(1e16 * noise, "alive", eps)
