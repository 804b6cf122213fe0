"""What a group does to data: one interface, `act(x, g)`, for vectors, sets, grids and channels.

| action | x | the element g is |
|---|---|---|
| `OnVectors` | [..., d] | a matrix |
| `OnPositions` | [n, c, *shape] | a permutation of positions: sets, sequences, shifts of grids |
| `OnGrid` | [n, c, *shape] | a matrix acting on coordinates: rotations, reflections, scalings |
| `OnRegular` | [n, c, order, *shape] | an index; moves the channels of a regular representation |

An element is an index (of a finite group), or a permutation or matrix.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from symrazor.groups.group import Element, Group

Outside = Literal["zeros", "border", "reflection"]
WHOLE = 1e-9
"""A place this near to a pixel, in pixels, is on it."""


class GroupAction(ABC):
    """How the elements of a group act on data."""

    group: Group

    @abstractmethod
    def act(self, x: Tensor, g: Element) -> Tensor:
        """The moved data, g x."""

    def sample(self, count: int, seed: int = 0) -> list[Element]:
        """Elements other than the identity to try; all of a small group."""
        return list(self.group.sample(count, seed))


class TrivialAction(GroupAction):
    """The trivial action: nothing changes; the output of an invariant map."""

    def __init__(self, group: Group) -> None:
        """Of any group."""
        self.group = group

    def act(self, x: Tensor, g: Element) -> Tensor:
        """The data as they are."""
        return x


class OnVectors(GroupAction):
    """Matrices on the last dimension."""

    def __init__(self, group: Group) -> None:
        """Of a group of matrices or permutations of as many numbers."""
        self.group = group

    def act(self, x: Shaped[Tensor, "... d"], g: Element) -> Shaped[Tensor, "... d"]:
        """Multiply, or permute."""
        element = self.group.element(g)
        _expect(x.shape[-1] == self.group.size, f"[..., {self.group.size}]", x)
        if element.dim() == 1:
            return x[..., element.argsort().to(x.device)]
        whole = not element.is_floating_point() or bool((element == element.round()).all())
        if not whole and not (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"expected floating-point data for a matrix with fractions, got {x.dtype}; do: "
                "x.float()"
            )
        return x @ element.to(x).mT


class OnPositions(GroupAction):
    """Permutations of the positions of maps [n, c, *shape], in row-major order.

    Args:
        group: of permutations.
        shape: of the positions; by default they are one dimension.
    """

    def __init__(self, group: Group, shape: Sequence[int] | None = None) -> None:
        """Check that the sizes agree."""
        self.group, self.shape = group, tuple(shape or (group.size,))
        if group.permutations is None:
            raise ValueError(
                f"expected a group of permutations, got {group.name}; do: OnVectors for vectors, "
                "OnGrid for images"
            )
        if math.prod(self.shape) != group.size:
            raise ValueError(
                f"expected {group.size} positions for {group.name}, got the shape {self.shape}"
            )

    def act(self, x: Shaped[Tensor, "n c *s"], g: Element) -> Shaped[Tensor, "n c *s"]:
        """Move what is at i to p[i]."""
        _expect(tuple(x.shape[2:]) == self.shape, f"[n, c, {str(list(self.shape))[1:]}", x)
        p = self.group.element(g)
        if p.dim() != 1:
            raise ValueError(f"expected a permutation, got an element of shape {list(p.shape)}")
        return _moved(x, p.argsort())


class OnGrid(GroupAction):
    r"""Linear or affine maps of coordinates on images: $(g x)(p) = x(g^{-1} p)$.

    The origin is the middle of the grid. Matrices have as many rows as the grid has dimensions, or
    one more for homogeneous coordinates, whose translations are in half-widths: half the last axis,
    in every direction, so that a rotation turns whatever the format. Elements that map the grid to
    itself move pixels, exactly; others interpolate, linearly between pixels.

    Args:
        group: of matrices, on coordinates (x, y) or (x, y, z): x is the last axis.
        shape: of the grid, in 1 to 3 dimensions.
        outside: what is beyond the border.
    """

    def __init__(self, group: Group, shape: Sequence[int], outside: Outside = "zeros") -> None:
        """Check that the sizes agree."""
        self.shape = _sizes(shape)
        if outside not in get_args(Outside):
            raise ValueError(f"expected outside in {get_args(Outside)}, got {outside!r}")
        self.group, self.outside = group, outside
        dims = len(self.shape)
        if group.permutations is not None:
            raise ValueError(
                f"expected matrices acting on coordinates, got the permutations of {group.name}; "
                "do: OnPositions(group, shape)"
            )
        if dims not in (1, 2, 3) or group.size not in (dims, dims + 1):
            raise ValueError(
                "expected a grid of 1 to 3 dimensions and matrices of as many rows, or one more, "
                f"got {self.shape} and {group.name} of size {group.size}"
            )
        if group.size > dims and not _is_affine(group):
            raise ValueError(
                f"expected homogeneous coordinates on a grid of {dims} dimensions, matrices with "
                f"the last row 0, ..., 0, 1, got {group.name}; does it act on {dims + 1} of them?"
            )

    def _places(self, g: Element) -> Float[Tensor, "s dims"]:
        """For every pixel p, where g^-1 p is, in pixels along the axes of the tensor."""
        matrix = self.group.element(g)
        if matrix.dim() == 1:
            raise ValueError(
                "expected a matrix acting on coordinates; for permutations OnPositions"
            )
        back, singular = torch.linalg.inv_ex(matrix.double().cpu())
        if bool(singular):
            raise ValueError(f"expected an invertible matrix, got {matrix.tolist()}")
        if bool((matrix == matrix.round()).all()):  # no rounding where there need not be
            back = torch.where((back - back.round()).abs() < WHOLE, back.round(), back)
        axes = [torch.arange(m, dtype=torch.float64) - (m - 1) / 2 for m in self.shape]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(self.shape))
        dims = len(self.shape)
        linear = back[:dims, :dims].flip(0, 1)
        moved = grid @ linear.T
        if len(back) > dims:
            moved = moved + back[:dims, dims].flip(0) * self.shape[-1] / 2
        places: Tensor = moved + (torch.tensor(self.shape, dtype=torch.float64) - 1) / 2
        return places

    def permutation(self, g: Element) -> Int[Tensor, " s"] | None:
        """For every pixel, in row-major order, the pixel it takes its value from; None if inexact.

        g x is x.flatten(2)[:, :, permutation].
        """
        places = self._places(g)
        whole = places.round()
        limits = torch.tensor(self.shape)
        if bool(((places - whole).abs() > WHOLE).any()):
            return None
        if bool(((whole < 0) | (whole >= limits)).any()):
            return None
        strides = torch.tensor([math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))])
        source: Tensor = (whole.long() * strides).sum(1)
        return source

    def is_exact(self, g: Element) -> bool:
        """Whether an element only moves pixels."""
        return self.permutation(g) is not None

    def act(self, x: Shaped[Tensor, "n c *s"], g: Element) -> Shaped[Tensor, "n c *s"]:
        """Move pixels, or interpolate."""
        _expect(tuple(x.shape[2:]) == self.shape, f"[n, c, {str(list(self.shape))[1:]}", x)
        source = self.permutation(g)
        if source is not None:
            return _moved(x, source)
        if not x.is_floating_point():
            raise ValueError(
                f"expected floating-point data, which can be interpolated, got {x.dtype}; do: "
                "x.float()"
            )
        sizes = torch.tensor(self.shape, dtype=torch.float64)
        unit = (2 * self._places(g) + 1) / sizes - 1
        shape = self.shape
        if len(shape) == 1:  # torch interpolates in 2 and 3 dimensions: an image of one row
            shape, unit = (1, *shape), F.pad(unit, (1, 0))
        grid = unit.flip(1).reshape(1, *shape, -1).expand(len(x), *shape, -1).to(x)
        rows = x.reshape(*x.shape[:2], *shape)
        moved = F.grid_sample(rows, grid, padding_mode=self.outside, align_corners=False)
        return moved.reshape(x.shape)

    @torch.no_grad()
    def interpolation_error(self, x: Float[Tensor, "n c *s"], count: int = 16) -> float:
        r"""How far there and back is from nowhere, $|g^{-1} (g x) - x|$ relative to x.

        A root mean square over elements, data and the pixels of the inscribed ball less one pixel,
        which no rotation moves out of the image; of those, the ones that the element leaves in it.
        0 for exact elements; for smooth images it falls with the square of the resolution.

        Raises:
            ValueError: a grid of fewer than 4 pixels, or elements that leave none of them in it.
        """
        radius = torch.stack(
            torch.meshgrid(
                *[torch.arange(m, dtype=torch.float64) - (m - 1) / 2 for m in self.shape],
                indexing="ij",
            )
        ).norm(dim=0)
        ball = radius < min(self.shape) / 2 - 1
        total, size, seen = 0.0, 0.0, False
        elements = [self.group.element(g) for g in self.sample(count)]
        inexact = [g for g in elements if not self.is_exact(g)]
        for g in elements if inexact else ():
            there = self._places(torch.linalg.inv(g))
            last = torch.tensor(self.shape) - 1.5
            stays = ((there >= 0.5) & (there <= last)).all(1).reshape(self.shape)
            inside = (ball & stays).to(x)
            back = self.act(self.act(x, g), torch.linalg.inv(g))
            total += float(((back - x) * inside).square().sum())
            size += float((x * inside).square().sum())
            seen = seen or int(inside.sum()) > 1  # the middle pixel alone says nothing
        if inexact and not seen:
            raise ValueError(
                f"expected a grid of at least 4 pixels along each axis, of which {self.group.name} "
                f"leaves some inside, got {self.shape}"
            )
        return math.sqrt(total / size) if total else 0.0


class OnRegular(GroupAction):
    r"""A regular representation: $(g x)[h] = g\,(x[g^{-1} h])$ for x[n, c, order, *shape].

    Args:
        group: a finite one.
        inner: what it does to each channel beside, such as rotating its grid.
    """

    def __init__(self, group: Group, inner: GroupAction | None = None) -> None:
        """Enumerate the group."""
        if inner is not None and not isinstance(inner, GroupAction):
            raise ValueError(f"expected an action, as in OnGrid(group, shape), got {inner!r}")
        self.group, self.inner, self.finite = group, inner, group.finite()

    def sample(self, count: int, seed: int = 0) -> list[Element]:
        """Indices of elements."""
        found = [self.finite.find(g) for g in self.group.sample(count, seed)]
        return [g for g in found if g is not None]

    def act(self, x: Shaped[Tensor, "n c g *s"], g: Element) -> Shaped[Tensor, "n c g *s"]:
        """Permute the channels, then move each."""
        element = self.group.element(g)
        index = self.finite.find(element)
        if index is None:
            raise ValueError(f"expected an element of {self.group.name}, got another one")
        _expect(
            x.dim() > 2 and x.shape[2] == self.finite.order, f"[n, c, {self.finite.order}, ...]", x
        )
        source = self.finite.table[self.finite.inverse[index]].to(x.device)
        moved = x[:, :, source]
        if self.inner is None:
            return moved
        # by what it is, not by its index: the inner action may be one of a larger group
        return self.inner.act(moved.flatten(1, 2), element).reshape(moved.shape)


def action_on(group: Group, shape: Sequence[int]) -> GroupAction:
    """How a group acts on data of a shape, [n, d] or [n, c, *size], by what its generators are.

    Permutations move the positions; matrices move coordinates of a grid, or vectors [n, d] and
    [n, c, d].

    Raises:
        ValueError: a group that does not fit.
    """
    size = tuple(shape[2:])
    if len(shape) == 2 and shape[1] == group.size:
        return OnVectors(group)
    if group.permutations is not None and size and math.prod(size) == group.size:
        return OnPositions(group, size)
    if group.permutations is None and len(size) == 1 and size[0] == group.size:
        return OnVectors(group)
    if group.permutations is None and len(size) in (2, 3) and group.size - len(size) in (0, 1):
        return OnGrid(group, size)
    raise ValueError(
        f"expected data that {group.name} of size {group.size} acts on, got {list(shape)}; "
        "do: pass an action, such as OnGrid(group, shape)"
    )


def _is_affine(group: Group) -> bool:
    """Whether the last row of its elements is that of maps on homogeneous coordinates."""
    last = torch.eye(group.size, dtype=torch.float64)[-1]
    flows = 0 * last if group.lie is None else group.lie.generators[:, -1]
    return bool((group.discrete[:, -1] == last).all()) and not bool(flows.any())


def _moved(x: Tensor, source: Int[Tensor, " s"]) -> Tensor:
    """Position i takes its value from position source[i]."""
    return x.flatten(2)[:, :, source.to(x.device)].reshape(x.shape)


def _expect(right: bool, shape: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"expected data {shape} as a tensor, got {type(x).__name__}; do: torch.as_tensor(x)"
        )
    if not right:
        raise ValueError(f"expected data {shape}, got {list(x.shape)}")


def _sizes(shape: object) -> tuple[int, ...]:
    """A shape as positive whole numbers."""
    found = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if not found or not all(hasattr(m, "__index__") and m >= 1 for m in found):
        raise ValueError(f"expected the shape of a grid, as in (8, 8), got {shape!r}")
    return tuple(int(m) for m in found)
