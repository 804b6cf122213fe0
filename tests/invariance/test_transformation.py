"""Test affine maps of images and vectors against brute force, rot90 and adjoints."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symrazor.invariance.transformation import act, adjoint_resample, resample

DOUBLE = torch.float64


def rotation(degrees: float) -> Tensor:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=DOUBLE)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def smooth(n: int, size: int, seed: int = 0) -> Tensor:
    """Sums of a few wide bumps that vanish at the border."""
    line = torch.linspace(-1, 1, size, dtype=DOUBLE)
    y, x = torch.meshgrid(line, line, indexing="ij")
    centres = 0.5 * (2 * torch.rand(n, 4, 2, generator=torch.Generator().manual_seed(seed)) - 1)
    apart = (x - centres[..., :1, None]).square() + (y - centres[..., 1:, None]).square()
    signs = torch.tensor([1.0, -1.0, 0.7, -0.5], dtype=DOUBLE)[:, None, None]
    return (signs * (-apart / 0.05).exp()).sum(1, keepdim=True)


def test_a_quarter_turn_equals_rot90() -> None:
    x = noise(2, 3, 7, 7)
    turned = resample(x, torch.stack([rotation(90), rotation(180)]))
    # x(T q) with T: right -> down, so the picture turns the other way
    assert torch.allclose(turned[:, 0], torch.rot90(x, 1, (2, 3)), atol=1e-12)
    assert torch.allclose(turned[:, 1], x.flip(2, 3), atol=1e-12)


def test_whole_pixel_shifts_fill_with_zeros() -> None:
    x = noise(1, 1, 6, 8)
    shift = torch.eye(3, dtype=DOUBLE)
    shift[0, 2], shift[1, 2] = 2 / 4, -1 / 4  # half-widths of 4 pixels: right 2, up 1
    moved = resample(x, shift.unsqueeze(0))[0, 0, 0]
    expected = torch.zeros(6, 8, dtype=DOUBLE)
    expected[1:, :-2] = x[0, 0, :-1, 2:]
    assert torch.allclose(moved, expected, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 6), st.integers(3, 6))
def test_bilinear_interpolation_by_brute_force(seed: int, h: int, w: int) -> None:
    """Hat functions at every pixel, written down as a dense matrix."""
    x = noise(2, 1, h, w, seed=seed)
    T = torch.eye(3, dtype=DOUBLE) + 0.4 * noise(3, 3, seed=seed + 1)
    T[2] = torch.tensor([0, 0, 1])
    rows, columns = torch.arange(h, dtype=DOUBLE), torch.arange(w, dtype=DOUBLE)
    expected = torch.zeros(2, h, w, dtype=DOUBLE)
    for i in range(h):
        for j in range(w):
            place = [(2 * j - w + 1) / w, (2 * i - h + 1) / w, 1.0]
            u, v, _ = (T @ torch.tensor(place, dtype=DOUBLE)).tolist()
            column, row = u * w / 2 + (w - 1) / 2, v * w / 2 + (h - 1) / 2
            hats = (1 - (rows - row).abs()).clamp_min(0)[:, None]
            hats = hats * (1 - (columns - column).abs()).clamp_min(0)
            expected[:, i, j] = (x[:, 0] * hats).sum((1, 2))
    assert torch.allclose(resample(x, T.unsqueeze(0))[:, 0, 0], expected, atol=1e-10)


def test_maps_may_differ_between_leading_dimensions() -> None:
    x = noise(3, 2, 1, 5, 5)
    T = torch.stack([rotation(a) for a in (0, 10, 20, 30, 40, 50)]).reshape(3, 2, 3, 3)
    together = resample(x, T)
    assert together.shape == (3, 2, 2, 1, 5, 5)
    for i in range(3):
        assert torch.allclose(together[i], resample(x[i], T[i]), atol=1e-12)


def test_gradient_in_the_map() -> None:
    x, start = smooth(2, 9), rotation(17.0).unsqueeze(0) + 0.03 * noise(1, 3, 3)

    def read(top: Tensor) -> Tensor:
        bottom = torch.tensor([[[0, 0, 1]]], dtype=DOUBLE)
        return resample(x, torch.cat([top, bottom], 1))

    assert torch.autograd.gradcheck(read, (start[:, :2].clone().requires_grad_(),), eps=1e-7)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_the_adjoint_is_exact_for_quarter_turns(degrees: float) -> None:
    w, x, T = noise(4, 2, 6, 6), noise(5, 2, 6, 6, seed=1), rotation(degrees).unsqueeze(0)
    by_input = torch.einsum("wchk,nschk->nsw", w, resample(x, T))
    by_weights = torch.einsum("wschk,nchk->nsw", adjoint_resample(w, T), x)
    assert torch.allclose(by_input, by_weights, atol=1e-12)


def test_the_adjoint_agrees_within_the_interpolation_error() -> None:
    """Smooth pictures: the error shrinks with the pixel, and the area of the map is counted."""
    T = torch.linalg.matrix_exp(
        torch.tensor([[0.2, -0.5, 0.1], [0.4, 0.1, -0.1], [0, 0, 0]], dtype=DOUBLE)
    ).unsqueeze(0)
    errors = []
    for size in (24, 48):
        w, x = smooth(3, size, 1), smooth(4, size, 2)
        by_input = torch.einsum("wchk,nschk->nsw", w, resample(x, T))
        by_weights = torch.einsum("wschk,nchk->nsw", adjoint_resample(w, T), x)
        errors.append(float((by_input - by_weights).norm() / by_input.norm()))
    assert errors[0] < 0.06
    assert errors[1] < 0.4 * errors[0]


def test_blur_keeps_the_sum_inside_and_the_default_is_none() -> None:
    x = torch.zeros(1, 1, 15, 15, dtype=DOUBLE)
    x[0, 0, 7, 7] = 1.0
    eye = torch.eye(3, dtype=DOUBLE).unsqueeze(0)
    assert torch.equal(resample(x, eye)[:, 0], x)
    wide = resample(x, eye, blur=1.0)[0, 0, 0]
    assert abs(float(wide.sum()) - 1) < 1e-9
    assert abs(float(wide[7, 8] / wide[7, 7]) - math.exp(-0.5)) < 1e-9
    assert torch.allclose(resample(x, eye, blur=0.1)[:, 0], x, atol=1e-12)


def test_vectors_under_linear_and_affine_maps() -> None:
    x, linear = noise(5, 2), noise(3, 2, 2, seed=1)
    assert torch.allclose(act(x, linear)[1, 2], linear[2] @ x[1])
    affine = noise(3, 3, 3, seed=2)
    expected = affine[1, :2] @ torch.cat([x[4], torch.ones(1, dtype=DOUBLE)])
    assert torch.allclose(act(x, affine)[4, 1], expected)


@pytest.mark.parametrize(
    ("x", "T", "message"),
    [
        (torch.zeros(4, 28), torch.eye(3)[None], "Images must be .* got \\[4, 28\\]"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.eye(3)[None], "floating-point"),
        (torch.zeros(4, 1, 8, 8), torch.eye(2)[None], "Affine maps of the plane"),
        (torch.zeros(4, 1, 8, 8), torch.zeros(0, 3, 3), "s >= 1, got \\[0, 3, 3\\]"),
        (torch.zeros(2, 4, 1, 8, 8), torch.eye(3).expand(3, 1, 3, 3), "leading dimensions \\[2\\]"),
    ],
)
def test_invalid_images_raise(x: Tensor, T: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resample(x, T)


def test_invalid_blurs_raise() -> None:
    with pytest.raises(ValueError, match="blur must be at least 0 pixels, got -1"):
        resample(noise(1, 1, 4, 4), rotation(0).unsqueeze(0), blur=-1.0)


def test_invalid_vectors_raise() -> None:
    with pytest.raises(ValueError, match="must be 2 x 2 .* or 3 x 3 .* got \\[4, 4\\]"):
        act(torch.zeros(5, 2), torch.eye(4)[None])
