r"""Equivariant subsampling: each sample chooses its own polyphase component.

Subsampling at fixed places breaks translation equivariance: a shift by one pixel changes which
pixels survive. Adaptive polyphase sampling (Chaman and Dokmanic 2021) splits the map into its $s^d$
polyphase components and keeps the one with the largest norm, so that a shifted input gives the same
component, shifted. The choice is made for each sample alone, from that sample alone. On features of
a larger group all elements choose together where they share the coordinates of the image, as those
of `GConv` do: then shifts and turns are both followed. Where each element has a frame of its own, a
shift of the image moves them in different directions, and each chooses for itself (`elements`; Xu
et al. 2021).

Where several components have the largest norm, the first of them is kept. A map that a turn or a
shift leaves as it is has such ties, and no choice of one component follows that element.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.layers.path import is_integer, is_symbolic, subsampled_shape, traced

Reduction = Literal["l2", "max", "first", "average-pool", "max-pool"]
"""How to shrink a map.

"l2" and "max": the polyphase component with the largest l2 norm or absolute value, equivariant.
"first": always the first component, as a strided convolution does. "average-pool" and "max-pool":
the mean or maximum of each cell. The last three are equivariant only to shifts by the stride.
"""

ADAPTIVE = ("l2", "max")
"""Those that choose a component for each sample."""

AVERAGE_POOLS: dict[int, Callable[[int], nn.Module]] = {
    1: nn.AvgPool1d,
    2: nn.AvgPool2d,
    3: nn.AvgPool3d,
}
MAX_POOLS: dict[int, Callable[[int], nn.Module]] = {
    1: nn.MaxPool1d,
    2: nn.MaxPool2d,
    3: nn.MaxPool3d,
}


def _check(stride: object, reduction: object, elements: object) -> None:
    """Refuse options that no map can be shrunk with."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"expected reduction in {get_args(Reduction)}, got {reduction!r}")
    for name, value in (("stride", stride), ("number of group elements", elements)):
        if not is_integer(value):
            raise ValueError(f"expected a whole {name} of at least 1, got {value!r}")


def polyphase(x: Float[Tensor, "n c *size"], stride: int) -> Float[Tensor, "n p c *small"]:
    """All components x[..., i::stride, j::stride], phases in row-major order."""
    n, c, *shape = x.shape
    small = subsampled_shape(shape, stride)
    dims = len(shape)
    split = x.reshape(n, c, *(part for size in small for part in (size, stride)))
    sizes = [2 + 2 * d for d in range(dims)]
    phases = [3 + 2 * d for d in range(dims)]
    return split.permute(0, *phases, 1, *sizes).reshape(n, stride**dims, c, *small)


def keep_largest(
    x: Float[Tensor, "n c *size"],
    space: Sequence[int],
    stride: int,
    norm: Literal["l2", "max"],
    elements: int = 1,
) -> Float[Tensor, "n c *small"]:
    """The polyphase component with the largest norm, for each sample and group element.

    Only the kept pixels are copied. All sizes but the number of data are constants, so that
    torch.fx can trace it (see `Subsample.plain`).

    Args:
        x: maps.
        space: (c, *size), the shape of x without its first dimension.
        stride: how much to shrink.
        norm: "l2" or "max".
        elements: group elements, each with c / elements channels.
    """
    channels, *shape = space
    small, dims = subsampled_shape(shape, stride), len(shape)
    size = x.detach().square() if norm == "l2" else x.detach().abs()
    size = size.unflatten(1, (elements, -1))
    size = size.sum(2) if norm == "l2" else size.amax(2)
    for d in reversed(range(2, 2 + dims)):
        size = size.unflatten(d, (-1, stride))
    positions = list(range(2, 2 + 2 * dims, 2))
    size = size.sum(positions) if norm == "l2" else size.amax(positions)
    best = size.flatten(2).argmax(2)
    pixels = torch.arange(prod(shape), device=x.device)
    split = pixels.reshape([part for length in small for part in (length, stride)])
    order = [*range(1, 2 * dims, 2), *range(0, 2 * dims, 2)]
    places = split.permute(order).reshape(stride**dims, prod(small))
    index = places[best].unsqueeze(2).expand(-1, -1, channels // elements, -1)
    kept = torch.gather(x.flatten(2).unflatten(1, (elements, -1)), 3, index)
    y: Tensor = kept.flatten(1, 2).unflatten(2, small)
    return y


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
        ValueError: an unknown reduction, no spatial dimensions, or a stride or number of elements
            that does not divide.
    """
    _check(stride, reduction, elements)
    if x.dim() < 3:
        raise ValueError(f"expected maps [n, c, *size], got {list(x.shape)}")
    if x.shape[1] % elements:
        raise ValueError(
            f"expected a number of group elements that divides {x.shape[1]} channels, "
            f"got {elements}"
        )
    if stride == 1:
        return x
    match reduction:
        case "first":
            return polyphase(x, stride)[:, 0]
        case "average-pool":
            return polyphase(x, stride).mean(1)
        case "max-pool":
            return polyphase(x, stride).amax(1)
        case "l2" | "max":
            return keep_largest(x, x.shape[1:], stride, reduction, elements)


class Subsample(nn.Module):
    """`subsample` as a module."""

    def __init__(self, stride: int = 2, reduction: Reduction = "l2", elements: int = 1) -> None:
        """Keep the options."""
        super().__init__()
        _check(stride, reduction, elements)
        self.stride, self.elements = stride, elements
        self.reduction: Reduction = reduction

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n c *small"]:
        """Shrink."""
        return subsample(x, self.stride, self.reduction, self.elements)

    def plain(self, space: Sequence[int]) -> nn.Module:
        """The same map of torch.nn modules or plain tensor code.

        Args:
            space: (c, *size), the shape of the input without its first dimension.
        """
        dims, stride = len(space) - 1, self.stride
        every = (..., *(slice(None, None, stride),) * dims)
        match self.reduction:
            case _ if stride == 1:
                return nn.Identity()
            case "average-pool":
                return AVERAGE_POOLS[dims](stride)
            case "max-pool":
                return MAX_POOLS[dims](stride)
            case "first":
                return traced(lambda x: x[every], "First")
            case "l2" | "max" as norm:
                return traced(
                    lambda x: keep_largest(x, space, stride, norm, self.elements), "KeepLargest"
                )

    def extra_repr(self) -> str:
        """Options, for `print(model)`."""
        more = f", elements={self.elements}" if self.elements > 1 else ""
        return f"stride={self.stride}, reduction={self.reduction!r}{more}"


SetReduction = Literal["sum", "mean", "max"]


class SetPool(nn.Module):
    """The sum, mean or maximum over the places of [n, c, *shape].

    Args:
        reduction: which.
    """

    def __init__(self, reduction: SetReduction = "mean") -> None:
        """Check the name."""
        super().__init__()
        if reduction not in ("sum", "mean", "max"):
            raise ValueError(f"expected reduction 'sum', 'mean' or 'max', got {reduction!r}")
        self.reduction = reduction

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n c"]:
        """Reduce all places."""
        if not is_symbolic(x) and (x.dim() < 3 or not x.numel()):
            raise ValueError(f"expected maps [n, c, *size] with places, got {list(x.shape)}")
        flat = x.flatten(2)
        if self.reduction == "max":
            return flat.amax(2)
        return flat.sum(2) if self.reduction == "sum" else flat.mean(2)

    def extra_repr(self) -> str:
        """The reduction, for `print(model)`."""
        return repr(self.reduction)
