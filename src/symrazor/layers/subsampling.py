r"""Reduce maps: equivariant subsampling, and pooling over positions or group elements.

Subsampling at fixed positions breaks translation equivariance, because a shift by one pixel changes
which pixels are kept. Adaptive polyphase sampling (Chaman and Dokmanic 2021) splits a map into its
$s^d$ polyphase components and keeps the component with the largest norm. A shifted input then gives
the same component, shifted. Every sample chooses its component from its own values alone.

On maps of a larger group, all group elements choose together if they share the coordinates of the
image, as in `GConv`: the result is equivariant to translations and rotations. If each element has
its own coordinate frame, each chooses for itself (`elements`; Xu et al. 2021).

If several components have the largest norm, the first is kept. Such ties occur for maps that are
invariant under an element of the group; no choice of one component is equivariant to it.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.validation import check_choice, check_positive_integer
from symrazor.groups import Group
from symrazor.layers.path import is_integer, is_symbolic, subsampled_shape, traced
from symrazor.layers.point_group import point_group

Reduction = Literal["l2", "max", "first", "average-pool", "max-pool"]
"""How to shrink a map.

"l2" and "max": keep the polyphase component with the largest l2 norm or absolute value; equivariant
to all translations. "first": keep the first component, as a strided convolution does.
"average-pool" and "max-pool": take the mean or maximum of each cell. The last three are equivariant
only to shifts by multiples of the stride.
"""

ADAPTIVE_REDUCTIONS = ("l2", "max")
"""Reductions that choose a component for each sample."""

SetReduction = Literal["sum", "mean", "max"]

AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def _check_options(stride: object, reduction: object, elements: object) -> None:
    check_choice("reduction", reduction, Reduction)
    check_positive_integer("stride", stride)
    check_positive_integer("elements", elements)


def polyphase(x: Float[Tensor, "n c *size"], stride: int) -> Float[Tensor, "n p c *small"]:
    """Return all components x[..., i::stride, j::stride], phases in row-major order."""
    n, c, *shape = x.shape
    small, dims = subsampled_shape(shape, stride), len(shape)
    split = x.reshape(n, c, *(part for size in small for part in (size, stride)))
    order = [0, *range(3, 3 + 2 * dims, 2), 1, *range(2, 2 + 2 * dims, 2)]
    return split.permute(order).reshape(n, stride**dims, c, *small)


def keep_largest(
    x: Float[Tensor, "n c *size"],
    space: Sequence[int],
    stride: int,
    norm: Literal["l2", "max"],
    elements: int = 1,
) -> Float[Tensor, "n c *small"]:
    """Return the polyphase component with the largest norm, per sample and group element.

    Only the kept pixels are copied. `space` is (c, *size), the shape of x without its first
    dimension: all sizes but the batch size are constants, so that torch.fx can trace the function
    (see `Subsample.plain`). Each of the group elements has c / elements channels.
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
    largest = size.flatten(2).argmax(2)
    pixels = torch.arange(prod(shape), device=x.device)
    split = pixels.reshape([part for length in small for part in (length, stride)])
    order = [*range(1, 2 * dims, 2), *range(0, 2 * dims, 2)]
    pixels_of_component = split.permute(order).reshape(stride**dims, prod(small))
    index = pixels_of_component[largest].unsqueeze(2).expand(-1, -1, channels // elements, -1)
    kept = torch.gather(x.flatten(2).unflatten(1, (elements, -1)), 3, index)
    y: Tensor = kept.flatten(1, 2).unflatten(2, small)
    return y


def subsample(
    x: Float[Tensor, "n c *size"], stride: int = 2, reduction: Reduction = "l2", elements: int = 1
) -> Float[Tensor, "n c *small"]:
    """Shrink a map by the stride in every dimension.

    The result is differentiable in the kept values. Samples do not depend on each other, and the
    host is not synchronised with the device.

    Args:
        x: maps; every size must be a multiple of the stride.
        stride: subsampling factor.
        reduction: see `Reduction`; norms run over channels and positions together.
        elements: number of group elements, whose channels follow each other. Each element chooses
            its own component.

    Raises:
        ValueError: the reduction is unknown, x has no spatial dimensions, or the stride or the
            number of elements does not divide the shape of x.
    """
    _check_options(stride, reduction, elements)
    if x.dim() < 3:
        raise ValueError(f"x must be maps [n, c, *size], got {list(x.shape)}.")
    if x.shape[1] % elements:
        raise ValueError(f"elements={elements} does not divide {x.shape[1]} channels.")
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
    """Apply `subsample`; the arguments are the same."""

    def __init__(self, stride: int = 2, reduction: Reduction = "l2", elements: int = 1) -> None:
        super().__init__()
        _check_options(stride, reduction, elements)
        self.stride, self.elements = stride, elements
        self.reduction: Reduction = reduction

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n c *small"]:
        """Shrink the maps."""
        return subsample(x, self.stride, self.reduction, self.elements)

    def plain(self, space: Sequence[int]) -> nn.Module:
        """Return the same map of inputs of shape [n, *space] as torch.nn or plain tensor code."""
        dims, stride = len(space) - 1, self.stride
        every = (..., *(slice(None, None, stride),) * dims)
        match self.reduction:
            case _ if stride == 1:
                return nn.Identity()
            case "average-pool":
                return AVERAGE_POOLS[dims - 1](stride)
            case "max-pool":
                return MAX_POOLS[dims - 1](stride)
            case "first":
                return traced(lambda x: x[every], "First")
            case "l2" | "max" as norm:
                return traced(
                    lambda x: keep_largest(x, space, stride, norm, self.elements), "KeepLargest"
                )

    def extra_repr(self) -> str:
        """Return the options."""
        elements = f", elements={self.elements}" if self.elements > 1 else ""
        return f"stride={self.stride}, reduction={self.reduction!r}{elements}"


class SetPool(nn.Module):
    """Take the sum, mean or maximum over the positions of [n, c, *shape].

    The result is invariant to permutations of the positions.

    Args:
        reduction: "sum", "mean" or "max".
    """

    def __init__(self, reduction: SetReduction = "mean") -> None:
        super().__init__()
        check_choice("reduction", reduction, SetReduction)
        self.reduction = reduction

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n c"]:
        """Reduce all positions."""
        if not is_symbolic(x) and (x.dim() < 3 or not x.numel()):
            raise ValueError(f"x must be non-empty maps [n, c, *size], got {list(x.shape)}.")
        flat = x.flatten(2)
        if self.reduction == "max":
            return flat.amax(2)
        return flat.sum(2) if self.reduction == "sum" else flat.mean(2)

    def extra_repr(self) -> str:
        """Return the reduction."""
        return repr(self.reduction)


class GroupPool(nn.Module):
    """Take the maximum or mean over the group elements of every field.

    Rotations then act on the output as on any image; on maps of one pixel the output is invariant.

    Args:
        elements: number of group elements, |G|; or a finite group; or the name of a point group.
        how: "max" or "mean".
    """

    def __init__(self, elements: int | str | Group, how: Literal["max", "mean"] = "max") -> None:
        super().__init__()
        check_choice("how", how, Literal["max", "mean"])
        order: object = elements
        if isinstance(elements, Group):
            order = elements.finite().order
        elif isinstance(elements, str):
            order = point_group(elements).order
        if not isinstance(order, int) or not is_integer(order):
            raise ValueError(
                f"elements must be a group or its number of elements, got {elements!r}."
            )
        self.elements, self.how = order, how

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Pool over the elements."""
        if not is_symbolic(x) and x.shape[1] % self.elements:
            raise ValueError(f"{self.elements} group elements do not divide {x.shape[1]} channels.")
        split = x.unflatten(1, (self.elements, -1))
        y: Tensor = split.amax(1) if self.how == "max" else split.mean(1)
        return y

    def extra_repr(self) -> str:
        """Return the options."""
        return f"elements={self.elements}, how={self.how!r}"
