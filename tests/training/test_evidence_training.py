"""Test the batches of evidence steps."""

import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor.data import TensorLoader
from symrazor.training.evidence_training import evidence_batch


@pytest.mark.parametrize(
    ("shape", "batch", "expected"),
    [
        ((1, 8, 8), 64, 250),
        ((1, 8, 8), 300, 300),
        ((1, 40, 40), 64, 250),
        ((3, 32, 32), 256, 130),
        ((3, 256, 256), 64, 16),
    ],
)
def test_batch_size_of_an_evidence_step(shape: tuple[int, ...], batch: int, expected: int) -> None:
    """On a CPU, large examples get smaller batches."""
    model = nn.Sequential(nn.Conv2d(shape[0], 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    razor = sr.Razor(model, "categorical", 1000)
    data = TensorLoader(torch.zeros(1, *shape).expand(400, *shape), torch.zeros(400).long(), batch)
    assert evidence_batch(razor, data) == expected


def test_evidence_of_large_examples_uses_small_batches() -> None:
    x, y = torch.randn(20, 3, 256, 256), torch.arange(20) % 2
    model = nn.Sequential(nn.AvgPool2d(256), nn.Flatten(), nn.Linear(3, 2))
    assert sr.fit(model, (x, y), epochs=1, batch_size=20).data.batch_size == 16
