r"""Equivariant subsampling: each sample chooses its own polyphase component.

Subsampling at fixed places breaks translation equivariance: a shift by one pixel changes which
pixels survive. Adaptive polyphase sampling (Chaman and Dokmanic 2021) splits the map into its $s^d$
polyphase components and keeps the one with the largest norm, so that a shifted input gives the same
component, shifted. The choice is made for each sample alone, from that sample alone.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.layers.path import halve

Norm = Literal["l2", "max"]


def polyphase(x: Float[Tensor, "n c *size"], stride: int) -> Float[Tensor, "n p c *small"]:
    """All components x[..., i::stride, j::stride], phases in row-major order."""
    n, c, *shape = x.shape
    small = halve(shape, stride)
    dims = len(shape)
    split = x.reshape(n, c, *(part for size in small for part in (size, stride)))
    sizes = [2 + 2 * d for d in range(dims)]
    phases = [3 + 2 * d for d in range(dims)]
    return split.permute(0, *phases, 1, *sizes).reshape(n, stride**dims, c, *small)


def subsample(
    x: Float[Tensor, "n c *size"], stride: int = 2, norm: Norm = "l2"
) -> Float[Tensor, "n c *small"]:
    """Keep, for each sample, the polyphase component of largest norm.

    Differentiable in the values that are kept; no sample sees another; no host synchronisation.

    Args:
        x: maps; every size must be a multiple of the stride.
        stride: how much to shrink.
        norm: "l2" or "max" (largest absolute value), over channels and positions together.

    Raises:
        ValueError: an unknown norm, or a stride that does not divide.
    """
    if norm not in ("l2", "max"):
        raise ValueError(f"expected norm 'l2' or 'max', got {norm!r}")
    if stride == 1:
        return x
    phases = polyphase(x, stride)
    flat = phases.detach().flatten(2)
    size = flat.square().sum(2) if norm == "l2" else flat.abs().amax(2)
    best = size.argmax(1).reshape(-1, *(1,) * (phases.dim() - 1))
    index = best.expand(-1, 1, *phases.shape[2:])
    return torch.gather(phases, 1, index).squeeze(1)


class Subsample(nn.Module):
    """`subsample` as a module."""

    def __init__(self, stride: int = 2, norm: Norm = "l2") -> None:
        """Keep the options."""
        super().__init__()
        self.stride, self.norm = stride, norm

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n c *small"]:
        """Shrink."""
        return subsample(x, self.stride, self.norm)

    def extra_repr(self) -> str:
        """Options, for `print(model)`."""
        return f"stride={self.stride}, norm={self.norm!r}"
