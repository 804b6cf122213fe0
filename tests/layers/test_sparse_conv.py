"""Sparse paths: the public suite, basis, conversions, parameter counts, invalid input."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from symrazor.layers import FFC, SFC, Basis, Conv, Path, Relaxed, SConv
from symrazor.layers.basis import (
    grid_positions,
)
from symrazor.testing import PathSuite, assert_close


class TestSConv(PathSuite):
    def make(self) -> Path:
        return SConv(2, 3, (4, 6))


class TestSConvStridedSum(PathSuite):
    def make(self) -> Path:
        return SConv(2, 3, (6, 4), stride=2, form="sum", learn_omega="weight")


class TestSConvZeroPadding(PathSuite):
    def make(self) -> Path:
        return SConv(2, 3, (5, 4), anchors=7, padding="zeros", learn_anchors="weight")


class TestSConv1d(PathSuite):
    def make(self) -> Path:
        return SConv(2, 3, (7,), learn_omega="hyper", learn_anchors="hyper")


class TestSConv3d(PathSuite):
    def make(self) -> Path:
        return SConv(1, 2, (3, 4, 2), anchors=0.2, learn_omega="weight", learn_anchors="weight")


class TestSFC(PathSuite):
    def make(self) -> Path:
        return SFC(2, 3, (4, 6), stride=2, bias=True)


class TestSFC1dSum(PathSuite):
    def make(self) -> Path:
        return SFC(2, 3, (5,), form="sum", learn_omega="weight", bias=True)


class TestSFC3d(PathSuite):
    def make(self) -> Path:
        return SFC(2, 3, (2, 3, 2), learn_omega="weight", learn_anchors="weight")


class TestSFCOtherShape(PathSuite):
    def make(self) -> Path:
        return SFC(2, 3, (3, 4), out_shape=(2, 5), learn_omega="hyper", learn_anchors="hyper")


# Conversions.


def test_as_many_anchors_as_pixels_reach_every_filter() -> None:
    torch.manual_seed(0)
    conv = Conv(2, 3, (5, 4), padding="zeros").double()
    nn.init.normal_(conv.conv.bias)
    x = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    for form in ("sum", "interpolate"):
        assert_close(SConv.from_conv(conv, 9, form=form)(x), conv(x), 1e-8)
    ffc = FFC(2, 3, (4, 2), stride=2, bias=True).double()
    nn.init.normal_(ffc.offset.bias)
    y = torch.randn(2, 2, 4, 2, dtype=torch.float64)
    assert_close(SFC.from_ffc(ffc, 1.0)(y), ffc(y), 1e-8)


@pytest.mark.parametrize("path", [SConv(2, 3, (6, 4), 2), SFC(2, 3, (6, 4), 2, bias=True)])
def test_dense_counterparts(path: SConv | SFC) -> None:
    path = path.double()
    with torch.no_grad():
        for parameter in path.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    dense = path.dense()
    assert isinstance(dense, Conv | FFC)
    assert_close(dense(x), path(x), 1e-12)
    back = path.reduce(1.0)
    assert_close(back(x), path(x), 1e-8)


def test_reduction_is_the_nearest() -> None:
    torch.manual_seed(0)
    conv = Conv(2, 3, (5, 5)).double()
    sparse = SConv.from_conv(conv, 4)
    phi = sparse.conv.basis.matrix()
    residual = conv.conv.weight.flatten(2) - sparse.conv.values @ phi
    assert_close(residual @ phi.T, torch.zeros(3, 2, 4, dtype=torch.float64), 1e-8)
    lost = float((residual.norm() / conv.conv.weight.norm()).detach())
    assert lost == pytest.approx((5 / 9) ** 0.5, abs=0.1)  # 5 of 9 dimensions are out of reach


def _smooth(shape: tuple[int, ...]) -> Tensor:
    """Return a smooth image sampled at any resolution."""
    t = grid_positions(shape) / torch.tensor(shape)
    return torch.stack([torch.cos(3 * t[:, 0]) + t[:, 1], torch.sin(4 * t[:, 1])]).reshape(
        1, 2, *shape
    )


def test_resampling_preserves_the_function() -> None:
    torch.manual_seed(0)
    path = SFC(2, 3, (8, 8), stride=2, anchors=5, omega=0.3, form="sum").double()
    fine = path.resample(4)
    assert fine.in_shape == (32, 32)
    assert fine.out_shape == (16, 16)
    coarse_y, fine_y = path(_smooth((8, 8))), fine(_smooth((32, 32)))
    pooled = nn.functional.avg_pool2d(fine_y, 4)
    assert_close(pooled, coarse_y, 0.05)
    conv = SConv(2, 3, (16, 16), anchors=4, omega=0.5, kernel=5, form="sum").double()
    finer = conv.resample((48, 48), kernel=15)
    inner = conv(_smooth((16, 16)))[..., 4:-4, 4:-4]
    pooled = nn.functional.avg_pool2d(finer(_smooth((48, 48))), 3)[..., 4:-4, 4:-4]
    assert_close(pooled, inner, 0.05)


def test_resampling_chooses_the_kernel() -> None:
    torch.manual_seed(0)
    path = SConv(2, 3, (16, 16), anchors=4, omega=0.5, kernel=5, form="sum").double()
    assert path.resample((48, 48)).conv.basis.shape == (15, 15)
    assert path.resample([8, 8]).conv.basis.shape == (3, 3)
    assert SConv(1, 1, (8,), kernel=3).resample((16,)).conv.basis.shape == (7,)
    x = torch.randn(2, 2, 16, 16, dtype=torch.float64)
    assert_close(path.resample((16, 16))(x), path(x), 1e-6)
    even = path.resample((32, 32), kernel=11)  # 10 is even: omega follows the shapes
    assert float(even.conv.basis.omega) == pytest.approx(0.25)
    inner = path(_smooth((16, 16)))[..., 4:-4, 4:-4]
    pooled = nn.functional.avg_pool2d(even(_smooth((32, 32))), 2)[..., 4:-4, 4:-4]
    assert_close(pooled, inner, 0.2)


def test_learned_lengthscales_survive_conversions() -> None:
    path = SFC(2, 3, (4, 4), anchors=0.5, learn_omega="weight", learn_anchors="weight").double()
    with torch.no_grad():
        path.first.basis.omega.fill_(0.4)
        path.second.basis.omega.fill_(-0.8)
        path.first.basis.offsets.add_(0.1)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    assert_close(path.resample(1)(x), path(x), 1e-12)
    assert_close(path.dense()(x), path(x), 1e-12)
    assert float(path.reduce(0.9).second.basis.omega.detach()) == pytest.approx(0.8)


# Parameter counts and bad input.


def _ella(paths: Callable[[int, int, tuple[int, int], int], list[Path]]) -> int:
    """Count the parameters of the eight-block network of ELLA section 6.2 with alpha = 10."""
    channels, size, count = [3, 10, 20, 20, 40, 40, 80, 80, 160], 32, 0
    for c, d, stride in zip(channels[:-1], channels[1:], (1, 2, 1, 2, 1, 2, 2, 2), strict=True):
        layer = Relaxed(paths(c, d, (size, size), stride))
        count += sum(p.numel() for p in layer.parameters())
        size //= stride
    head = nn.Sequential(nn.Linear(160, 640), nn.Linear(640, 10))
    return count + sum(p.numel() for p in head.parameters())


def test_parameter_counts() -> None:
    """The reference's S-FC has 450 more parameters: one bias per channel inside the product."""
    assert _ella(lambda *a: [SConv(*a, anchors=4)]) == 211_620  # 0.2 M
    assert _ella(lambda *a: [SConv(*a, anchors=7)]) == 287_910
    assert _ella(lambda *a: [SFC(*a)]) == 831_820 - 450  # 0.8 M
    assert _ella(lambda *a: [SFC(*a), SConv(*a, anchors=7)]) == 1_010_280 - 450  # 1.0 M


def test_learned_anchors_have_two_parameters_each() -> None:
    path = SConv(3, 5, (8, 8), anchors=4, learn_anchors="weight")
    assert sum(p.numel() for p in path.parameters()) == 5 * 3 * 4 + 2 * 4 + 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SConv(2, 3, (4, 4), anchors=10), "int from 1 to 9, .* got 10"),
        (lambda: SConv(2, 3, (4, 4), anchors=0), "int from 1 to 9, .* got 0"),
        (lambda: SFC(2, 3, (4, 2), anchors=9), "int from 1 to 8, .* got 9"),
        (lambda: SFC(2, 3, (4, 2), anchors=1.5), "int from 1 to 8, .* got 1.5"),
        (lambda: SConv(2, 3, (4, 4), anchors=Basis((5, 5), 4)), r"shape \(3, 3\) .*\(5, 5\)"),
        (lambda: SConv(2, 3, (4, 4), anchors=Basis((3, 3), 4), omega=2.0), "options .'omega'"),
        (lambda: SConv(2, 3, (4, 4), omega=-1.0), "omega must be at least 0, got -1.0"),
        (lambda: SConv(2, 3, (4, 4), omega=0.0, learn_omega="hyper"), "must be positive"),
        (
            lambda: SConv(2, 3, (4, 4), form="spline"),
            "form must be 'sum' or 'interpolate', got 'spline'",
        ),
        (
            lambda: SConv(2, 3, (4, 4), learn_omega=True),
            "learn_omega must be 'fixed', .*, got True",
        ),
        (lambda: SConv(2, 3, (4, 4), kernel=4), "odd positive integer, got 4"),
        (lambda: SConv(2, 3, (2, 2), kernel=7), "at most 5"),
        (lambda: SFC(2, 3, (5, 4), stride=2), r"stride 2 does not divide the shape \(5, 4\)"),
        (lambda: SFC(2, 3, (4, 4), out_shape=(2,)), r"out_shape must have 2 sizes, got \(2,\)"),
        (lambda: SFC(2, 3, (4, 4), stride=2, out_shape=(2, 2)), "a stride or an out_shape"),
        (lambda: SFC(2, 3, (4, 4))(torch.zeros(1, 2, 4, 5)), r"\[n, 2, 4, 4\], got \[1, 2, 4, 5\]"),
        (lambda: SFC(2, 3, (4, 4)).resample(1.1), "integer sizes, got 1.1"),
        (lambda: SFC(2, 3, (4, 4), bias=True).resample(2), "pixel biases cannot be resampled"),
        (lambda: Basis((3, 3), torch.zeros(2, 3)), r"\[p, 2\] .* got \[2, 3\]"),
        (
            lambda: SConv.from_conv(Conv.wrap(nn.Conv2d(2, 3, 3, stride=2), (5, 5))),
            "odd square kernel.* stride, dilation and groups of 1",
        ),
        (lambda: SConv(2, 3, (4, 4)).resample((8,)), r"all 2 dimensions, got \(8,\)"),
        (lambda: SConv(2, 3, (4, 4)).resample((8, 12)), r"the same ratio .* got \(8, 12\)"),
        (lambda: SConv(2, 3, (4, 4)).resample((12, 12), 5), "within 1 of 9, .* got 5"),
        (lambda: SConv(2, 3, (4, 4)).resample((12, 12), 8), "odd positive integer, got 8"),
        (lambda: SConv.from_conv(nn.Conv2d(2, 3, 3)), r"a Conv, got Conv2d. .*Conv.wrap"),
        (lambda: SFC.from_ffc(Conv(2, 3, (4, 4))), "an FFC, got Conv"),
        (lambda: SConv(2, 3, (4, 4), anchors=float("nan")), "1 to 9, .* got nan"),
        (lambda: SConv(2, 3, (4, 4), anchors="4"), "1 to 9, .* got '4'"),
        (lambda: SFC(2, 3, (4, 4), anchors=[0.5, 0.5]), r"1 to 16, .* got \[0.5, 0.5\]"),
        (lambda: SFC(2, 3, (4, 4), anchors=(0.5,)), r"\(input, output\), got \(0.5,\)"),
        (lambda: Basis((3, 3), torch.zeros(2, 2).long()), "floating-point .* got torch.int64"),
        (lambda: Basis((3, 3), torch.full((2, 2), torch.nan)), "finite .* got nan or infinity"),
        (lambda: SConv(2, 3, (4, 4), anchors=torch.zeros(10, 2)), "must be 1 to 9, got 10"),
        (lambda: SConv(2, 3, (4, 4), omga=2.0), "Unknown option 'omga'. Did you mean 'omega'"),
        (lambda: SFC(2, 3, (4, 4), omga=2.0), "Unknown option 'omga'. Did you mean 'omega'"),
        (lambda: SConv(2, 3, (4, 4), omega="1"), "omega must be at least 0, got '1'"),
    ],
)
def test_invalid_arguments_raise(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_layers_can_be_created_in_bfloat16() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        for path in (SConv(1, 2, (6, 6)), SFC(1, 2, (6, 6), anchors=3)):
            assert path(torch.ones(2, 1, 6, 6)).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
