"""Register a structure from outside the package; compare the built-in ones with each other."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.likelihood import Categorical
from symrazor.curvature import (
    GradientStructure,
    Method,
    estimate_curvature,
    register_structure,
)
from symrazor.curvature.task import STRUCTURES
from symrazor.linalg.blocks import Block, Dense, Diag
from symrazor.testing import assert_close, dense_ggn


class Isotropic(GradientStructure):
    """One curvature per tensor: the mean of its diagonal."""

    def reduce(self, task, gradients):  # type: ignore[no-untyped-def]
        return {(name, "mean"): j.double().square().sum(0).mean() for name, j in gradients.items()}

    def build(self, task, sums, scale, repeats) -> list[Block]:  # type: ignore[no-untyped-def]
        return [
            Diag(name, torch.full_like(value, float(sums[name, "mean"]) * scale))
            for name, value in task.theta.items()
        ]


@pytest.fixture
def isotropic() -> Iterator[None]:
    register_structure("isotropic", Isotropic())
    yield
    del STRUCTURES["isotropic"]


def _model() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    return model, [(x[:5], y[:5]), (x[5:], y[5:])]


@pytest.mark.usefixtures("isotropic")
def test_a_structure_from_outside_the_package() -> None:
    model, batches = _model()
    curvature = estimate_curvature(model, "categorical", batches, Method(structure="isotropic"))
    diagonal = estimate_curvature(model, "categorical", batches, Method(structure="diag"))
    for block in diagonal.blocks:
        (other,) = (b for b in curvature.blocks if b.names == block.names)
        assert_close(other.spectrum.mean(), block.spectrum.mean(), 1e-12)
    evidence = sr.Razor(model, "categorical", 12, structure="isotropic").evidence(batches)
    assert torch.isfinite(evidence.log_det)


def test_full_matches_autograd_and_diag_its_diagonal() -> None:
    model, batches = _model()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    (full,) = estimate_curvature(model, "categorical", batches, Method(structure="full")).blocks
    diagonal = estimate_curvature(model, "categorical", batches, Method(structure="diag"))
    truth = dense_ggn(model, Categorical(), x, y, full.names)
    assert isinstance(full, Dense)
    assert_close(full.H, truth, 1e-10)
    diagonals = torch.cat([block.spectrum.flatten() for block in diagonal.blocks])
    assert_close(diagonals, truth.diagonal(), 1e-10)


def test_unknown_and_duplicate_names_are_rejected() -> None:
    with pytest.raises(ValueError, match="structure must be one of .*'kron'.*, got 'banded'"):
        Method(structure="banded")
    with pytest.raises(ValueError, match="named 'kron' exists already"):
        register_structure("kron", Isotropic())


@pytest.mark.parametrize("structure", ["full", "block", "kernel"])
def test_matrices_beyond_the_free_memory_are_refused(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("symrazor.curvature.gradient_structures.CHECKED_BYTES", 1000)
    monkeypatch.setattr("symrazor.curvature.gradient_structures.free_bytes", lambda: 2000)
    model = nn.Linear(20, 2)
    x, y = torch.randn(100, 20), torch.arange(100) % 2
    with pytest.raises(ValueError, match=rf"structure='{structure}' needs a matrix of 4\d x 4\d"):
        estimate_curvature(model, "categorical", [(x, y)], Method(structure))
    estimate_curvature(model, "categorical", [(x, y)], Method("kron"))
