"""Define convolutional paths: a filter at stride 1, then a subsampling.

A convolution is linear in its filter, $K_1 * x + K_2 * x = (K_1 + K_2) * x$. Filters of one relaxed
layer that agree in size and padding are therefore added and applied as one convolution, which
halves the cost of a convolution beside a group convolution. Filters with hooks, such as those set
by the curvature, are applied separately; the result is the same up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import CircularPad, conv_padding, has_hooks, pad_circular
from symrazor.core.validation import check_choice
from symrazor.curvature.convolution import CONVOLVE, Geometry
from symrazor.layers.path import Path, Shape, checked_shape, is_integer, is_symbolic, new_parameter
from symrazor.layers.subsampling import ADAPTIVE_REDUCTIONS, Reduction, Subsample

AnyConv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Padding = Literal["circular", "zeros"]

CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


@dataclass(frozen=True, eq=False)  # torch.compile of torch 2.11 would compare the fields
class Filter:
    """A convolution at stride 1 that preserves the shape of a map.

    Args:
        weight: filter values; odd size in every dimension.
        bias: one per output channel, or None.
        padding: "circular" or "zeros".
        groups: number of channel groups that are not mixed.
    """

    weight: Float[Tensor, "d c *kernel"]
    bias: Float[Tensor, " d"] | None
    padding: Padding
    groups: int = 1

    def __add__(self, other: "Filter") -> "Filter":
        biases = [b for b in (self.bias, other.bias) if b is not None]
        bias = biases[0] + biases[1] if len(biases) == 2 else biases[0] if biases else None
        return Filter(self.weight + other.weight, bias, self.padding, self.groups)

    def __call__(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Convolve."""
        margins = [k // 2 for k in self.weight.shape[2:]]
        convolve = CONVOLVE[len(margins)]
        if self.padding == "circular" and any(margins):
            amounts = tuple(margin for margin in reversed(margins) for _ in range(2))
            x, margins = _pad_circular(x, amounts), [0] * len(margins)
        return convolve(x, self.weight, self.bias, padding=margins, groups=self.groups)

    @torch.no_grad()
    def as_convolution(self, like: nn.Parameter) -> AnyConv:
        """Return the same map as a torch convolution, with parameters like another one."""
        kernel = self.weight.shape[2]
        conv = CONVOLUTIONS[self.weight.dim() - 2](
            self.weight.shape[1] * self.groups,
            len(self.weight),
            kernel,
            padding=kernel // 2,
            padding_mode=self.padding if kernel > 1 else "zeros",
            groups=self.groups,
            bias=self.bias is not None,
            device="meta",
        )
        conv.weight = new_parameter(self.weight, like)
        if self.bias is not None:
            conv.bias = new_parameter(self.bias.clone(), like)
        return conv


def _pad_circular(x: Tensor, amounts: tuple[int, ...]) -> Tensor:
    if is_symbolic(x):
        return F.pad(x, amounts, mode="circular")
    if not x.requires_grad or torch.compiler.is_compiling():  # a compiler fuses the copies itself
        return pad_circular(x, amounts)
    padded: Tensor = CircularPad.apply(x, amounts)  # type: ignore[no-untyped-call]
    return padded


class ComputedFilter(nn.Module):
    """Base class of convolutions whose filter is computed from the first of their parameters.

    Args:
        kernel: size of the filter in each dimension; odd.
        padding: "circular" or "zeros".
    """

    def __init__(self, kernel: Shape, padding: Padding) -> None:
        super().__init__()
        self.padding: Padding = padding
        ones = (1,) * len(kernel)
        margins = tuple(k // 2 for k in reversed(kernel) for _ in range(2))
        self.geometry = Geometry(kernel, ones, ones, padding, margins)

    def as_filter(self) -> Filter | None:
        """Return the filter, differentiable in its parameters, or None if there are several."""
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Convolve with the filter."""
        computed = self.as_filter()
        assert computed is not None
        return computed(x)

    @torch.no_grad()
    def convolution(self) -> AnyConv:
        """Return the same map as one torch convolution."""
        computed = self.as_filter()
        assert computed is not None
        return computed.as_convolution(next(self.parameters()))


def is_padded_to_same_size(conv: AnyConv) -> bool:
    """Return whether a filter is odd, not dilated, and padded such that stride 1 keeps the size."""
    margins = [k // 2 for k in reversed(conv.kernel_size) for _ in range(2)]
    undilated, odd = set(conv.dilation) == {1}, all(k % 2 for k in conv.kernel_size)
    return undilated and odd and list(conv_padding(conv)) == margins


def _filter_of(conv: nn.Module) -> Filter | None:
    """Return the filter of a module, or None if it has none that preserves the shape."""
    if isinstance(conv, ComputedFilter):
        return conv.as_filter()
    if type(conv) not in CONVOLUTIONS.values():
        return None
    assert isinstance(conv, AnyConv)
    if set(conv.stride) != {1} or not is_padded_to_same_size(conv):
        return None
    match conv.padding_mode:
        case "circular" | "zeros" as padding:
            return Filter(conv.weight, conv.bias, padding, conv.groups)
    return None


def sum_of_convolutions(convs: Sequence[nn.Module], x: Float[Tensor, "n c *size"]) -> Tensor:
    """Return the sum of several convolutions of one input, with as few convolutions as possible."""
    merged: dict[object, Filter] = {}
    terms: list[Tensor] = []
    for conv in convs:
        addend = None if is_symbolic(x) or has_hooks(conv) else _filter_of(conv)
        if addend is None:
            terms.append(conv(x))
            continue
        key = addend.padding, addend.groups, addend.weight.shape
        merged[key] = merged[key] + addend if key in merged else addend
    terms += [summed(x) for summed in merged.values()]
    return sum(terms[1:], terms[0])


def check_kernel(kernel: int, in_shape: Sequence[int], padding: Padding) -> None:
    """Raise ValueError for a kernel that is even or wraps around the map more than once."""
    if not is_integer(kernel) or kernel % 2 == 0:
        raise ValueError(f"kernel must be an odd positive integer, got {kernel!r}.")
    check_choice("padding", padding, Padding)
    if kernel // 2 > min(in_shape):
        raise ValueError(
            f"kernel must be at most {2 * min(in_shape) + 1} for maps of shape {tuple(in_shape)}, "
            f"got {kernel}."
        )


def is_strict(padding: str, stride: int, reduction: Reduction, kernel: int) -> bool:
    """Return whether a convolution is exactly equivariant to circular translations.

    A kernel of one pixel needs no padding, so that the kind of padding does not matter.
    """
    borderless = padding == "circular" or kernel == 1
    return borderless and (stride == 1 or reduction in ADAPTIVE_REDUCTIONS)


class FilterPath(Path):
    r"""Base class of convolutional paths: $y = \mathrm{subsampling}(\mathrm{conv}(x))$."""

    group = "translation"
    takes_out_shape = False
    conv: nn.Module
    subsampling: Subsample

    def _set_filter(self, kernel: int, padding: Padding, reduction: Reduction = "l2") -> None:
        """Check the options of a filter; set the subsampling and `strict`."""
        check_kernel(kernel, self.in_shape, padding)
        self.strict = is_strict(padding, self.stride, reduction, kernel)
        self.subsampling = Subsample(self.stride, reduction)

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Convolve, then subsample."""
        self.check(x)
        return self.subsampled(sum_of_convolutions([self.conv], x))

    def subsampled(self, y: Float[Tensor, "n d *size"]) -> Float[Tensor, "n d *small"]:
        """Subsample the output of the filter, or of a sum of filters."""
        return y if self.subsampling.stride == 1 else self.subsampling(y)

    def without_subsampling(self) -> nn.Module:
        """Return the filter alone, at stride 1, as torch.nn modules."""
        return self.conv.convolution() if isinstance(self.conv, ComputedFilter) else self.conv

    def dense(self) -> "FilterPath":
        """Return the same map as a `Conv`, if its filter is computed from other parameters."""
        if not isinstance(self.conv, ComputedFilter):
            return self
        return Conv.from_filters(self, self.conv.convolution())

    def _plain(self) -> nn.Module:
        if self.stride == 1:
            return self.without_subsampling()
        subsampling = self.subsampling.plain((self.out_channels, *self.in_shape))
        return nn.Sequential(self.without_subsampling(), subsampling)


class Conv(FilterPath):
    r"""Convolve: $y[o] = \sum_\delta K[\delta]\, x[o + \delta] + b$, with one bias per channel.

    With circular padding and adaptive subsampling the path is exactly equivariant to circular
    translations. With zero padding it is equivariant away from the border only, and `strict` is
    False.

    The first four arguments are those of `Path`.

    Args:
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        reduction: how a stride shrinks the map, see `symrazor.layers.subsampling.Reduction`.
    """

    conv: AnyConv

    def _build(
        self, *, kernel: int = 3, padding: Padding = "circular", reduction: Reduction = "l2"
    ) -> None:
        self._set_filter(kernel, padding, reduction)
        self.conv = CONVOLUTIONS[len(self.in_shape)](
            self.in_channels, self.out_channels, kernel, padding=kernel // 2, padding_mode=padding
        )
        nn.init.kaiming_uniform_(self.conv.weight, nonlinearity="relu")
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    @classmethod
    def wrap(cls, conv: AnyConv, in_shape: Sequence[int]) -> "Conv":
        """Return a path around an existing convolution, with any stride and padding.

        The path is strict if it preserves the shape at stride 1, with circular or no padding.

        Raises:
            ValueError: not a convolution, or the convolution cannot map this shape.
        """
        if not isinstance(conv, tuple(CONVOLUTIONS.values())):
            raise ValueError(
                f"conv must be an nn.Conv1d, nn.Conv2d or nn.Conv3d, got {type(conv).__name__}."
            )
        in_shape = checked_shape(in_shape)
        if len(in_shape) != len(conv.kernel_size):
            raise ValueError(
                f"in_shape must have {len(conv.kernel_size)} sizes for {conv}, got {in_shape}."
            )
        amounts = conv_padding(conv)
        paddings = [low + high for low, high in zip(amounts[-2::-2], amounts[-1::-2], strict=True)]
        sizes = zip(in_shape, paddings, conv.kernel_size, conv.dilation, conv.stride, strict=True)
        out_shape = tuple(
            (size + padding - dilation * (k - 1) - 1) // step + 1
            for size, padding, k, dilation, step in sizes
        )
        if min(out_shape) < 1:
            raise ValueError(
                f"The kernel of {conv} is larger than the padded input of shape {in_shape}."
            )
        path = cls.__new__(cls)
        path._set_spaces((conv.in_channels, in_shape, conv.out_channels, out_shape))
        path.conv, path.subsampling = conv, Subsample(1)
        borderless = conv.padding_mode == "circular" or not any(paddings)
        moves = zip(path.in_shape, path.out_shape, conv.stride, strict=True)
        path.strict = borderless and all(m == n and 1 in (m, step) for m, n, step in moves)
        return path

    @classmethod
    def from_filters(cls, path: FilterPath, conv: AnyConv) -> "Conv":
        """Return a `Conv` with the filter `conv` and the subsampling of another path."""
        dense = cls.wrap(conv, path.in_shape)
        dense.subsampling, dense.stride = path.subsampling, path.stride
        dense.out_shape = path.out_shape
        reduction, kernel = path.subsampling.reduction, conv.kernel_size[0]
        dense.strict = is_strict(conv.padding_mode, path.stride, reduction, kernel)
        return dense

    @property
    def affine(self) -> bool:
        """Whether the subsampling, if any, is linear and at fixed positions."""
        fixed = self.subsampling.reduction in ("first", "average-pool")
        return self.subsampling.stride == 1 or fixed

    def as_torch_conv(self) -> AnyConv | None:
        """Return the path as one torch convolution, or None if its subsampling prevents that."""
        if self.subsampling.stride == 1:
            return self.conv
        if self.subsampling.reduction != "first":
            return None
        strided = CONVOLUTIONS[len(self.in_shape)](
            self.in_channels,
            self.out_channels,
            self.conv.kernel_size[0],
            self.subsampling.stride,
            self.conv.kernel_size[0] // 2,
            padding_mode=self.conv.padding_mode,
            device="meta",
        )
        strided.weight, strided.bias = self.conv.weight, self.conv.bias
        return strided

    def _plain(self) -> nn.Module:
        conv = self.as_torch_conv()
        return super()._plain() if conv is None else conv
