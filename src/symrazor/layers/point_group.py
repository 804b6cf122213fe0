r"""Rotations and reflections about the middle of a grid: the part of a group beside translations.

An element is a matrix $R_g$ on positions (row, column), origin in the middle. It acts on an image
by $(g x)(p) = x(R_g^{-1} p)$ and on a map of a regular representation, one image for each element
h, by

$$ (g x)[h](p) = x[g^{-1} h](R_g^{-1} p) . $$

Channels are ordered (element, field): channel $h C + c$ holds field c of element h. Elements are
$r^0, \dots, r^{n-1}$ and, with reflections, $r^0 m, \dots, r^{n-1} m$, where r turns by
$2 \pi / n$ as `torch.rot90` does and m mirrors left and right.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.layers.path import Shape

NAMES = {
    (1, False): "translation",
    (2, False): "p2",
    (4, False): "p4",
    (1, True): "pm",
    (2, True): "p2m",
    (4, True): "p4m",
}
"""(rotations, mirrored) -> name of the group together with translations; others are C_n and D_n."""


@dataclass(frozen=True)
class PointGroup:
    """Rotations by multiples of a full turn over n, and with `mirrored` reflections.

    Args:
        rotations: n.
        mirrored: whether reflections belong to it.
    """

    rotations: int
    mirrored: bool = False

    @property
    def name(self) -> str:
        """Of the group together with translations: p4, p4m, or as in C8, D8."""
        key = self.rotations, self.mirrored
        return NAMES.get(key, f"{'D' if self.mirrored else 'C'}{self.rotations}")

    @property
    def order(self) -> int:
        """Number of elements."""
        return self.rotations * (1 + self.mirrored)

    @property
    def exact(self) -> bool:
        """Whether it maps a square grid to itself."""
        return self.rotations in (1, 2, 4)

    def _split(self, g: int) -> tuple[int, int]:
        return g % self.rotations, g // self.rotations

    def product(self, a: int, b: int) -> int:
        """Index of a b: a reflection turns a rotation that passes it around."""
        (k, m), (j, n) = self._split(a), self._split(b)
        return (k + (-j if m else j)) % self.rotations + self.rotations * (m ^ n)

    @cached_property
    def table(self) -> Int[Tensor, "g g"]:
        """table[a, b] is the index of the product a b."""
        every = range(self.order)
        return torch.tensor([[self.product(a, b) for b in every] for a in every])

    @cached_property
    def inverse(self) -> Int[Tensor, " g"]:
        """Index of the inverse of each element."""
        return (self.table == 0).int().argmax(1)

    @cached_property
    def relative(self) -> Int[Tensor, "g g"]:
        """relative[g, h] is the index of the element g^-1 h."""
        return self.table[self.inverse]

    @cached_property
    def matrices(self) -> Float[Tensor, "g 2 2"]:
        """R_g on (row, column)."""
        found = []
        for g in range(self.order):
            k, m = self._split(g)
            angle = 2 * math.pi * k / self.rotations
            cos, sin = math.cos(angle), math.sin(angle)
            turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
            found.append(turn @ torch.diag(torch.tensor([1.0, -1.0 if m else 1.0]).double()))
        stacked = torch.stack(found)
        return stacked.round() if self.exact else stacked

    def check_map(self, shape: Shape) -> None:
        """Raise ValueError for maps that the group does not map to themselves."""
        square = self.rotations > 2 or not self.exact
        if len(shape) != 2 or (square and shape[0] != shape[1]):
            kind = "square maps" if square else "maps"
            raise ValueError(f"expected {kind} in 2 dimensions for {self.name}, got {shape}")

    def act(
        self, g: int, x: Float[Tensor, "n c h w"], regular: bool = True
    ) -> Float[Tensor, "n c h w"]:
        """G x, exactly; x holds one image for each element if `regular`, else plain images.

        Raises:
            ValueError: a group that does not map a grid to itself.
        """
        if not self.exact:
            raise ValueError(f"expected a group that maps the grid to itself, got {self.name}")
        k, m = self._split(g)
        moved = torch.rot90(x.flip(-1) if m else x, k * 4 // self.rotations, (-2, -1))
        if not regular:
            return moved
        own = self.relative[g].to(x.device)
        y: Tensor = moved.unflatten(1, (self.order, -1)).index_select(1, own).flatten(1, 2)
        return y


@lru_cache
def point_group(name: str) -> PointGroup:
    """A group by its name: "p4", "p4m", "p2", "pm", or as in "C8" and "D8".

    Raises:
        ValueError: an unknown name.
    """
    by_name = {known: PointGroup(*key) for key, known in NAMES.items()}
    letters = re.fullmatch(r"([CcDd])_?([1-9]\d?)", str(name))
    if letters is not None:
        return PointGroup(int(letters[2]), letters[1] in "Dd")
    if name not in by_name:
        raise ValueError(f"expected a group among {list(by_name)}, C_n or D_n, got {name!r}")
    return by_name[name]
