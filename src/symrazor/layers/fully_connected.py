r"""Define paths without a symmetry: fully connected (FC), and factored fully connected (F-FC).

The factored path (ELLA Eq. 5) replaces the dense matrix by two block-wise products,

$$ h[n, d, c] = \sum_s \theta_2[d, c, s]\, x[n, c, s], \qquad
   y[n, d, o] = \sum_c \theta_1[o, d, c]\, h[n, d, c] , $$

with DC(S + S') weights instead of DCSS'. Both products are a `BlockLinear`, which is the
weight-sharing format itself: the first has one block per input channel, the second has one block
per output channel.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.path import Path


class FC(Path):
    r"""Fully connected layer (FC): $y = W\,\mathrm{vec}(x) + b$.

    It has DCSS' weights and DS' biases, contains every other path, and is equivariant to nothing.
    Its curvature is that of `nn.Linear`.

    The first five arguments are those of `Path`.

    Args:
        bias: add one bias per output channel and pixel.
    """

    affine = True

    def _build(self, *, bias: bool = True) -> None:
        features = self.in_channels * self.pixels_in, self.out_channels * self.pixels_out
        self.linear = nn.Linear(*features, bias=bias)
        nn.init.kaiming_uniform_(self.linear.weight, nonlinearity="relu")
        if bias:
            nn.init.zeros_(self.linear.bias)

    def _plain(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), self.linear, nn.Unflatten(1, (self.out_channels, *self.out_shape))
        )

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Multiply the flattened input by the matrix."""
        self.check(x)
        y: Tensor = self.linear(x.flatten(1))
        return y.reshape(len(x), self.out_channels, *self.out_shape)


def is_wide(inputs: int, outputs: int) -> bool:
    """Return whether copying the outputs of a block dominates its cost."""
    return outputs >= 4 * inputs


def block_product(
    x: Float[Tensor, "n k i"], W: Float[Tensor, "k o i"], wide: bool = False
) -> Float[Tensor, "n k o"]:
    """Multiply each block by its matrix.

    The result is stored as [k, o, n], so that a following product over o needs no copy. If `wide`,
    it is stored as [k, n, o], from which images are copied in contiguous rows; see `is_wide`.
    """
    if wide:
        return torch.bmm(x.transpose(0, 1), W.mT).transpose(0, 1)
    return torch.bmm(W, x.permute(1, 2, 0)).permute(2, 0, 1)


class BlockProduct(nn.Module):
    """Base class of block-wise products [n, k, i] -> [n, k, o], linear in their first parameter."""

    @property
    def factor(self) -> nn.Parameter:
        """The first parameter, as a factor of a path."""
        return next(self.parameters())


class BlockLinear(BlockProduct):
    r"""Multiply by one matrix per block: $y[n, k, o] = \sum_i W[k, o, i]\, x[n, k, i]$.

    W is drawn uniformly with variance 1 / in_features.

    Args:
        blocks: number of blocks.
        in_features: inputs per block.
        out_features: outputs per block.
        last: whether no product follows, see `block_product`.
    """

    weight: nn.Parameter
    wide = False

    def __init__(
        self, blocks: int, in_features: int, out_features: int, *, last: bool = False
    ) -> None:
        super().__init__()
        self.wide = last and is_wide(in_features, out_features)
        bound = math.sqrt(3 / in_features)
        weight = torch.empty(blocks, out_features, in_features).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Float[Tensor, "n k i"]) -> Float[Tensor, "n k o"]:
        """Multiply each block."""
        return block_product(x, self.weight, self.wide)

    def extra_repr(self) -> str:
        """Return the sizes."""
        blocks, outputs, inputs = self.weight.shape
        return f"{blocks} blocks, {inputs} -> {outputs}"


def with_one_use(x: Float[Tensor, "n k f"]) -> Float[Tensor, "n 1 k f"]:
    """Add the dimension of shared uses: every sample uses a weight once."""
    return x.unsqueeze(1)


@sharing.register
def _block_linear(module: BlockLinear) -> Sharing:
    return Sharing(
        inputs=with_one_use,
        outputs=with_one_use,
        bias=None,
        to_blocks=torch.clone,
        from_blocks=torch.clone,
    )


class PixelBias(nn.Module):
    """Add one bias b[o] per output position, shared by the channels, initially zero."""

    bias: nn.Parameter

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(pixels))

    def forward(self, y: Float[Tensor, "n d o"]) -> Float[Tensor, "n d o"]:
        """Add the bias."""
        return y + self.bias

    def extra_repr(self) -> str:
        """Return the size."""
        return f"{len(self.bias)} pixels"


@sharing.register
def _pixel_bias(module: PixelBias) -> Sharing:
    return Sharing(
        inputs=lambda y: torch.ones_like(y).unsqueeze(2),
        outputs=lambda g: g.unsqueeze(2),
        weight=None,
    )


class FactoredPath(Path):
    """Base class of factored paths: two block-wise products and a bias per pixel."""

    affine = True
    first: BlockProduct
    second: BlockProduct
    offset: nn.Module

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Apply both products and add the bias."""
        self.check(x)
        hidden = self.first(x.flatten(2)).transpose(1, 2)
        y: Tensor = self.offset(self.second(hidden)).contiguous().unflatten(2, self.out_shape)
        return y

    @property
    def has_bias(self) -> bool:
        """Whether the path has pixel biases."""
        return isinstance(self.offset, PixelBias)

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Both factors, or the anchor values of both."""
        return self.first.factor, self.second.factor

    @property
    def output_weights(self) -> list[nn.Parameter]:
        """The second factor and the biases."""
        return [self.second.factor, *self.offset.parameters()]


class FFC(FactoredPath):
    """Factored fully connected layer (F-FC, ELLA Eq. 5), with DC(S + S') weights.

    The path is equivariant to nothing. By default it has no biases; with `bias=True` it has one per
    output pixel, shared by the channels. The reference implementation has D further biases inside
    the product. They act like another column of the first factor, and a convolutional path beside
    this one already has a bias per channel, so that this path omits them.

    Only the product of the two factors matters, and the evidence lets separate precisions of the
    factors drift apart without an effect (one to 1e5, the other to 1e-4). Tie them with one prior
    group per path, as `path_groups` does.

    The first five arguments are those of `Path`.

    Args:
        bias: add one bias per output pixel.
    """

    first: BlockLinear
    second: BlockLinear

    def _build(self, *, bias: bool = False) -> None:
        self.first = BlockLinear(self.in_channels, self.pixels_in, self.out_channels)
        self.second = BlockLinear(self.out_channels, self.in_channels, self.pixels_out, last=True)
        self.offset = PixelBias(self.pixels_out) if bias else nn.Identity()
