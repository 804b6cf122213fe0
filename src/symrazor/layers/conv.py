"""CONV: a convolution, and for strides an equivariant subsampling after it."""

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from symrazor.layers.path import Path
from symrazor.layers.subsample import Norm, subsample

CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


class Conv(Path):
    r"""$y[o] = \sum_\delta K[\delta]\, x[o + \delta] + b$, one bias per channel.

    With circular padding it is exactly equivariant to (circular) translations; with zero padding
    only away from the border, and it says so by having no group.

    The first four arguments are those of `Path`.

    Args:
        kernel: size of the filter in every dimension; odd.
        padding: "circular" or "zeros".
        norm: how the subsampling of a stride chooses its phase.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        kernel: int = 3,
        padding: Literal["circular", "zeros"] = "circular",
        norm: Norm = "l2",
    ) -> None:
        """Make the convolution."""
        super().__init__(in_channels, out_channels, in_shape, stride)
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"expected an odd kernel size, got {kernel}")
        if padding not in ("circular", "zeros"):
            raise ValueError(f"expected padding 'circular' or 'zeros', got {padding!r}")
        if padding == "circular" and kernel // 2 > min(self.in_shape):
            raise ValueError(
                f"expected a kernel of at most {2 * min(self.in_shape) + 1} for circular padding "
                f"of a map of shape {self.in_shape}, got {kernel}"
            )
        self.group = "translation" if padding == "circular" else None
        self.norm: Norm = norm
        make = CONVOLUTIONS[len(self.in_shape)]
        self.conv = make(
            in_channels, out_channels, kernel, padding=kernel // 2, padding_mode=padding
        )
        nn.init.kaiming_uniform_(self.conv.weight, nonlinearity="relu")
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Convolve, then subsample."""
        self.check(x)
        return subsample(self.conv(x), self.stride, self.norm)
