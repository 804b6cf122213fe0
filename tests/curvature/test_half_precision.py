"""Forward passes in bfloat16, with sums in float32 and float64, against float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.curvature import Method, estimate_curvature
from symrazor.testing import assert_close, dense_block


def _case() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Flatten(2),
        nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(64, 3),
    ).eval()
    return model, torch.randn(64, 1, 4, 4), torch.arange(64) % 3


def _autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "kernel"])
@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_evidence_of_a_forward_pass_in_bfloat16(structure: str, how: str) -> None:
    """The error is that of bfloat16, 2^-8 per operation, and does not grow with the data."""
    _, x, y = _case()
    contexts: list[tuple[torch.dtype, Callable[[], AbstractContextManager[object]]]] = [
        (torch.float64, nullcontext),
        (torch.float32, _autocast) if how == "autocast" else (torch.bfloat16, nullcontext),
    ]
    values = []
    for dtype, context in contexts:
        razor = sr.Razor(_case()[0].to(dtype), "categorical", 64, structure=structure)
        inputs = x.to(dtype)
        with context():
            values.append(razor.evidence([(inputs[:32], y[:32]), (inputs[32:], y[32:])]))
    exact, got = values
    assert float(got.log_det) == pytest.approx(float(exact.log_det), rel=0.02)
    assert float(got.log_likelihood) == pytest.approx(float(exact.log_likelihood), rel=0.01)
    assert float(got.log_det) != float(exact.log_det)


def test_sums_are_computed_in_float32() -> None:
    """Without rounding in the forward pass, the blocks agree with those of float64."""
    torch.manual_seed(0)
    x, y = torch.randint(-4, 5, (500, 3)).float(), torch.zeros(500, 1)
    blocks = []
    for dtype in (torch.float64, torch.bfloat16):
        model = nn.Linear(3, 1).to(dtype)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        method = Method(structure="block")
        estimate = estimate_curvature(model, sr.Gaussian(1.0), [(x.to(dtype), y.to(dtype))], method)
        blocks.append(torch.block_diag(*(dense_block(b) for b in estimate.blocks)))
    assert_close(blocks[1], blocks[0], 1e-6)


def test_a_strided_convolution_and_rows_that_wait_for_a_product() -> None:
    """No sum is computed under autocast, whichever batch completes a factor."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU()
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    x, y = torch.randn(40, 2, 8, 8), torch.arange(40) % 10
    parts = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
    with _autocast():
        got = sr.Razor(model, "categorical", 40).evidence(parts)
    exact_razor = sr.Razor(model.double(), "categorical", 40)
    exact = exact_razor.evidence([(a.double(), b) for a, b in parts])
    assert float(got.log_det) == pytest.approx(float(exact.log_det), rel=0.02)
