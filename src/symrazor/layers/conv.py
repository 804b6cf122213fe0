"""CONV: a convolution, and for strides an equivariant subsampling after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import conv_padding, has_hooks
from symrazor.curvature.convolution import pad_circular
from symrazor.curvature.fast_backward import CircularPad
from symrazor.layers.path import Path, checked_shape, is_integer, is_symbolic
from symrazor.layers.subsampling import ADAPTIVE, Reduction, Subsample

AnyConv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Padding = Literal["circular", "zeros"]

CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Filter:
    """A convolution at stride 1 that keeps the shape of a map.

    Args:
        weight: K, of an odd size in every dimension.
        bias: one per output channel, or none.
        padding: "circular" or "zeros".
        groups: parts of the channels that are not mixed.
    """

    weight: Float[Tensor, "d c *kernel"]
    bias: Float[Tensor, " d"] | None
    padding: Padding
    groups: int = 1

    def __add__(self, other: "Filter") -> "Filter":
        """The filter whose output is the sum of both outputs."""
        biases = [b for b in (self.bias, other.bias) if b is not None]
        bias = biases[0] + biases[1] if len(biases) == 2 else biases[0] if biases else None
        return Filter(self.weight + other.weight, bias, self.padding, self.groups)

    def __call__(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Convolve."""
        around = [k // 2 for k in self.weight.shape[2:]]
        convolve = CONVOLVE[len(around)]
        if self.padding == "circular" and any(around):
            amounts = tuple(amount for amount in reversed(around) for _ in range(2))
            x, around = _wrapped(x, amounts), [0] * len(around)
        return convolve(x, self.weight, self.bias, padding=around, groups=self.groups)


def _wrapped(x: Tensor, amounts: tuple[int, ...]) -> Tensor:
    """Circular padding, its backward pass as short as its forward pass."""
    if is_symbolic(x):
        return F.pad(x, amounts, mode="circular")
    if not x.requires_grad or torch.compiler.is_compiling():  # a compiler joins the copies itself
        return pad_circular(x, amounts)
    padded: Tensor = CircularPad.apply(x, amounts)  # type: ignore[no-untyped-call]
    return padded


@runtime_checkable
class OneFilter(Protocol):
    """A module that convolves with one filter."""

    def as_filter(self) -> Filter | None:
        """The filter, differentiable in what it is made of; None where there are several."""


def _filter_of(conv: nn.Module) -> Filter | None:
    """The one filter of a module, if it has one that keeps shapes."""
    if isinstance(conv, OneFilter):
        return conv.as_filter()
    if type(conv) not in CONVOLUTIONS.values():
        return None
    assert isinstance(conv, AnyConv)
    around = [k // 2 for k in reversed(conv.kernel_size) for _ in range(2)]
    plain = set(conv.stride) | set(conv.dilation) == {1}
    odd = all(k % 2 for k in conv.kernel_size)
    if not plain or not odd or list(conv_padding(conv)) != around:
        return None
    match conv.padding_mode:
        case "circular" | "zeros" as padding:
            return Filter(conv.weight, conv.bias, padding, conv.groups)
    return None


class Filtered(Path):
    r"""$y = \mathrm{shrink}(\mathrm{conv}(x))$: what paths with a filter have in common."""

    group = "translation"
    conv: nn.Module
    shrink: Subsample

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Convolve, then subsample."""
        self.check(x)
        y: Tensor = self.shrink(convolved([self.conv], x))
        return y

    def unshrunk(self) -> nn.Module:
        """The filter alone, at stride 1, as torch.nn modules."""
        return self.conv

    def _plain(self) -> nn.Module:
        """The filter, and its subsampling after it."""
        if self.stride == 1:
            return self.unshrunk()
        shrink = self.shrink.plain((self.out_channels, *self.in_shape))
        return nn.Sequential(self.unshrunk(), shrink)


def convolved(filters: Sequence[nn.Module], x: Float[Tensor, "n c *size"]) -> Tensor:
    """The sum of several convolutions of one input; one convolution where that is possible."""
    together: dict[object, Filter] = {}
    terms: list[Tensor] = []
    for conv in filters:
        own = None if is_symbolic(x) or has_hooks(conv) else _filter_of(conv)
        if own is None:
            terms.append(conv(x))
            continue
        alike = own.padding, own.groups, own.weight.shape
        together[alike] = together[alike] + own if alike in together else own
    terms += [whole(x) for whole in together.values()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def check_kernel(kernel: int, in_shape: Sequence[int], padding: Padding) -> None:
    """Refuse kernels that are even or reach around the map more than once.

    Raises:
        ValueError: what was expected.
    """
    if not is_integer(kernel) or kernel % 2 == 0:
        raise ValueError(f"expected an odd kernel size, got {kernel!r}")
    if padding not in ("circular", "zeros"):
        raise ValueError(f"expected padding 'circular' or 'zeros', got {padding!r}")
    if kernel // 2 > min(in_shape):
        raise ValueError(
            f"expected a kernel of at most {2 * min(in_shape) + 1} on a map of shape "
            f"{tuple(in_shape)}, got {kernel}"
        )


def is_strict(padding: str, stride: int, reduction: Reduction, kernel: int) -> bool:
    """Whether a convolution with these options is exactly equivariant to circular translations.

    A kernel of one pixel needs no padding, so that the kind of padding does not matter.
    """
    borderless = padding == "circular" or kernel == 1
    return borderless and (stride == 1 or reduction in ADAPTIVE)


class Conv(Filtered):
    r"""$y[o] = \sum_\delta K[\delta]\, x[o + \delta] + b$, one bias per channel.

    With circular padding and adaptive subsampling it is exactly equivariant to (circular)
    translations; with zero padding only away from the border, and then `strict` is False.

    The first four arguments are those of `Path`.

    Args:
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        reduction: how a stride shrinks the map, see `symrazor.layers.subsampling`.
    """

    conv: AnyConv

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        kernel: int = 3,
        padding: Padding = "circular",
        reduction: Reduction = "l2",
    ) -> None:
        """Make the convolution."""
        super().__init__(in_channels, out_channels, in_shape, stride)
        check_kernel(kernel, self.in_shape, padding)
        self.strict = is_strict(padding, stride, reduction, kernel)
        make = CONVOLUTIONS[len(self.in_shape)]
        self.conv = make(
            in_channels, out_channels, kernel, padding=kernel // 2, padding_mode=padding
        )
        self.shrink = Subsample(stride, reduction)
        nn.init.kaiming_uniform_(self.conv.weight, nonlinearity="relu")
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    @classmethod
    def wrap(cls, conv: AnyConv, in_shape: Sequence[int]) -> "Conv":
        """A path around a convolution as it is, with whatever stride and padding it has.

        It is strict if it keeps the shape at stride 1, by circular padding or without any.

        Raises:
            ValueError: no convolution, or a shape that it cannot map.
        """
        if not isinstance(conv, tuple(CONVOLUTIONS.values())):
            raise ValueError(
                f"expected an nn.Conv1d, nn.Conv2d or nn.Conv3d, got {type(conv).__name__}"
            )
        in_shape = checked_shape(in_shape)
        if len(in_shape) != len(conv.kernel_size):
            raise ValueError(
                f"expected an in_shape of {len(conv.kernel_size)} sizes for {conv}, got {in_shape}"
            )
        around = _padding(conv)
        sizes = zip(in_shape, around, conv.kernel_size, conv.dilation, conv.stride, strict=True)
        out_shape = [
            (size + lines - gap * (k - 1) - 1) // step + 1 for size, lines, k, gap, step in sizes
        ]
        if min(out_shape) < 1:
            raise ValueError(
                f"expected a kernel no larger than the input of shape {in_shape} with its padding, "
                f"got {conv}"
            )
        path = cls.__new__(cls)
        Path.__init__(path, conv.in_channels, conv.out_channels, in_shape, out_shape=out_shape)
        path.conv = conv
        path.shrink = Subsample(1)
        borderless = conv.padding_mode == "circular" or not any(around)
        moves = zip(path.in_shape, path.out_shape, conv.stride, strict=True)
        path.strict = borderless and all(m == n and 1 in (m, step) for m, n, step in moves)
        return path

    @property
    def affine(self) -> bool:
        """Whether it subsamples, if at all, by a linear map at fixed places."""
        return self.shrink.stride == 1 or self.shrink.reduction in ("first", "average-pool")

    def fixed(self) -> AnyConv | None:
        """The path as one convolution of torch, or None if its subsampling looks at the data."""
        if self.shrink.stride == 1:
            return self.conv
        if self.shrink.reduction != "first":
            return None
        strided = CONVOLUTIONS[len(self.in_shape)](
            self.in_channels,
            self.out_channels,
            self.conv.kernel_size[0],
            self.shrink.stride,
            self.conv.kernel_size[0] // 2,
            padding_mode=self.conv.padding_mode,
            device="meta",
        )
        strided.weight, strided.bias = self.conv.weight, self.conv.bias
        return strided

    def _plain(self) -> nn.Module:
        """The convolution itself, at stride 1 or with "first"; else with its subsampling after."""
        fixed = self.fixed()
        return super()._plain() if fixed is None else fixed


def _padding(conv: AnyConv) -> list[int]:
    """Lines of padding in every dimension, both sides together."""
    amounts = conv_padding(conv)
    return [low + high for low, high in zip(amounts[-2::-2], amounts[-1::-2], strict=True)]
