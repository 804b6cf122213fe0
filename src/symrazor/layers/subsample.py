r"""Equivariant subsampling: each sample chooses its own polyphase component.

Subsampling at fixed places breaks translation equivariance: a shift by one pixel changes which
pixels survive. Adaptive polyphase sampling (Chaman and Dokmanic 2021) splits the map into its $s^d$
polyphase components and keeps the one with the largest norm, so that a shifted input gives the same
component, shifted. The choice is made for each sample alone, from that sample alone; on features of
a larger group each group element chooses for itself (Xu et al. 2021), because a shift of the image
moves the elements in different directions.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from symrazor.layers.path import halve

Reduction = Literal["l2", "max", "first", "average-pool", "max-pool"]
"""How to shrink a map.

"l2" and "max": the polyphase component with the largest l2 norm or absolute value, equivariant.
"first": always the first component, as a strided convolution does. "average-pool" and "max-pool":
the mean or maximum of each cell. The last three are equivariant only to shifts by the stride.
"""


def polyphase(x: Float[Tensor, "n c *size"], stride: int) -> Float[Tensor, "n p c *small"]:
    """All components x[..., i::stride, j::stride], phases in row-major order."""
    n, c, *shape = x.shape
    small = halve(shape, stride)
    dims = len(shape)
    split = x.reshape(n, c, *(part for size in small for part in (size, stride)))
    sizes = [2 + 2 * d for d in range(dims)]
    phases = [3 + 2 * d for d in range(dims)]
    return split.permute(0, *phases, 1, *sizes).reshape(n, stride**dims, c, *small)


def phase(x: Float[Tensor, "n c *size"], stride: int, norm: Reduction) -> Int[Tensor, " n"]:
    """Which polyphase component of each sample has the largest norm."""
    flat = polyphase(x.detach(), stride).flatten(2)
    size = flat.square().sum(2) if norm == "l2" else flat.abs().amax(2)
    return size.argmax(1)


def subsample(
    x: Float[Tensor, "n c *size"], stride: int = 2, reduction: Reduction = "l2", elements: int = 1
) -> Float[Tensor, "n c *small"]:
    """Shrink a map by the stride in every dimension.

    Differentiable in the values that are kept; no sample sees another; no host synchronisation.

    Args:
        x: maps; every size must be a multiple of the stride.
        stride: how much to shrink.
        reduction: see `Reduction`; norms run over channels and positions together.
        elements: the channels are so many group elements, one after the other, and each element
            chooses its own component.

    Raises:
        ValueError: an unknown reduction, or a stride or number of elements that does not divide.
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"expected reduction in {get_args(Reduction)}, got {reduction!r}")
    if elements < 1 or x.shape[1] % elements:
        raise ValueError(
            f"expected a number of group elements that divides {x.shape[1]} channels, "
            f"got {elements}"
        )
    if stride == 1:
        return x
    split = x.reshape(len(x) * elements, -1, *x.shape[2:])
    phases = polyphase(split, stride)
    match reduction:
        case "first":
            kept = phases[:, 0]
        case "average-pool":
            kept = phases.mean(1)
        case "max-pool":
            kept = phases.amax(1)
        case _:
            best = phase(split, stride, reduction).reshape(-1, *(1,) * (phases.dim() - 1))
            index = best.expand(-1, 1, *phases.shape[2:])
            kept = torch.gather(phases, 1, index).squeeze(1)
    return kept.reshape(len(x), x.shape[1], *kept.shape[2:])


class Subsample(nn.Module):
    """`subsample` as a module."""

    def __init__(self, stride: int = 2, reduction: Reduction = "l2", elements: int = 1) -> None:
        """Keep the options."""
        super().__init__()
        if reduction not in get_args(Reduction):
            raise ValueError(f"expected reduction in {get_args(Reduction)}, got {reduction!r}")
        self.stride, self.elements = stride, elements
        self.reduction: Reduction = reduction

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n c *small"]:
        """Shrink."""
        return subsample(x, self.stride, self.reduction, self.elements)

    def extra_repr(self) -> str:
        """Options, for `print(model)`."""
        more = f", elements={self.elements}" if self.elements > 1 else ""
        return f"stride={self.stride}, reduction={self.reduction!r}{more}"
