r"""Rotations and reflections about the middle of a grid: what a group has beside translations.

An element g is a matrix $R_g$ on positions, origin in the middle. It acts on an image by
$(g x)(p) = x(R_g^{-1} p)$, and on a map of a regular representation, one image for each element h,
by

$$ (g x)[h](p) = x[g^{-1} h](R_g^{-1} p) . $$

Channels are ordered (element, field): channel $h C + c$ holds field c of element h, elements in the
order of the group's `finite()`, the identity first.
"""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups import Group, OnGrid, cyclic, dihedral
from symrazor.layers.path import Shape

NAMES = {"C1": "translation", "C2": "p2", "C4": "p4", "D1": "pm", "D2": "p2m", "D4": "p4m"}
"""Rotations and reflections that map a square grid to itself -> with translations."""


@dataclass(frozen=True, eq=False)
class PointGroup:
    """A finite group of matrices on the plane.

    Args:
        group: its matrices act on coordinates (x, y), as for `OnGrid`.
    """

    group: Group

    def __post_init__(self) -> None:
        """Raise ValueError for a group that does not act on the plane, or is not finite."""
        if self.group.permutations is not None or self.group.size != 2:
            raise ValueError(
                f"expected a group of 2 x 2 matrices, got {self.group.name}; as in cyclic(4)"
            )
        self.group.finite()

    @property
    def name(self) -> str:
        """Of the group together with translations: p4, p4m, or as in C8, D8."""
        return NAMES.get(self.group.name, self.group.name)

    @property
    def order(self) -> int:
        """Number of elements."""
        return self.group.finite().order

    @property
    def table(self) -> Int[Tensor, "g g"]:
        """table[a, b] is the index of the product a b."""
        return self.group.finite().table

    @cached_property
    def relative(self) -> Int[Tensor, "g g"]:
        """relative[g, h] is the index of the element g^-1 h."""
        return self.table[torch.as_tensor(self.group.finite().inverse)]

    @cached_property
    def matrices(self) -> Float[Tensor, "g 2 2"]:
        """R_g on (row, column)."""
        found = self.group.finite().matrices
        assert found is not None
        return found.flip(1, 2)

    @property
    def exact(self) -> bool:
        """Whether it maps a square grid to itself."""
        R = self.matrices
        return bool((R == R.round()).all() and (R.abs().sum(2) == 1).all())

    def check_map(self, shape: Shape) -> None:
        """Raise ValueError for maps that the group does not map to themselves."""
        turns = not self.exact or bool(self.matrices[:, 0, 1].any())
        if len(shape) != 2 or (turns and shape[0] != shape[1]):
            kind = "square maps" if turns else "maps"
            raise ValueError(f"expected {kind} in 2 dimensions for {self.name}, got {shape}")

    def act(
        self, g: int, x: Float[Tensor, "n c h w"], regular: bool = True
    ) -> Float[Tensor, "n c h w"]:
        """The moved map, g x: one image for each element if `regular`, else plain images."""
        moved = OnGrid(self.group, x.shape[2:]).act(x, g)
        if not regular:
            return moved
        source = self.relative[g].to(x.device)
        y: Tensor = moved.unflatten(1, (self.order, -1)).index_select(1, source).flatten(1, 2)
        return y


@lru_cache
def _by_name(name: str) -> PointGroup:
    short = {known: key for key, known in NAMES.items()}.get(name, name)
    letters = re.fullmatch(r"([CcDd])_?([1-9]\d?)", short)
    if letters is None:
        raise ValueError(f"expected a group among {list(NAMES.values())}, C_n, D_n, got {name!r}")
    make = cyclic if letters[1] in "Cc" else dihedral
    return PointGroup(make(int(letters[2])))


def point_group(group: str | Group) -> PointGroup:
    """A group by its name, "p4", "p4m", "p2", "pm", or as in "C8" and "D8"; or one's own.

    Raises:
        ValueError: an unknown name, or a group that is no finite one of 2 x 2 matrices.
    """
    return PointGroup(group) if isinstance(group, Group) else _by_name(str(group))
