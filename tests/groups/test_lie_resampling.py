"""Test `sample_grid` against interpolation written as a sum over the corners of a cell."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from symrazor.groups.lie import recurrence_steps, sample_grid

SHAPES = [(9,), (8, 8), (8, 11), (12, 5), (5, 6, 7)]


def interpolated(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x at the mapped position of each pixel, with zeros outside, one pixel at a time."""
    shape = x.shape[2:]
    half = shape[-1] / 2
    out = torch.zeros_like(x)
    for pixel in itertools.product(*map(range, shape)):
        q = [(p + 0.5 - size / 2) / half for p, size in zip(pixel, shape, strict=True)]
        moved = (matrix @ torch.tensor([*q[::-1], 1.0], dtype=matrix.dtype)).flip(0).tolist()
        place = [u * half + size / 2 - 0.5 for u, size in zip(moved, shape, strict=True)]
        for corner in itertools.product(*((math.floor(u), math.floor(u) + 1) for u in place)):
            if all(0 <= p < size for p, size in zip(corner, shape, strict=True)):
                weight = math.prod(1 - abs(u - p) for u, p in zip(place, corner, strict=True))
                out[(..., *pixel)] += weight * x[(..., *corner)]
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_every_grid_is_read_under_every_map(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    dims = len(shape)
    x = torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)
    maps = 0.3 * torch.randn(2, 2, dims, dims + 1, generator=generator, dtype=torch.float64)
    maps[..., :dims] += torch.eye(dims)
    read = sample_grid(x, maps)
    for n, k in itertools.product(range(2), range(2)):
        torch.testing.assert_close(read[n : n + 1, :, k], interpolated(x[n : n + 1], maps[n, k]))
    shared = sample_grid(x, maps[:1])
    torch.testing.assert_close(shared[0], read[0])
    torch.testing.assert_close(shared[1, :, 0], interpolated(x[1:], maps[0, 0])[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_values_beyond_the_border(shape: tuple[int, ...]) -> None:
    """A shift by one pixel along the last axis reads beyond one border only."""
    x = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    maps = torch.eye(len(shape) + 1, dtype=torch.float64)[None, None, : len(shape)].clone()
    maps[0, 0, 0, -1] = 2 / shape[-1]
    beyond = {"zeros": torch.zeros_like(x[..., -1]), "border": x[..., -1], "reflection": x[..., -1]}
    for outside, last in beyond.items():
        read = sample_grid(x, maps, outside).squeeze(2)
        torch.testing.assert_close(read[..., :-1], x[..., 1:])
        torch.testing.assert_close(read[..., -1], last)


@pytest.mark.parametrize("shape", SHAPES)
def test_fewer_pixels_are_read_at_their_own_middles(shape: tuple[int, ...]) -> None:
    x = torch.randn(1, 2, *(2 * s for s in shape), dtype=torch.float64)
    maps = torch.eye(len(shape) + 1, dtype=torch.float64)[None, None, : len(shape)]
    means = getattr(torch.nn.functional, f"avg_pool{len(shape)}d")(x, 2)
    torch.testing.assert_close(sample_grid(x, maps, size=shape).squeeze(2), means)


@pytest.mark.parametrize("dims", [1, 2, 5])
def test_recurrence_steps_are_powers_of_a_root(dims: int) -> None:
    steps = recurrence_steps(dims)
    phi = 1 / steps[0]
    torch.testing.assert_close(phi ** (dims + 1), phi + 1)
    torch.testing.assert_close(steps, phi ** -torch.arange(1, dims + 1, dtype=torch.float64))
