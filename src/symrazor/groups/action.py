"""Apply group elements to data: `act(x, g)` for vectors, sets, grids and channels.

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

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from symrazor.core.validation import check_choice
from symrazor.groups.generators import grid_shape
from symrazor.groups.group import Element, Group
from symrazor.groups.lie import Outside, sample_grid

PIXEL_TOLERANCE = 1e-9
"""A position at most this far from a pixel, in pixels, is on it."""


def grid_positions(shape: Sequence[int]) -> Float[Tensor, "s dims"]:
    """Return the positions of all pixels in row-major order, with the origin in the middle."""
    axes = [torch.arange(size, dtype=torch.float64) - (size - 1) / 2 for size in shape]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(shape))


class GroupAction(ABC):
    """Base class of actions of a group on data."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @abstractmethod
    def act(self, x: Tensor, g: Element) -> Tensor:
        """Return the transformed data, g x."""

    def sample(self, count: int, seed: int = 0) -> list[Element]:
        """Return elements other than the identity; all of a small group."""
        return list(self.group.sample(count, seed))

    def __repr__(self) -> str:
        shape = getattr(self, "shape", None)
        return f"{type(self).__name__}({self.group.name}" + (f", {shape})" if shape else ")")


class TrivialAction(GroupAction):
    """The trivial action, which changes nothing: on the outputs of an invariant map."""

    def act(self, x: Tensor, g: Element) -> Tensor:
        """Return the data unchanged."""
        return x


class OnVectors(GroupAction):
    """Matrices or permutations acting on the last dimension."""

    def act(self, x: Shaped[Tensor, "... d"], g: Element) -> Shaped[Tensor, "... d"]:
        """Multiply by the matrix, or permute."""
        element = self.group.element(g)
        _check_data(x.shape[-1] == self.group.size, f"[..., {self.group.size}]", x)
        if element.dim() == 1:
            return x[..., element.argsort().to(x.device)]
        is_integral = not element.is_floating_point() or bool((element == element.round()).all())
        if not is_integral and not (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"A matrix with fractions needs floating-point data, got {x.dtype}. Use x.float()."
            )
        return x @ element.to(x).mT


class OnPositions(GroupAction):
    """Permutations of the positions of maps [n, c, *shape], in row-major order.

    Args:
        group: a group of permutations.
        shape: shape of the positions, by default one-dimensional.
    """

    def __init__(self, group: Group, shape: Sequence[int] | None = None) -> None:
        self.group, self.shape = group, tuple(shape or (group.size,))
        if group.permutations is None:
            raise ValueError(
                f"OnPositions needs a group of permutations, got {group!r}. Use OnVectors for "
                "vectors and OnGrid for images."
            )
        if math.prod(self.shape) != group.size:
            raise ValueError(
                f"{group.name} acts on {group.size} positions, got the shape {self.shape}."
            )

    def act(self, x: Shaped[Tensor, "n c *s"], g: Element) -> Shaped[Tensor, "n c *s"]:
        """Move the values at position i to position p[i]."""
        _check_data(tuple(x.shape[2:]) == self.shape, f"[n, c, {str(list(self.shape))[1:]}", x)
        p = self.group.element(g)
        if p.dim() != 1:
            raise ValueError(f"g must be a permutation, got the shape {list(p.shape)}.")
        return _moved(x, p.argsort())


class OnGrid(GroupAction):
    r"""Linear or affine maps of coordinates, acting on images: $(g x)(p) = x(g^{-1} p)$.

    The origin is the middle of the grid. Matrices have as many rows as the grid has dimensions, or
    one more for homogeneous coordinates. Translations are in half-widths: half the last axis, in
    every direction, so that rotations do not distort images that are not square. Elements that map
    the grid to itself permute pixels exactly; others interpolate linearly.

    Args:
        group: a group of matrices on coordinates (x, y) or (x, y, z), where x is the last axis.
        shape: shape of the grid, in 1 to 3 dimensions.
        outside: values beyond the border.
    """

    def __init__(self, group: Group, shape: Sequence[int], outside: Outside = "zeros") -> None:
        self.shape = grid_shape(shape)
        check_choice("outside", outside, Outside)
        self.group, self.outside = group, outside
        dims = len(self.shape)
        if group.permutations is not None:
            raise ValueError(
                f"OnGrid needs matrices on coordinates, but {group.name} has permutations. Use "
                "OnPositions(group, shape)."
            )
        if dims not in (1, 2, 3) or group.size not in (dims, dims + 1):
            raise ValueError(
                "A grid has 1 to 3 dimensions, and matrices as many rows or one more, got "
                f"{self.shape} and {group.name} of size {group.size}."
            )
        if group.size > dims and not _is_affine(group):
            raise ValueError(
                f"On a grid of {dims} dimensions, matrices of size {dims + 1} need the last row "
                f"0, ..., 0, 1 of homogeneous coordinates; {group.name} does not have it."
            )

    def _inverse(self, g: Element) -> Float[Tensor, "dims dims+1"]:
        """Return the affine map of g^-1, in half-widths and in the order (x, y, z)."""
        matrix = self.group.element(g)
        if matrix.dim() == 1:
            raise ValueError("g must be a matrix; use OnPositions for permutations.")
        inverse, singular = torch.linalg.inv_ex(matrix.double().cpu())
        if bool(singular):
            raise ValueError(f"g must be invertible, got {matrix.tolist()}.")
        if bool((matrix == matrix.round()).all()):  # remove rounding errors of exact elements
            near = (inverse - inverse.round()).abs() < PIXEL_TOLERANCE
            inverse = torch.where(near, inverse.round(), inverse)
        dims = len(self.shape)
        shift = inverse[:dims, dims:] if len(inverse) > dims else inverse.new_zeros(dims, 1)
        return torch.cat([inverse[:dims, :dims], shift], 1)

    def _sources(self, g: Element) -> Float[Tensor, "s dims"]:
        """Return for every pixel p the position g^-1 p, in pixels along the axes of the tensor."""
        inverse = self._inverse(g).flip(0)
        moved = grid_positions(self.shape) @ inverse[:, :-1].flip(1).T
        moved = moved + inverse[:, -1] * self.shape[-1] / 2
        sources: Tensor = moved + (torch.tensor(self.shape, dtype=torch.float64) - 1) / 2
        return sources

    def permutation(self, g: Element) -> Int[Tensor, " s"] | None:
        """Return for every pixel the index of the pixel it takes its value from; None if inexact.

        Indices are in row-major order, and g x is x.flatten(2)[:, :, permutation].
        """
        positions = self._sources(g)
        pixels = positions.round()
        if bool(((positions - pixels).abs() > PIXEL_TOLERANCE).any()):
            return None
        if bool(((pixels < 0) | (pixels >= torch.tensor(self.shape))).any()):
            return None
        strides = torch.tensor([math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))])
        source: Tensor = (pixels.long() * strides).sum(1)
        return source

    def is_exact(self, g: Element) -> bool:
        """Return whether an element permutes pixels."""
        return self.permutation(g) is not None

    def act(self, x: Shaped[Tensor, "n c *s"], g: Element) -> Shaped[Tensor, "n c *s"]:
        """Permute pixels, or interpolate."""
        _check_data(tuple(x.shape[2:]) == self.shape, f"[n, c, {str(list(self.shape))[1:]}", x)
        source = self.permutation(g)
        if source is not None:
            return _moved(x, source)
        if not x.is_floating_point():
            raise ValueError(
                f"Interpolation needs floating-point data, got {x.dtype}. Use x.float()."
            )
        return sample_grid(x, self._inverse(g)[None, None], self.outside).squeeze(2)

    @torch.no_grad()
    def interpolation_error(self, x: Float[Tensor, "n c *s"], count: int = 16) -> float:
        r"""Return the error of transforming back and forth, $|g^{-1} (g x) - x|$ relative to x.

        It is a root mean square over elements, data and pixels. Only pixels of the inscribed ball,
        less one pixel, are compared, because no rotation moves them out of the image; of them, only
        the ones that the element keeps inside. The error is 0 for exact elements; for smooth images
        it decreases with the square of the resolution.

        Raises:
            ValueError: fewer than 4 pixels along an axis, or no pixel stays inside.
        """
        radius = grid_positions(self.shape).norm(dim=1).reshape(self.shape)
        ball = radius < min(self.shape) / 2 - 1
        total, size, has_pixels = 0.0, 0.0, False
        elements = [self.group.element(g) for g in self.sample(count)]
        inexact = [g for g in elements if not self.is_exact(g)]
        for g in elements if inexact else ():
            destinations = self._sources(torch.linalg.inv(g))
            upper = torch.tensor(self.shape) - 1.5
            stays = ((destinations >= 0.5) & (destinations <= upper)).all(1).reshape(self.shape)
            inside = (ball & stays).to(x)
            back = self.act(self.act(x, g), torch.linalg.inv(g))
            total += float(((back - x) * inside).square().sum())
            size += float((x * inside).square().sum())
            has_pixels = has_pixels or int(inside.sum()) > 1  # the middle pixel does not count
        if inexact and not has_pixels:
            raise ValueError(
                f"The grid needs at least 4 pixels along each axis, and pixels that "
                f"{self.group.name} does not move outside, got {self.shape}."
            )
        return math.sqrt(total / size) if total else 0.0


class OnRegular(GroupAction):
    r"""The regular representation: $(g x)[h] = g\,(x[g^{-1} h])$ for x[n, c, order, *shape].

    Args:
        group: a finite group.
        inner: additional action on each channel, such as rotating its grid.
    """

    def __init__(self, group: Group, inner: GroupAction | None = None) -> None:
        if inner is not None and not isinstance(inner, GroupAction):
            raise ValueError(
                f"inner must be an action such as OnGrid(group, shape), got {inner!r}."
            )
        self.group, self.inner, self.finite = group, inner, group.finite()

    def sample(self, count: int, seed: int = 0) -> list[Element]:
        """Return indices of elements."""
        indices = [self.finite.find(g) for g in self.group.sample(count, seed)]
        return [index for index in indices if index is not None]

    def act(self, x: Shaped[Tensor, "n c g *s"], g: Element) -> Shaped[Tensor, "n c g *s"]:
        """Permute the channels, then transform each."""
        element = self.group.element(g)
        index = self.finite.find(element)
        if index is None:
            raise ValueError(f"g is not an element of {self.group.name}.")
        _check_data(
            x.dim() > 2 and x.shape[2] == self.finite.order, f"[n, c, {self.finite.order}, ...]", x
        )
        source = self.finite.table[self.finite.inverse[index]].to(x.device)
        moved = x[:, :, source]
        if self.inner is None:
            return moved
        # Pass the element, not its index: the inner action may be of a larger group.
        return self.inner.act(moved.flatten(1, 2), element).reshape(moved.shape)


def action_on(group: Group, shape: Sequence[int]) -> GroupAction:
    """Return the action of a group on data of shape [n, d] or [n, c, *size].

    Permutations act on positions; matrices act on coordinates of a grid, or on vectors [n, d] and
    [n, c, d].

    Raises:
        ValueError: the group does not fit the shape.
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
        f"{group.name} of size {group.size} does not act on data of shape {list(shape)}. Pass an "
        "action, such as OnGrid(group, shape)."
    )


def _is_affine(group: Group) -> bool:
    """Return whether the last row of all elements is 0, ..., 0, 1."""
    bottom_row = torch.eye(group.size, dtype=torch.float64)[-1]
    flows = 0 * bottom_row if group.lie is None else group.lie.generators[:, -1]
    return bool((group.discrete[:, -1] == bottom_row).all()) and not bool(flows.any())


def _moved(x: Tensor, source: Int[Tensor, " s"]) -> Tensor:
    """Return x with the value at position i taken from position source[i]."""
    return x.flatten(2)[:, :, source.to(x.device)].reshape(x.shape)


def _check_data(is_valid: bool, shape: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"x must be a tensor {shape}, got {type(x).__name__}. Use torch.as_tensor(x)."
        )
    if not is_valid:
        raise ValueError(f"x must be {shape}, got {list(x.shape)}.")
