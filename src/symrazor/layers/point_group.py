r"""Rotations and reflections about the middle of a grid: what a group has beside translations.

An element g is a matrix $R_g$ on positions, origin in the middle. It acts on an image by
$(g x)(p) = x(R_g^{-1} p)$, and on a map of a regular representation, one image for each element h,
by

$$ (g x)[h](p) = x[g^{-1} h](R_g^{-1} p) . $$

Channels are ordered (element, field): channel $h C + c$ holds field c of element h. Elements are in
an order of their own, whatever generates the group: by angle, those of C_n $r^0, \dots, r^{n-1}$,
those of D_n $r^0, r^0 m, r^1, r^1 m, \dots$ with the turn r and the mirror m of x; in space by
their rotation, each before its mirror image. So a map of C |G| channels for p4m is also one for p4
with twice the fields, and so are p4 and p2, C8 and p4, Oh and O: paths of these groups can be added
up. That does not go for p4m and pm or p2m, whose elements do not lie side by side
(`PointGroup.contains`).
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups import Group, OnGrid, cyclic, dihedral, octahedral
from symrazor.layers.basis import Basis, evaluate, grid
from symrazor.layers.path import Shape

NAMES = {"C1": "translation", "C2": "p2", "C4": "p4", "D1": "pm", "D2": "p2m", "D4": "p4m"}
"""Rotations and reflections that map a square grid to itself -> with translations."""
CUBE = ("O", "Oh")
"""Rotations of a cube, alone and with reflections."""


@dataclass(frozen=True, eq=False)
class PointGroup:
    """A finite group of matrices on the plane, or on space.

    Args:
        group: its matrices act on coordinates (x, y) or (x, y, z), as for `OnGrid`.
    """

    group: Group

    def __post_init__(self) -> None:
        """Raise ValueError for a group that acts on no plane or space, or is not finite."""
        if self.group.permutations is not None or self.group.size not in (2, 3):
            raise ValueError(
                "expected a group of 2 x 2 or 3 x 3 matrices, as in cyclic(4) and octahedral(), "
                f"got {self.group.name}"
            )
        if not self.group.is_discrete:
            raise ValueError(
                f"expected a finite group, got the continuous {self.group.name}; do: sample it, as "
                'in SGConv(..., group="C16"), SE2Conv and ScaleConv'
            )
        _ = self.places
        taken = {known: key for key, known in NAMES.items()} | {name: name for name in CUBE}
        if self.group.name in taken and not self._is(taken[self.group.name]):
            raise ValueError(
                f"expected the elements of {self.group.name}, got others by that name; do: give "
                "the group another name"
            )

    @cached_property
    def places(self) -> list[int]:
        """Index in the group's `finite()` of each element, in our order."""
        with torch.device("cpu"):
            found = self.group.finite().matrices
            assert found is not None
            keys = [_key(matrix) for matrix in found]
        return sorted(range(len(keys)), key=keys.__getitem__)

    @cached_property
    def name(self) -> str:
        """Of the group together with translations: p4, p4m, or as in C8, D8."""
        known = NAMES.get(self.group.name)
        return known if known and self._is(self.group.name) else self.group.name

    def _is(self, name: str) -> bool:
        """Whether it has the elements of the built-in group of this name, by which it is called."""
        wanted = octahedral(reflected=name == "Oh")
        if name not in CUBE:
            wanted = (cyclic if name[0] == "C" else dihedral)(int(name[1:]))
        same = self.group.size == wanted.size and len(self.places) == wanted.finite().order
        return same and self.group.is_subgroup_of(wanted)

    @property
    def dims(self) -> int:
        """Of the grids that it acts on."""
        return self.group.size

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.places)

    @cached_property
    def table(self) -> Int[Tensor, "g g"]:
        """table[a, b] is the index of the product a b."""
        places = torch.tensor(self.places, device="cpu")
        return places.argsort()[self.group.finite().table[places][:, places]]

    @cached_property
    def relative(self) -> Int[Tensor, "g g"]:
        """relative[g, h] is the index of the element g^-1 h."""
        with torch.device("cpu"):
            identity = self.places.index(self.group.finite().identity)
        return self.table[(self.table == identity).int().argmax(1)]

    @cached_property
    def matrices(self) -> Float[Tensor, "g d d"]:
        """R_g on the axes of a tensor, (row, column) in the plane."""
        found = self.group.finite().matrices
        assert found is not None
        return found[self.places].flip(1, 2)

    @property
    def exact(self) -> bool:
        """Whether it maps a square or cubic grid to itself."""
        R = self.matrices
        return bool((R == R.round()).all() and (R.abs().sum(2) == 1).all())

    def contains(self, other: "PointGroup") -> bool:
        """Whether it contains another group, which moves channels just as it does."""
        if not other.group.is_subgroup_of(self.group):
            return False
        many = self.order // other.order  # fields of the other one in a field of ours
        inner = torch.arange(many, device="cpu").repeat(other.order)
        for matrix, own in zip(other.matrices, other.relative, strict=True):
            same = (self.matrices - matrix).abs().amax((1, 2)).argmin()
            if not torch.equal(self.relative[same], many * own.repeat_interleave(many) + inner):
                return False
        return True

    def check_map(self, shape: Shape) -> None:
        """Raise ValueError for maps that the group does not map to themselves."""
        turned = (self.matrices.diagonal(dim1=1, dim2=2).abs() != 1).any(0)  # axes that do not stay
        sizes = {size for size, turns in zip(shape, turned.tolist(), strict=False) if turns}
        if len(shape) != self.dims or len(sizes) > 1:
            kind = {2: "square ", 3: "cubic "}[self.dims] if turned.any() else ""
            where = f"{self.dims} dimensions for {self.name}"
            raise ValueError(f"expected {kind}maps in {where}, got {shape}")

    def act(
        self, g: int, x: Float[Tensor, "n c *size"], regular: bool = True
    ) -> Float[Tensor, "n c *size"]:
        """The moved map, g x: one image for each element if `regular`, else plain images."""
        moved = OnGrid(self.group, x.shape[2:]).act(x, self.places[g])
        if not regular:
            return moved
        source = self.relative[g].to(x.device)
        y: Tensor = moved.unflatten(1, (self.order, -1)).index_select(1, source).flatten(1, 2)
        return y


def _key(matrix: Float[Tensor, "d d"]) -> tuple[float, ...]:
    """Elements are sorted by this: the identity first, then by their rotation, then by mirrors."""
    mirrored = bool(torch.linalg.det(matrix) < 0)
    if len(matrix) == 3:
        turn = -matrix if mirrored else matrix
        return (
            -round(float(turn.trace()), 6),
            *(round(v, 6) for v in turn.flatten().tolist()),
            mirrored,
        )
    turn = matrix * torch.tensor([-1.0, 1.0]) if mirrored else matrix
    angle = math.atan2(float(turn[1, 0]), float(turn[0, 0])) / (2 * math.pi)
    return round(angle, 9) % 1, mirrored


@lru_cache
def _by_name(name: str) -> PointGroup:
    short = {known: key for key, known in NAMES.items()}.get(name, name)
    if name in CUBE:
        with torch.device("cpu"):
            return PointGroup(octahedral(reflected=name == "Oh"))
    letters = re.fullmatch(r"([CcDd])_?([1-9]\d{0,2})", short)
    if letters is None:
        known = [*NAMES.values(), *CUBE]
        raise ValueError(f"expected a group among {known}, C_n, D_n, got {name!r}")
    n, mirrored = int(letters[2]), letters[1] in "Dd"
    with torch.device("cpu"):
        return PointGroup(dihedral(n) if mirrored else cyclic(n))


def point_group(group: str | Group) -> PointGroup:
    """A group by its name, "p4", "p4m", "p2", "pm", as in "C8" and "D8", "O", "Oh"; or one's own.

    Raises:
        ValueError: an unknown name, or a group that is no finite one of 2 x 2 or 3 x 3 matrices.
    """
    return PointGroup(group) if isinstance(group, Group) else _by_name(str(group))


@dataclass(frozen=True)
class Turns:
    """The maps T_g: an index where they are permutations, psi_g = v[index_g], else matrices."""

    index: Int[Tensor, "g s"] | None = None
    matrices: Float[Tensor, "g p s"] | None = None


def turns(group: PointGroup, kernel: int) -> Turns:
    """How a filter, of `kernel` values in every dimension, is turned."""
    matrices = interpolation(group, kernel)
    if group.exact:
        return Turns(index=matrices.argmax(1))
    return Turns(matrices=matrices)


def interpolation(group: PointGroup, kernel: int) -> Float[Tensor, "g p s"]:
    r"""$T_g[p, \delta] = \prod_d \max(0, 1 - |(R_g^{-1} \delta - p)_d|)$, in float64."""
    # Not `core.resampling.resample`: the layer needs the weights, in float64 and in 3 dimensions.
    places = grid((kernel,) * group.dims)
    sources = torch.einsum("gij,sj->gsi", torch.linalg.inv(group.matrices), places)
    apart = (sources.unsqueeze(1) - places[:, None]).abs()
    return (1 - apart).clamp_min(0).prod(-1)


def turned_basis(rotations: Float[Tensor, "g d d"], basis: Basis) -> Float[Tensor, "g p s"]:
    r"""$\Phi_g[p, \delta] = \Phi[p, R_g^{-1} \delta]$: the basis of anchors at $R_g z_p$.

    The basis depends on distances alone, which an orthogonal $R_g$ keeps.
    """
    z, omega = basis.anchors, basis.value("omega")
    moved = torch.einsum("gij,pj->gpi", rotations.to(z), z)
    return torch.stack([evaluate(places, basis.shape, omega, basis.form) for places in moved])


def interpolation_error(group: PointGroup, kernel: int) -> float:
    r"""Relative error of turning a smooth filter, the worst over elements; 0 for exact groups.

    The filter is a Gaussian of width k / 6, an eighth of the kernel away from its middle: coarse
    grids cannot hold it at other angles, fine ones can.
    """
    places, width = grid((kernel,) * group.dims), kernel / 6
    centre = torch.tensor([kernel / 2 ** (3 + d) for d in range(group.dims)], dtype=torch.float64)

    def bump(at: Tensor) -> Tensor:
        return torch.exp(-(places - at).square().sum(-1) / (2 * width**2))

    matrices = interpolation(group, kernel)
    errors = []
    for R, T in zip(group.matrices, matrices, strict=True):
        wanted = bump(R @ centre)
        errors.append(float((bump(centre) @ T - wanted).norm() / wanted.norm()))
    return max(errors)
