r"""Convolutions in the weight-sharing format: patches with the true padding, and their factor.

A convolution is $y[n, t, k, o] = \sum_i W[k, o, i]\, a[n, t, k, i]$ with positions t, groups k and
$i = (\text{channel}, \text{offset})$: the patch of the *padded* input under position t, whatever
the padding mode.
"""

from collections.abc import Sequence
from types import EllipsisType

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.geometry import Conv, Geometry, all_patches, patches
from symrazor.curvature.patch_factor import input_factor
from symrazor.curvature.weight_sharing import Sharing, sharing

ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def channels_to_features(groups: int, g: Tensor) -> Float[Tensor, "n t k o"]:
    """Output-shaped tensor [n, k*o, *positions] -> the format."""
    last = g.movedim(1, -1)
    return last.reshape(len(g), -1, groups, g.shape[1] // groups)


@sharing.register(nn.Conv1d)
@sharing.register(nn.Conv2d)
@sharing.register(nn.Conv3d)
def _convolution(module: Conv) -> Sharing:
    groups, shape, geometry = module.groups, module.weight.shape, Geometry.of(module)
    return Sharing(
        inputs=lambda x: all_patches(x, geometry),
        outputs=lambda g: channels_to_features(groups, g),
        to_blocks=lambda weight: weight.reshape(groups, shape[0] // groups, -1),
        from_blocks=lambda blocks: blocks.reshape(shape),
        input_factor=lambda x: input_factor(x, geometry),
    )


@sharing.register(nn.ConvTranspose1d)
@sharing.register(nn.ConvTranspose2d)
@sharing.register(nn.ConvTranspose3d)
def _transposed(module: ConvTranspose) -> Sharing:
    """A transposed convolution is one at stride 1, kernel flipped, of the spread-out input."""
    groups, (c_in, c_out, *kernel) = module.groups, module.weight.shape
    dims = len(kernel)
    flipped = list(range(-dims, 0))
    before: Sequence[int] = module.padding  # type: ignore[assignment]
    paddings = [
        gap * (k - 1) - p for k, p, gap in zip(kernel, before, module.dilation, strict=True)
    ]
    steps = [int(step) for step in module.stride]

    def inputs(x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n t k i"]:
        sizes = [(s - 1) * step + 1 for s, step in zip(x.shape[2:], steps, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        every: list[slice | EllipsisType] = [slice(None, None, step) for step in steps]
        spread[(..., *every)] = x
        amounts: list[int] = []
        for p, extra in zip(reversed(paddings), reversed(module.output_padding), strict=True):
            amounts += [p, p + int(extra)]
        ones = (1,) * dims
        return patches(F.pad(spread, amounts), kernel, ones, module.dilation, groups)

    def to_blocks(weight: Tensor) -> Float[Tensor, "k o i"]:
        split = weight.reshape(groups, c_in // groups, c_out, *kernel)
        return split.transpose(1, 2).flip(flipped).reshape(groups, c_out, -1)

    def from_blocks(blocks: Float[Tensor, "k o i"]) -> Tensor:
        split = blocks.reshape(groups, c_out, c_in // groups, *kernel).flip(flipped)
        return split.transpose(1, 2).reshape(module.weight.shape)

    return Sharing(
        inputs=inputs,
        outputs=lambda g: channels_to_features(groups, g),
        to_blocks=to_blocks,
        from_blocks=from_blocks,
    )
