"""CONV: a convolution, and for strides an equivariant subsampling after it."""

from collections.abc import Sequence

from torch import nn

from symrazor.layers.filtered import CONVOLUTIONS, AnyConv, Filtered, Padding
from symrazor.layers.path import Path, checked_shape, is_whole
from symrazor.layers.subsampling import ADAPTIVE, Reduction, Subsample


def check_kernel(kernel: int, in_shape: Sequence[int], padding: Padding) -> None:
    """Refuse kernels that are even or reach around the map more than once.

    Raises:
        ValueError: what was expected.
    """
    if not is_whole(kernel) or kernel % 2 == 0:
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
    amounts = conv._reversed_padding_repeated_twice
    return [low + high for low, high in zip(amounts[-2::-2], amounts[-1::-2], strict=True)]
