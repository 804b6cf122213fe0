"""FC: a dense matrix from every input pixel and channel to every output pixel and channel."""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.weight_sharing import Sharing, sharing
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


def is_wide(inputs: int, outputs: int) -> bool:
    """Whether a block has many outputs and, with few inputs, little work for each of them."""
    return outputs >= 4 * inputs


def block_product(
    x: Float[Tensor, "n k i"], W: Float[Tensor, "k o i"], wide: bool = False
) -> Float[Tensor, "n k o"]:
    """One batched product.

    Stored as [k, o, n]: so a next one, over o, needs no copy. Or, if `wide`, as [k, n, o], from
    which images are copied in whole rows: faster where copies count, see `is_wide`.
    """
    if wide:
        return torch.bmm(x.transpose(0, 1), W.mT).transpose(0, 1)
    return torch.bmm(W, x.permute(1, 2, 0)).permute(2, 0, 1)


class BlockLinear(nn.Module):
    r"""$y[n, k, o] = \sum_i W[k, o, i]\, x[n, k, i]$: one small matrix for each block k."""

    weight: nn.Parameter
    wide = False

    def __init__(
        self, blocks: int, in_features: int, out_features: int, *, last: bool = False
    ) -> None:
        """Draw W uniformly with variance 1 / in_features; `last` if no product follows."""
        super().__init__()
        self.wide = last and is_wide(in_features, out_features)
        bound = math.sqrt(3 / in_features)
        weight = torch.empty(blocks, out_features, in_features).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)

    @property
    def factor(self) -> nn.Parameter:
        """W, as a factor of a path."""
        return self.weight

    def forward(self, x: Float[Tensor, "n k i"]) -> Float[Tensor, "n k o"]:
        """Multiply each block."""
        return block_product(x, self.weight, self.wide)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        blocks, outputs, inputs = self.weight.shape
        return f"{blocks} blocks, {inputs} -> {outputs}"


@sharing.register
def _block_linear(module: BlockLinear) -> Sharing:
    def with_one_use(x: Float[Tensor, "n k f"]) -> Float[Tensor, "n 1 k f"]:
        return x.unsqueeze(1)

    return Sharing(
        inputs=with_one_use,
        outputs=with_one_use,
        bias=None,
        to_blocks=torch.clone,
        from_blocks=torch.clone,
    )


class PixelBias(nn.Module):
    """One bias per output position, shared by the channels: b[o], as in the reference."""

    bias: nn.Parameter

    def __init__(self, pixels: int) -> None:
        """Start at zero."""
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(pixels))

    def forward(self, y: Float[Tensor, "n d o"]) -> Float[Tensor, "n d o"]:
        """Add it."""
        return y + self.bias

    def extra_repr(self) -> str:
        """Size, for `print(model)`."""
        return f"{len(self.bias)} pixels"


@sharing.register
def _pixel_bias(module: PixelBias) -> Sharing:
    return Sharing(
        inputs=lambda y: torch.ones_like(y).unsqueeze(2),
        outputs=lambda g: g.unsqueeze(2),
        weight=None,
    )


@runtime_checkable
class BlockProduct(Protocol):
    """A block-wise product, linear in one parameter."""

    @property
    def factor(self) -> nn.Parameter:
        """The parameter."""

    def __call__(self, x: Float[Tensor, "n k i"]) -> Float[Tensor, "n k o"]:
        """Multiply each block."""


class Factored(Path):
    """Two block-wise products and a bias per pixel: what factored paths have in common."""

    first: BlockProduct
    second: BlockProduct
    offset: nn.Module

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Two batched products; the layout in memory is that of any image."""
        self.check(x)
        hidden = self.first(x.flatten(2)).transpose(1, 2)
        y: Tensor = self.offset(self.second(hidden)).contiguous().unflatten(2, self.out_shape)
        return y

    @property
    def affine(self) -> bool:
        """True."""
        return True

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """theta_2 and theta_1, or the anchor values of both."""
        return self.first.factor, self.second.factor

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """The second factor and the biases."""
        return [self.second.factor, *self.offset.parameters()]


class FFC(Factored):
    """The factored path of ELLA: position-dependent, with 1/S-th of the weights of FC.

    Biases: none by default; with `bias=True` one per output pixel, shared by the channels. The
    reference has D + S' biases, of which the D ones inside the product act like a further column of
    the first factor; a convolutional path beside this one already has a bias per channel. So ours
    has D fewer.

    The two factors matter only as a product, and the evidence lets their precisions drift apart
    (one to 1e5, the other to 1e-4) without an effect: tie them with one prior group per path.

    The first four arguments are those of `Path`.

    Args:
        bias: one bias per output pixel.
        out_shape: spatial shape of the output, in place of a stride.
    """

    first: BlockLinear
    second: BlockLinear

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        bias: bool = False,
        out_shape: Sequence[int] | None = None,
    ) -> None:
        """Make both factors."""
        super().__init__(in_channels, out_channels, in_shape, stride, out_shape)
        self.first = BlockLinear(in_channels, self.pixels_in, out_channels)
        self.second = BlockLinear(out_channels, in_channels, self.pixels_out, last=True)
        self.offset = PixelBias(self.pixels_out) if bias else nn.Identity()
