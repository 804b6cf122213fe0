r"""Reduce maps: equivariant subsampling, and pooling over positions or group elements.

Subsampling at fixed positions breaks translation equivariance, because a shift by one pixel changes
which pixels are kept. Adaptive polyphase sampling (Chaman and Dokmanic 2021) splits a map into its
$s^d$ polyphase components and keeps the component with the largest norm. A shifted input then gives
the same component, shifted. Every sample chooses its component from its own values alone.

**Pooling.** A pool with a stride breaks equivariance for the same reason: a shift moves the image
against the grid of cells. In aligned pooling every sample chooses the position of its grid. With
the energy $E_c = \sum_{i \in c} \lVert x_i \rVert^2$ of a cell c, it takes the grid with the
largest $\sum_c E_c^2$. This score does not prefer a corner of a cell, so that rotations and
reflections of the map move the grid along.

**Sizes that the stride does not divide.** A grid on n circular positions then has
$m = \lceil n/s \rceil$ cells, two of which overlap at a seam. There are n grids, one for each
centre. Energies are weighted by a window that falls from the centre to the seam, so that the seam
lies where there is little energy. The cells are rolled such that cell k is near position k s: a
shift of the input by t shifts the output by $\lfloor t m / n \rfloor$ or
$\lceil t m / n \rceil$, and the values stay the same. Circular convolutions and a global pool
after it give an exactly invariant network.

On maps of a larger group, all group elements choose together if they share the coordinates of the
image, as in `GConv`: the result is equivariant to translations and rotations. If each element has
its own coordinate frame, each chooses for itself (`elements`; Xu et al. 2021).

If several grids have the largest score, the first is kept. Exact ties occur for maps that are
invariant under an element g of a group. The tied grids are then images of each other under g: a
network that is invariant under g has the same output for all of them.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from symrazor.core.validation import check_choice, check_positive_integer
from symrazor.groups import Group
from symrazor.layers.path import is_integer, is_symbolic, subsampled_shape, traced
from symrazor.layers.point_group import point_group

Reduction = Literal[
    "l2", "max", "aligned-max-pool", "aligned-average-pool", "first", "average-pool", "max-pool"
]
"""How to shrink a map.

"l2" and "max": keep the polyphase component with the largest l2 norm or absolute value.
"aligned-max-pool" and "aligned-average-pool": take the maximum or mean of each cell of a grid that
every sample chooses. These four are equivariant to all circular translations. "first": keep the
first component, as a strided convolution does. "average-pool" and "max-pool": take the mean or
maximum of each cell of a fixed grid. The last three are equivariant only to shifts by multiples of
the stride.

"l2" and the aligned pools accept every size. The others need multiples of the stride.
"""

ADAPTIVE_REDUCTIONS = ("l2", "max", "aligned-max-pool", "aligned-average-pool")
"""Reductions that choose a grid for each sample."""
ALIGNED_POOLS = ("aligned-max-pool", "aligned-average-pool")

SetReduction = Literal["sum", "mean", "max"]

AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


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


def _grid_scores(energy: Tensor, dim: int, size: int, stride: int) -> Tensor:
    """Replace the positions of a dimension by grids, with the weighted sum over each grid."""
    if size % stride == 0:
        total: Tensor = energy.unflatten(dim, (-1, stride)).sum(dim)
        return total
    cells, positions = -(-size // stride), torch.arange(size, device=energy.device)
    offset = positions - positions.unsqueeze(1) + (stride * (cells - 1) // 2 + size)  # from start
    offset = offset % size
    window = torch.sin((offset // stride + 0.5) * (math.pi / cells)).square()
    weights = (window * (offset % stride == 0)).type_as(energy)
    return (energy.transpose(dim, -1) @ weights.mT).transpose(dim, -1)


def _cell_energies(energy: Tensor, dims: int, stride: int) -> Tensor:
    """Return the squared energy of the cell that starts at each position of [n, g, *size]."""
    for dim in range(2, 2 + dims):
        every = (slice(None),) * dim
        total = energy
        for i in range(1, stride):
            start, end = energy[(*every, slice(i, None))], energy[(*every, slice(None, i))]
            total = total + torch.cat([start, end], dim)
        energy = total
    return energy.square()


def _grid_positions(chosen: Int64[Tensor, " m"], size: int, stride: int, pixels: int) -> Tensor:
    """Return the positions of the first `pixels` of every cell of the chosen grids, [m, k].

    Grid a has its cells at a + i stride if the stride divides the size. Otherwise a is the centre
    of the grid, and its cells are rolled such that cell k is near position k stride.
    """
    cells, grid = -(-size // stride), chosen.unsqueeze(1)
    index = torch.arange(cells, device=chosen.device)
    if size % stride:
        index = (index - grid * cells // size + cells) % cells
        grid = grid + (size * stride - stride * (cells - 1) // 2)
    starts = (grid + index * stride).unsqueeze(2)
    return ((starts + torch.arange(pixels, device=chosen.device)) % size).flatten(1)


def grid_pixels(
    x: Float[Tensor, "n c *size"],
    space: Sequence[int],
    stride: int,
    reduction: Reduction,
    elements: int = 1,
) -> Int64[Tensor, "n g k"]:
    """Return the pixels on the grid that each sample and group element chooses, in order.

    For aligned pools these are all pixels of the cells, for other reductions the first of each.
    `space` is (c, *size), the shape of x without its first dimension: all sizes but the batch size
    are constants, so that torch.fx can trace the function (see `Subsample.plain`). Each of the
    group elements has c / elements channels.
    """
    _, *shape = space
    dims, pixels_per_cell = len(shape), stride if reduction in ALIGNED_POOLS else 1
    split = x.detach().unflatten(1, (elements, -1))
    if reduction == "max":
        scores = split.abs().amax(2)
        for dim in range(2, 2 + dims):
            scores = scores.unflatten(dim, (-1, stride)).amax(dim)
    else:
        scores = split.square().sum(2)
        scores = _cell_energies(scores, dims, stride) if reduction in ALIGNED_POOLS else scores
        for dim, size in enumerate(shape, 2):
            scores = _grid_scores(scores, dim, size, stride)
    chosen = scores.flatten(2).argmax(2).flatten()
    grids = [stride if size % stride == 0 else size for size in shape]
    pixels = chosen.reshape(-1, *(1,) * dims) * 0
    for dim, size in enumerate(shape):
        grid = chosen // math.prod(grids[dim + 1 :]) % grids[dim]
        positions = _grid_positions(grid, size, stride, pixels_per_cell)
        pixels = pixels * size + positions.unflatten(1, _along(dim, dims))
    by_element: Tensor = pixels.flatten(1).unflatten(0, (-1, elements))
    return by_element


def _along(dim: int, dims: int) -> list[int]:
    """Return a shape with -1 in one dimension and 1 in the others."""
    return [-1 if i == dim else 1 for i in range(dims)]


def kept_shape(shape: Sequence[int], stride: int, reduction: Reduction) -> list[int]:
    """Return the sizes of the map of all pixels that `grid_pixels` returns."""
    return [-(-size // stride) * (stride if reduction in ALIGNED_POOLS else 1) for size in shape]


def keep_grid(
    x: Float[Tensor, "n c *size"],
    space: Sequence[int],
    stride: int,
    reduction: Reduction,
    elements: int = 1,
) -> Float[Tensor, "n c *kept"]:
    """Return the map of the pixels of `grid_pixels`."""
    pixels = grid_pixels(x, space, stride, reduction, elements).unsqueeze(2)
    index = pixels.expand(-1, -1, space[0] // elements, -1)
    grid = torch.gather(x.flatten(2).unflatten(1, (elements, -1)), 3, index)
    y: Tensor = grid.flatten(1, 2).unflatten(2, kept_shape(space[1:], stride, reduction))
    return y


def _aligned_max_pool(x: Float[Tensor, "n c *size"], stride: int, elements: int) -> Tensor:
    """Return the maximum of each cell of the chosen grid.

    The pixels with the maxima are found first, without gradient, in rows of channels: max pooling
    and copies are several times faster in this order. The backward pass then touches the kept
    pixels alone.
    """
    space, dims = x.shape[1:], x.dim() - 2
    pixels = grid_pixels(x, space, stride, "aligned-max-pool", elements)
    n, g, k = pixels.shape
    offset = torch.arange(n * g, device=x.device).view(n, g, 1) * math.prod(space[1:])
    last = x.detach().unflatten(1, (g, -1)).movedim(2, -1)
    rows = last.reshape(-1, last.shape[-1]).index_select(0, (pixels + offset).flatten())
    aligned = rows.view(n * g, *kept_shape(space[1:], stride, "aligned-max-pool"), rows.shape[1])
    largest = _MAX_POOLS[dims - 1](aligned.movedim(-1, 1), stride, return_indices=True)[1]
    cells = largest.shape[2:]
    index = pixels.view(n * g, 1, k).expand(-1, largest.shape[1], -1)
    index = index.gather(2, largest.flatten(2)).view(n, space[0], math.prod(cells))
    if x.stride(1) == 1:  # channels last, which the gradient keeps
        y = x.flatten(2).mT.gather(1, index.mT).mT
    else:
        y = x.flatten(2).gather(2, index)
    pooled: Tensor = y.unflatten(2, cells)
    return pooled


def subsample(
    x: Float[Tensor, "n c *size"], stride: int = 2, reduction: Reduction = "l2", elements: int = 1
) -> Float[Tensor, "n c *small"]:
    """Shrink a map by the stride in every dimension.

    The result is differentiable in the kept values. Samples do not depend on each other, and the
    host is not synchronised with the device.

    Args:
        x: maps; see `Reduction` for their sizes.
        stride: subsampling factor.
        reduction: see `Reduction`; norms run over channels and positions together.
        elements: number of group elements, whose channels follow each other. Each element chooses
            its own component.

    Raises:
        ValueError: the reduction is unknown, x has no spatial dimensions, the number of elements
            does not divide the channels, or the stride must divide the sizes and does not.
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
        case "aligned-max-pool":
            return _aligned_max_pool(x, stride, elements)
    if reduction == "max":
        subsampled_shape(x.shape[2:], stride)
    y = keep_grid(x, x.shape[1:], stride, reduction, elements)
    pooled = reduction == "aligned-average-pool"
    return AVERAGE_POOLS[x.dim() - 3](stride)(y) if pooled else y


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
            case adaptive:
                grid = traced(
                    lambda x: keep_grid(x, space, stride, adaptive, self.elements), "KeepGrid"
                )
                pools = {"aligned-max-pool": MAX_POOLS, "aligned-average-pool": AVERAGE_POOLS}
                if adaptive not in pools:
                    return grid
                return nn.Sequential(grid, pools[adaptive][dims - 1](stride))

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
