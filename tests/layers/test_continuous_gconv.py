"""Group convolutions with filters on position and angle, or position and scale."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.layers import Conv, GConv, Path, Relaxed, ScaleConv, SE2Conv
from symrazor.layers.continuous_gconv import BankFilter
from symrazor.symmetry.collapse import collapse
from symrazor.testing import PathSuite, assert_close


class TestSE2(PathSuite):
    def make(self) -> Path:
        return SE2Conv(4, 8, (4, 4), angles=4, anchors=6, kernel=3)


class TestSE2Strided(PathSuite):
    def make(self) -> Path:
        return SE2Conv(4, 4, (4, 4), 2, angles=4, anchors=5, kernel=3)


class TestSE2Lift(PathSuite):
    def make(self) -> Path:
        return SE2Conv(2, 4, (4, 4), angles=4, kind="lift", anchors=4, kernel=3)


class TestScale(PathSuite):
    def make(self) -> Path:
        return ScaleConv(4, 4, (4, 4), scales=(1.0, 1.5), anchors=3, kernel=5)


class TestScaleLift(PathSuite):
    def make(self) -> Path:
        return ScaleConv(1, 4, (4, 4), scales=(1.0, 1.5), kind="lift", anchors=3, kernel=5)


def test_se2_convolution_matches_its_formula() -> None:
    torch.manual_seed(0)
    n, k, omega, kappa = 6, 5, 0.7, 1.3
    path = SE2Conv(2 * n, 3 * n, (7, 7), angles=n, anchors=9, kernel=k, widths=(omega, kappa))
    assert isinstance(path.conv, BankFilter)
    u = path.conv.weight.detach().double()
    bank = path.double().conv.as_filter().weight.detach().reshape(n, 3, n, 2, k, k)  # type: ignore[operator]
    z, at = path.anchors
    assert float(z.norm(dim=1).max()) <= 2.0
    for g, o, h, c, i, j in [(0, 0, 0, 0, 0, 0), (1, 2, 4, 1, 3, 2), (5, 1, 1, 0, 4, 1)]:
        delta = torch.tensor([i - 2.0, j - 2.0], dtype=torch.float64)
        R = path.point_group.matrices[g]
        expected = 0.0
        for p in range(9):
            near = torch.linalg.inv(R) @ delta - z[p]
            theta = 2 * math.pi * (h - g) / n - 2 * math.pi * float(at[p]) / n
            angle = math.exp(kappa * (math.cos(theta) - 1))
            expected += float(u[o, c, p] * torch.exp(-(omega**2) * near.square().sum())) * angle
        assert abs(float(bank[g, o, h, c, i, j]) - expected) < 1e-12


def test_scale_convolution_matches_its_formula() -> None:
    torch.manual_seed(0)
    s, k, omega, sigma = (1.0, 1.4, 1.96), 7, 0.9, 0.6
    path = ScaleConv(6, 3, (9, 9), scales=s, anchors=5, kernel=k, widths=(omega, sigma)).double()
    assert isinstance(path.conv, BankFilter)
    bank = path.conv.as_filter().weight.detach().reshape(3, 1, 3, 2, k, k)
    z, at = path.anchors
    for g, h, c, i, j in [(0, 0, 0, 3, 3), (2, 1, 1, 0, 4), (1, 2, 0, 6, 2)]:
        delta = torch.tensor([i - 3.0, j - 3.0], dtype=torch.float64)
        expected = 0.0
        for p in range(5):
            space = float(torch.exp(-(omega**2) * (delta / s[g] - z[p]).square().sum())) / s[g] ** 2
            along = math.exp(-((h - g - float(at[p])) ** 2) / (2 * sigma**2))
            expected += float(path.conv.weight[0, c, p].detach()) * space * along
        assert abs(float(bank[g, 0, h, c, i, j]) - expected) < 1e-12


def _bumps(size: int, factor: float, R: Tensor | None = None) -> Tensor:
    """Return a smooth image, magnified or rotated about its middle."""
    axis = (torch.arange(size, dtype=torch.float64) - (size - 1) / 2) / (size * factor)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    if R is not None:
        y, x = torch.einsum("ji,jab->iab", R, torch.stack([y, x]))
    places = [(-0.06, 0.03, 1.0), (0.05, 0.07, -0.7), (0.02, -0.08, 0.8)]
    parts = [c * torch.exp(-((x - a) ** 2 + (y - b) ** 2) / 0.003) for a, b, c in places]
    return torch.stack(parts).sum(0)[None, None]


def test_magnified_images_move_along_the_scales() -> None:
    """Scale 2 of a magnified image equals scale 1 of the image."""
    torch.manual_seed(0)
    step, size = 1.5, 48
    scales = (1.0, step, step**2)
    lift = ScaleConv(1, 3, (size, size), scales=scales, kind="lift", anchors=6, kernel=17).double()
    deep = ScaleConv(3, 3, (size, size), scales=scales, anchors=8, kernel=17).double()
    with torch.no_grad():
        small, large = lift(_bumps(size, 1.0)), lift(_bumps(size, step))
        axis = ((torch.arange(size) + 0.5) / step * 2 / size - 1 / step).double()
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij")[::-1], -1)[None]
        magnified = torch.nn.functional.grid_sample(small, grid, "bicubic", align_corners=False)
        for g in (1, 2):
            error = (large[:, g] - magnified[:, g - 1]).norm() / large[:, g].norm()
            assert error < 0.04, (g, float(error))
        other = (large[:, 1] - magnified[:, 1]).norm() / large[:, 1].norm()
        assert other > 0.2  # the same scale is not what it should be
        assert deep(small).shape == small.shape


def test_more_angles_cost_no_weights_and_collapse() -> None:
    torch.manual_seed(0)
    counts = {
        n: sum(p.numel() for p in SE2Conv(n, 2 * n, (5, 5), angles=n, anchors=8).parameters())
        for n in (4, 8, 16)
    }
    assert set(counts.values()) == {2 * 8 + 2}
    layer = Relaxed([SE2Conv(8, 8, (6, 6), angles=4), GConv(8, 8, (6, 6)), Conv(8, 8, (6, 6))])
    x = torch.randn(2, 8, 6, 6)
    assert_close(collapse(layer, x)(x), layer(x), 1e-5)
    assert layer.removable_paths() == [2]  # the convolution is looser than the two of p4


def test_rotations_by_other_angles_match_the_plane() -> None:
    """Lifting an image rotated by 45 degrees rotates the lifted map, up to the pixel grid."""
    torch.manual_seed(0)
    size, n = 64, 8
    path = SE2Conv(1, n, (size, size), angles=n, kind="lift", kernel=11, anchors=12).double()
    _, after = path.transformations()[0]
    R = path.point_group.matrices[1]
    with torch.no_grad():
        y, turned = path(_bumps(size, 1.0)), path(_bumps(size, 1.0, R))
    error = float((turned - after(y)).norm() / y.norm())
    assert error < 0.05, error
    assert float((turned - y).norm() / y.norm()) > 0.5
    assert not path.strict and path.interpolation_error == 0


def test_invalid_options_raise() -> None:
    for wrong, message in [
        ({"angles": 0}, "angles must be an integer"),
        ({"kind": "separable"}, "kind"),
        ({"widths": (0.0, 1.0)}, "two positive numbers"),
        ({"widths": 2.0}, "two positive numbers"),
        ({"anchors": 0}, "anchors"),
        ({"angles": 3}, "multiple of 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            SE2Conv(8, 8, (6, 6), **wrong)  # type: ignore[arg-type]
    for wrong, message in [
        ({"scales": (1.0, 2.0, 3.0)}, "by equal factors"),
        ({"scales": (2.0, 4.0)}, "increase from 1"),
        ({"scales": 2.0}, "increase from 1"),
        ({"kind": "pointwise"}, "kind"),
        ({"widths": (1.0,)}, "two positive numbers"),
        ({"scales": (1.0, 2.0)}, "2 scales must divide"),
    ]:
        with pytest.raises(ValueError, match=message):
            ScaleConv(3, 3, (8, 8), **wrong)  # type: ignore[arg-type]
