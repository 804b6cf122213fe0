"""Test transformations of signals against closed forms."""

import math

import pytest
import torch
from augment_case import pictures
from torch import Tensor

from symrazor.groups.lie import so3
from symrazor.invariance import (
    Blur,
    Brightness,
    Contrast,
    Jitter,
    Noise,
    Saturation,
    TimeScale,
    TimeShift,
    Transformation,
    affine,
    lie,
)


@pytest.mark.parametrize(
    ("part", "x"),
    [
        (Brightness(), pictures()),
        (Contrast(), pictures()),
        (Saturation(), pictures(channels=3)),
        (Blur(), pictures()),
        (Noise(), pictures()),
        (TimeShift(2.0), torch.randn(5, 2, 9, dtype=torch.float64)),
        (TimeScale(), torch.randn(5, 2, 9, dtype=torch.float64)),
        (Jitter(), torch.randn(5, 6, 3, dtype=torch.float64)),
        (affine(), pictures()),
        (lie(so3()), torch.randn(5, 6, 3, dtype=torch.float64)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_transformations_are_the_identity_at_zero(part: Transformation, x: Tensor) -> None:
    part = part.double()
    still = part(x, x.new_zeros(len(x), part.dim))
    torch.testing.assert_close(still, x, rtol=0, atol=1e-12)
    moved = part(x, x.new_full((len(x), part.dim), 0.7))
    assert not torch.allclose(moved, x, atol=1e-3)
    assert all(math.isfinite(v) for v in part.describe(x.shape[1:]).values())


def test_closed_forms_of_signals() -> None:
    x = torch.arange(8.0, dtype=torch.float64).reshape(1, 1, 8)
    later = TimeShift(2.0).double()(x, x.new_tensor([[0.5]]))
    torch.testing.assert_close(later, (x + 1).clamp(max=7))
    louder = Contrast(math.log(2)).double()(x, x.new_ones(1, 1))
    torch.testing.assert_close(louder, 3.5 + 2 * (x - 3.5))
    wave = torch.cos(2 * math.pi * torch.arange(12, dtype=torch.float64) / 12)
    picture = wave.expand(1, 1, 12, 12)
    soft = Blur(1.5).double()(picture, x.new_ones(1, 1))
    torch.testing.assert_close(soft, picture * math.exp(-0.5 * (1.5 * 2 * math.pi / 12) ** 2))
    points = torch.randn(2, 5, 3, dtype=torch.float64)
    turned = lie(so3(), 0.8).double()(points, points.new_full((2, 3), 0.5))
    torch.testing.assert_close(torch.cdist(turned, turned), torch.cdist(points, points))
