"""FC: a dense matrix from every input pixel and channel to every output pixel and channel."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from symrazor.layers.path import Path


class FC(Path):
    r"""$y = W\,\mathrm{vec}(x) + b$, with strides inside the matrix: DCSS' weights and DS' biases.

    It contains every other path and is equivariant to nothing. Its curvature is that of nn.Linear.

    The first four arguments are those of `Path`.

    Args:
        bias: one bias per output channel and pixel.
        out_shape: spatial shape of the output, in place of a stride.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        bias: bool = True,
        out_shape: Sequence[int] | None = None,
    ) -> None:
        """Make the matrix."""
        super().__init__(in_channels, out_channels, in_shape, stride, out_shape)
        features = in_channels * self.pixels_in, out_channels * self.pixels_out
        self.linear = nn.Linear(*features, bias=bias)
        nn.init.kaiming_uniform_(self.linear.weight, nonlinearity="relu")
        if bias:
            nn.init.zeros_(self.linear.bias)

    @property
    def affine(self) -> bool:
        """True."""
        return True

    def _plain(self) -> nn.Module:
        """Flatten, the matrix itself, unflatten."""
        return nn.Sequential(
            nn.Flatten(), self.linear, nn.Unflatten(1, (self.out_channels, *self.out_shape))
        )

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Flatten, multiply, restore the shape."""
        self.check(x)
        y: Tensor = self.linear(x.flatten(1))
        return y.reshape(len(x), self.out_channels, *self.out_shape)
