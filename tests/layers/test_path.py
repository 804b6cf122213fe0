"""Paths: each inherits the public suite, and parameter counts are fixed."""

import inspect
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from symrazor.layers import FC, FFC, SFC, Conv, GReadout, Path, Relaxed, SConv, Subsample, subsample
from symrazor.testing import PathSuite, assert_close


class TestFC(PathSuite):
    def make(self) -> Path:
        return FC(2, 3, (4, 2), stride=2)


class TestFC1d(PathSuite):
    def make(self) -> Path:
        return FC(2, 3, (5,))


class TestFFC(PathSuite):
    def make(self) -> Path:
        return FFC(2, 3, (4, 6), stride=2, bias=True)


class TestFFC3d(PathSuite):
    def make(self) -> Path:
        return FFC(3, 2, (2, 3, 2))


class TestConv(PathSuite):
    def make(self) -> Path:
        return Conv(2, 3, (4, 6))


class TestConvStrided(PathSuite):
    def make(self) -> Path:
        return Conv(2, 3, (6, 4), stride=2)


class TestConvStridedByLargestValue(PathSuite):
    def make(self) -> Path:
        return Conv(2, 3, (6, 4), stride=2, reduction="max")


class TestConv1dOdd(PathSuite):
    def make(self) -> Path:
        return Conv(2, 3, (9,), stride=3, kernel=5)


class TestConv3d(PathSuite):
    def make(self) -> Path:
        return Conv(1, 2, (3, 4, 2))


class TestConvZeroPadding(PathSuite):
    def make(self) -> Path:
        return Conv(2, 3, (5, 4), padding="zeros")


class TestConvOfOnePixelWithZeroPadding(PathSuite):
    def make(self) -> Path:
        return Conv(2, 3, (4, 6), stride=2, kernel=1, padding="zeros")


class TestWrappedConvWithoutPadding(PathSuite):
    def make(self) -> Path:
        return Conv.wrap(nn.Conv2d(2, 3, 1), (4, 6))


class TestConvOnOnePixel(PathSuite):
    def make(self) -> Path:
        return Conv(2, 3, (1, 1))


@pytest.mark.parametrize("padding", ["circular", "zeros"])
def test_convolution_by_loops(padding: str) -> None:
    torch.manual_seed(0)
    path = Conv(1, 2, (3, 4), padding=padding).double()
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    y = path.conv.bias.detach().reshape(2, 1, 1).expand(2, 3, 4).clone()
    for d, i, j, a, b in itertools.product(range(2), range(3), range(4), range(3), range(3)):
        row, column = i + a - 1, j + b - 1
        inside = 0 <= row < 3 and 0 <= column < 4
        if inside or padding == "circular":
            y[d, i, j] += (path.conv.weight[d, 0, a, b] * x[0, 0, row % 3, column % 4]).item()
    assert_close(path(x)[0], y, 1e-12)


def test_group_elements_can_choose_separate_components() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 4, 4, dtype=torch.float64)
    apart = torch.cat([subsample(part, 2) for part in x.split(2, 1)], 1)
    assert torch.equal(subsample(x, 2, elements=4), apart)
    moved = torch.cat([torch.roll(part, k, 2) for k, part in enumerate(x.split(2, 1))], 1)
    joint = subsample(moved, 2, elements=4)
    for a, b in zip(joint.split(2, 1), apart.split(2, 1), strict=True):
        shifts = [torch.roll(b, s, 2) for s in range(2)]
        for n in range(3):
            assert any(torch.equal(a[n], s[n]) for s in shifts)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pooling_is_torchs(dims: int) -> None:
    x = torch.randn(2, 3, *(4, 6, 2)[:dims], dtype=torch.float64)
    average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
    largest = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
    assert_close(subsample(x, 2, "average-pool"), average(x, 2), 1e-14)
    assert torch.equal(subsample(x, 2, "max-pool"), largest(x, 2))
    assert torch.equal(subsample(x, 2, "first"), x[(..., *(slice(None, None, 2),) * dims)])


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 3, 3),
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), groups=2),
        nn.Conv2d(2, 3, 3, padding="same", dilation=2, padding_mode="circular"),
        nn.Conv2d(2, 3, 1, bias=False),
    ],
)
def test_any_convolution_can_be_a_path(conv: nn.Conv2d) -> None:
    x = torch.randn(2, 2, 7, 6)
    path = Conv.wrap(conv, (7, 6))
    assert torch.equal(path(x), conv(x))
    assert path.out_shape == tuple(conv(x).shape[2:])
    assert path.strict == (conv.padding_mode == "circular" or conv.kernel_size == (1, 1))
    free = FFC(2, conv.out_channels, (7, 6), out_shape=path.out_shape)
    assert Relaxed([path, free])(x).shape == conv(x).shape


@pytest.mark.parametrize(
    ("path", "strict"),
    [
        (Conv(2, 3, (6, 6), kernel=1, padding="zeros"), True),
        (Conv(2, 3, (6, 6), 2, kernel=1, padding="zeros", reduction="first"), False),
        (Conv(2, 3, (6, 6), padding="zeros"), False),
        (SConv(2, 3, (6, 6), anchors=1, kernel=1, padding="zeros"), True),
        (Conv.wrap(nn.Conv2d(2, 3, 1), (6, 6)), True),
        (Conv.wrap(nn.Conv2d(2, 3, 1, stride=2), (6, 6)), False),
        (Conv.wrap(nn.Conv2d(2, 3, 1, stride=2), (1, 1)), True),
        (Conv.wrap(nn.Conv2d(2, 3, 3, padding=1), (6, 6)), False),
        (Conv.wrap(nn.Conv1d(2, 3, 3, 2, padding=3, padding_mode="circular"), (4,)), False),
    ],
)
def test_exact_equivariance_is_reported(path: Path, strict: bool) -> None:
    assert path.strict is strict


def test_representations_of_blocks_show_their_sizes() -> None:
    paths = [FFC(2, 3, (4, 4), bias=True), SFC(2, 3, (4, 4)), SConv(2, 3, (4, 4))]
    shown = "".join(repr(module) for path in paths for module in path.children())
    for text in (
        "BlockLinear(2 blocks, 16 -> 3)",
        "PixelBias(16 pixels)",
        "values 2 x 3 x 8, anchors along its inputs",
        "values 3 x 8 x 2, anchors along its outputs",
        "2 -> 3, kernel=(3, 3), padding='circular'",
    ):
        assert text in shown


def test_representations_are_one_line() -> None:
    conv, free = Conv(2, 3, (4, 4), stride=2), FFC(2, 3, (4, 4), out_shape=(2, 2))
    assert repr(conv) == "Conv(2x4x4 -> 3x2x2, group=translation)"
    assert repr(free) == "FFC(2x4x4 -> 3x2x2, group=None)"
    assert repr(Relaxed([conv, free])) == "Relaxed(2x4x4 -> 3x2x2: Conv + FFC)"


def test_signatures_show_the_options_of_a_path() -> None:
    assert list(inspect.signature(Conv).parameters) == [
        *("in_channels", "out_channels", "in_shape", "stride", "kernel", "padding", "reduction")
    ]
    assert list(inspect.signature(FFC).parameters)[3:] == ["stride", "out_shape", "bias"]
    assert list(inspect.signature(GReadout).parameters)[3:] == ["group"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'kernal'"):
        Conv(2, 3, (4, 4), kernal=3)
    with pytest.raises(TypeError, match="Conv takes a stride, not an out_shape"):
        Conv(2, 3, (4, 4), out_shape=(2, 2))


def _twice() -> list[Path]:
    return [FC(1, 1, (4,))] * 2


def _network(paths: list[Callable[..., Path]], alpha: int = 10) -> nn.Module:
    """Return the eight-block network of ELLA section 6.2 for 32 x 32 colour images."""
    channels = [3, *(alpha * m for m in (1, 2, 2, 4, 4, 8, 8, 16))]
    size, blocks = 32, []
    for c, d, stride in zip(channels, channels[1:], (1, 2, 1, 2, 1, 2, 2, 2), strict=False):
        blocks += [Relaxed([path(c, d, (size, size), stride) for path in paths]), nn.ReLU()]
        size //= stride
    head = [nn.Flatten(), nn.Linear(16 * alpha, 64 * alpha), nn.ReLU(), nn.Linear(64 * alpha, 10)]
    return nn.Sequential(*blocks, *head)


@pytest.mark.parametrize(
    ("paths", "count"),
    [
        ([FC], 133_635_690),
        ([Conv], 338_770),
        ([FFC], 1_540_490),
        ([partial(FFC, bias=True)], 1_542_625 - 450),
        ([FFC, Conv], 1_540_490 + 338_770 - 109_450),
    ],
    ids=["FC", "CONV", "F-FC", "F-FC with pixel biases", "F-FC+CONV"],
)
def test_parameter_counts(paths: list[Callable[..., Path]], count: int) -> None:
    """The reference's F-FC has 450 more parameters: one bias per channel inside the product."""
    with torch.device("meta"):
        network = _network(paths)
    assert sum(p.numel() for p in network.parameters()) == count


def test_a_convolutional_network_is_invariant_after_five_subsamplings() -> None:
    torch.manual_seed(0)
    network = _network([Conv], alpha=2).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        f = network(x)
        for shift in ((1, 0), (0, 1), (7, 30)):
            assert_close(network(torch.roll(x, shift, (2, 3))), f, 1e-12)


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_subsampling_by_brute_force(norm: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 4, dtype=torch.float64)
    got = subsample(x, 2, norm)
    for n in range(4):
        phases = [x[n, :, i::2, j::2] for i in range(2) for j in range(2)]
        sizes = [float(p.norm() if norm == "l2" else p.abs().max()) for p in phases]
        assert torch.equal(got[n], phases[sizes.index(max(sizes))])
    assert Subsample(2, norm)(x).shape == (4, 3, 3, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv(0, 3, (4, 4)), "in_channels must be a positive integer, got 0"),
        (lambda: Conv(2, 3, (5, 4), stride=2), r"stride 2 does not divide the shape \(5, 4\)"),
        (lambda: Conv(2, 3, (4, 4), kernel=2), "odd positive integer, got 2"),
        (lambda: Conv(2, 3, (2, 2), kernel=7), r"at most 5 .*\(2, 2\), got 7"),
        (lambda: Conv(2, 3, (4, 4), padding="reflect"), "'circular' or 'zeros', got 'reflect'"),
        (lambda: Conv(2, 3, (2, 2), kernel=7, padding="zeros"), r"at most 5 .*\(2, 2\), got 7"),
        (lambda: FC(2, 3, (1, 1, 1, 1)), "1 to 3 sizes"),
        (
            lambda: subsample(torch.zeros(1, 3, 4, 4), elements=2),
            "does not divide 3 channels",
        ),
        (lambda: Subsample(2, "mean"), "reduction must be 'l2', .* or 'max-pool', got 'mean'"),
        (lambda: Relaxed([]), "at least one path"),
        (lambda: Relaxed([FC(2, 3, (4,)), FC(2, 4, (4,))]), "the same spaces"),
        (lambda: Relaxed([FC(2, 3, (4,))]).scale_free_paths(0.0), "precision must be positive"),
        (
            lambda: Conv(2, 3, (4, 4))(torch.zeros(1, 2, 4, 5)),
            r"\[n, 2, 4, 4\], got \[1, 2, 4, 5\]",
        ),
        (lambda: FC(2, 3, (4, 4))(torch.zeros(1, 3, 4, 4)), r"\[n, 2, 4, 4\], got \[1, 3, 4, 4\]"),
        (
            lambda: subsample(torch.zeros(1, 1, 4, 4), 2, "l1"),
            "reduction must be 'l2', .*, got 'l1'",
        ),
        (lambda: subsample(torch.zeros(2, 4)), r"maps \[n, c, \*size\], got \[2, 4\]"),
        (
            lambda: subsample(torch.zeros(1, 1, 4, 4), 2.0),
            "stride must be a positive integer, got 2.0",
        ),
        (lambda: Subsample(0), "stride must be a positive integer, got 0"),
        (lambda: Subsample("2"), "stride must be a positive integer, got '2'"),
        (lambda: Subsample(2, elements=0), "elements must be a positive integer, got 0"),
        (lambda: Conv(2.0, 3, (4, 4)), "in_channels must be a positive integer, got 2.0"),
        (lambda: FC(2, "3", (4, 4)), "out_channels must be a positive integer, got '3'"),
        (lambda: FFC(2, True, (4, 4)), "out_channels must be a positive integer, got True"),
        (lambda: Conv(2, 3, (4, 4), stride=2.0), "stride must be .* integer, got 2.0"),
        (
            lambda: Conv(2, 3, (4, 4), stride=(2, 2)),
            r"stride must be .* integer, got \(2, 2\)",
        ),
        (lambda: FC(2, 3, (4, 4), stride=0), "stride must be a positive integer, got 0"),
        (lambda: Conv(2, 3, (4, 4), kernel=(3, 3)), r"odd positive integer, got \(3, 3\)"),
        (lambda: Conv(2, 3, (4, 4), kernel="3"), "odd positive integer, got '3'"),
        (lambda: SConv(2, 3, (4, 4), kernel=3.0), "odd positive integer, got 3.0"),
        (lambda: Conv(2, 3, 4), "1 to 3 sizes, all positive integers, got 4"),
        (lambda: Conv(2, 3, "44"), "1 to 3 sizes, .* got '44'"),
        (lambda: FC(2, 3, (4.0, 4)), r"1 to 3 sizes, .* got \(4.0, 4\)"),
        (lambda: FC(2, 3, (4, 4), out_shape=(0, 2)), r"positive integers, got \(0, 2\)"),
        (lambda: Relaxed([nn.Conv2d(2, 3, 3)]), r"paths of .*, got \['Conv2d'\]. .*Conv.wrap"),
        (lambda: Relaxed(FC(2, 3, (4,))), "a sequence of paths, got FC"),
        (lambda: Relaxed(_twice()), "the same path twice"),
        (lambda: Conv.wrap(nn.Linear(2, 3), (4, 4)), "nn.Conv1d, .* got Linear"),
        (lambda: Conv.wrap(nn.Conv2d(3, 2, 3), (4,)), r"in_shape must have 2 sizes .*, got \(4,\)"),
        (
            lambda: Conv.wrap(nn.Conv2d(3, 2, 5), (4, 4)),
            r"kernel of Conv2d.* is larger than the padded input of shape \(4, 4\)",
        ),
    ],
)
def test_invalid_arguments_raise(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
