r"""Define point groups, rotations and reflections about the middle of a grid, and rotate filters.

An element g is a matrix $R_g$ on positions, with the origin in the middle. It acts on an image by
$(g x)(p) = x(R_g^{-1} p)$, and on a map of a regular representation, with one image per element h,
by

$$ (g x)[h](p) = x[g^{-1} h](R_g^{-1} p) . $$

Channels are ordered (element, field): channel $h C + c$ holds field c of element h. The order of
the elements does not depend on the generators. Elements of $C_n$ are ordered by angle,
$r^0, \dots, r^{n-1}$; elements of $D_n$ as $r^0, r^0 m, r^1, r^1 m, \dots$ with the rotation r and
the reflection m of x; in three dimensions by their rotation, each before its mirror image. A map of
C |G| channels for p4m is therefore also a map for p4 with twice the fields, and likewise for p4 and
p2, C8 and p4, Oh and O: paths of these groups can be added. It does not hold for p4m and pm or p2m,
see `PointGroup.contains`.

A filter $\psi$ on a square or cubic grid of offsets is computed from values v by
$\psi_g[\delta] = \sum_p v[p]\, T_g[p, \delta]$, the function of v rotated by g:
$\psi_g(\delta) = \psi(R_g^{-1} \delta)$.

| values | $T_g$ |
|---|---|
| filter entries, quarter turns and reflections | a permutation: exact |
| filter entries, other angles | bilinear interpolation, zero outside |
| anchors of a `Basis` | the basis at rotated anchors: a continuous filter, exact at any angle |
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.groups import Group, OnGrid, cyclic, dihedral, octahedral
from symrazor.groups.action import grid_positions
from symrazor.layers.basis import Basis, evaluate_basis
from symrazor.layers.path import Map, Shape

WALLPAPER_NAMES = {
    "C1": "translation",
    "C2": "p2",
    "C4": "p4",
    "D1": "pm",
    "D2": "p2m",
    "D4": "p4m",
}
"""Point group that maps a square grid to itself -> its name together with translations."""
POINT_GROUPS = {name: point for point, name in WALLPAPER_NAMES.items()}
CUBE_NAMES = ("O", "Oh")
"""Rotations of a cube, without and with reflections."""


@dataclass(frozen=True, eq=False, repr=False)
class PointGroup:
    """A finite group of matrices on coordinates (x, y) or (x, y, z), as for `OnGrid`."""

    group: Group

    def __post_init__(self) -> None:
        if self.group.permutations is not None or self.group.size not in (2, 3):
            raise ValueError(
                "A point group has 2 x 2 or 3 x 3 matrices, as cyclic(4) and octahedral() do, "
                f"got {self.group!r}."
            )
        if not self.group.is_discrete:
            raise ValueError(
                f"A point group is finite, but {self.group.name} is continuous. Sample it, as in "
                'SGConv(..., group="C16"), SE2Conv and ScaleConv.'
            )
        _ = self.element_order
        reserved = POINT_GROUPS | {name: name for name in CUBE_NAMES}
        if self.group.name in reserved and not self._equals_builtin(reserved[self.group.name]):
            raise ValueError(
                f"The name {self.group.name} is reserved for another group. Rename the group."
            )

    def __repr__(self) -> str:
        return f"PointGroup({self.name}, {self.order} elements, {self.dims} dimensions)"

    @cached_property
    def element_order(self) -> list[int]:
        """Index of each element in the group's `finite()`, in the order of the channels."""
        with torch.device("cpu"):
            matrices = self.group.finite().matrices
            assert matrices is not None
            keys = [_sort_key(matrix) for matrix in matrices]
        return sorted(range(len(keys)), key=keys.__getitem__)

    @cached_property
    def name(self) -> str:
        """Name of the group together with translations: p4, p4m, C8, D8, ..."""
        wallpaper = WALLPAPER_NAMES.get(self.group.name)
        return wallpaper if wallpaper and self._equals_builtin(self.group.name) else self.group.name

    def _equals_builtin(self, name: str) -> bool:
        builtin = _builtin(name)
        assert builtin is not None
        same_size = self.group.size == builtin.size and self.order == builtin.finite().order
        return same_size and self.group.is_subgroup_of(builtin)

    @property
    def dims(self) -> int:
        """Number of dimensions of the grids it acts on."""
        return self.group.size

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.element_order)

    @cached_property
    def table(self) -> Int[Tensor, "g g"]:
        """Multiplication table: table[a, b] is the index of a b."""
        order = torch.tensor(self.element_order, device="cpu")
        return order.argsort()[self.group.finite().table[order][:, order]]

    @cached_property
    def relative(self) -> Int[Tensor, "g g"]:
        """Table of relative elements: relative[g, h] is the index of g^-1 h."""
        with torch.device("cpu"):
            identity = self.element_order.index(self.group.finite().identity)
        return self.table[(self.table == identity).int().argmax(1)]

    @cached_property
    def matrices(self) -> Float[Tensor, "g d d"]:
        """R_g on the axes of a tensor: (row, column) in the plane."""
        matrices = self.group.finite().matrices
        assert matrices is not None
        return matrices[self.element_order].flip(1, 2)

    @property
    def exact(self) -> bool:
        """Whether it maps a square or cubic grid to itself."""
        R = self.matrices
        return bool((R == R.round()).all() and (R.abs().sum(2) == 1).all())

    def contains(self, other: "PointGroup") -> bool:
        """Return whether another group is a subgroup that permutes channels in the same way."""
        if not other.group.is_subgroup_of(self.group):
            return False
        ratio = self.order // other.order  # fields of the other group per field of this one
        inner = torch.arange(ratio, device="cpu").repeat(other.order)
        for matrix, relative in zip(other.matrices, other.relative, strict=True):
            same = (self.matrices - matrix).abs().amax((1, 2)).argmin()
            channels = ratio * relative.repeat_interleave(ratio) + inner
            if not torch.equal(self.relative[same], channels):
                return False
        return True

    def check_map(self, shape: Shape) -> None:
        """Raise ValueError for maps that the group does not map to themselves."""
        moved_axes = (self.matrices.diagonal(dim1=1, dim2=2).abs() != 1).any(0)
        sizes = {size for size, moved in zip(shape, moved_axes.tolist(), strict=False) if moved}
        if len(shape) != self.dims or len(sizes) > 1:
            kind = {2: "square ", 3: "cubic "}[self.dims] if moved_axes.any() else ""
            raise ValueError(
                f"{self.name} needs {kind}maps in {self.dims} dimensions, got the shape {shape}."
            )

    def fields(self, name: str, channels: int) -> int:
        """Return the number of fields in `channels` channels, or raise ValueError."""
        if channels % self.order:
            raise ValueError(
                f"{name} must be a multiple of {self.order}, the number of elements of "
                f"{self.name}, got {channels}."
            )
        return channels // self.order

    def act(
        self, g: int, x: Float[Tensor, "n c *size"], regular: bool = True
    ) -> Float[Tensor, "n c *size"]:
        """Return g x, for maps with one image per element if `regular`, else for plain images."""
        moved = OnGrid(self.group, x.shape[2:]).act(x, self.element_order[g])
        if not regular:
            return moved
        source = self.relative[g].to(x.device)
        y: Tensor = moved.unflatten(1, (self.order, -1)).index_select(1, source).flatten(1, 2)
        return y

    def transformations(
        self, regular_in: bool = True, regular_out: bool = True
    ) -> list[tuple[Map, Map]]:
        """Return how each element but the identity acts on inputs and on outputs of a layer."""
        return [
            (partial(self.act, g, regular=regular_in), partial(self.act, g, regular=regular_out))
            for g in range(1, self.order)
        ]


def _sort_key(matrix: Float[Tensor, "d d"]) -> tuple[float, ...]:
    """Return a key that sorts the identity first, then by rotation, then reflections last."""
    reflected = bool(torch.linalg.det(matrix) < 0)
    if len(matrix) == 3:
        rotation = -matrix if reflected else matrix
        return (
            -round(float(rotation.trace()), 6),
            *(round(v, 6) for v in rotation.flatten().tolist()),
            reflected,
        )
    rotation = matrix * torch.tensor([-1.0, 1.0]) if reflected else matrix
    angle = math.atan2(float(rotation[1, 0]), float(rotation[0, 0])) / (2 * math.pi)
    return round(angle, 9) % 1, reflected


def _builtin(name: str) -> Group | None:
    """Return C_n, D_n, O or Oh by name."""
    if name in CUBE_NAMES:
        return octahedral(reflected=name == "Oh")
    letters = re.fullmatch(r"([CcDd])_?([1-9]\d{0,2})", name)
    return letters and (cyclic if letters[1] in "Cc" else dihedral)(int(letters[2]))


@lru_cache
def _by_name(name: str) -> PointGroup:
    with torch.device("cpu"):
        group = _builtin(POINT_GROUPS.get(name, name))
        if group is None:
            known = [*WALLPAPER_NAMES.values(), *CUBE_NAMES]
            raise ValueError(f"Unknown group {name!r}. Available: {known}, C_n and D_n.")
        return PointGroup(group)


def point_group(group: str | Group) -> PointGroup:
    """Return a point group by name ("p4", "p4m", "pm", "C8", "D8", "O", "Oh") or from a `Group`."""
    return PointGroup(group) if isinstance(group, Group) else _by_name(str(group))


def interpolation(group: PointGroup, kernel: int) -> Float[Tensor, "g p s"]:
    r"""Return $T_g[p, \delta] = \prod_d \max(0, 1 - |(R_g^{-1} \delta - p)_d|)$ in float64."""
    # Not `sample_grid`: the layer needs the interpolation weights, not interpolated values.
    positions = grid_positions((kernel,) * group.dims)
    sources = torch.einsum("gij,sj->gsi", torch.linalg.inv(group.matrices), positions)
    distances = (sources.unsqueeze(1) - positions[:, None]).abs()
    return (1 - distances).clamp_min(0).prod(-1)


def rotated_basis(rotations: Float[Tensor, "g d d"], basis: Basis) -> Float[Tensor, "g p s"]:
    r"""Return $\Phi_g[p, \delta] = \Phi[p, R_g^{-1} \delta]$: the basis with anchors $R_g z_p$.

    The two agree because the basis depends on distances only, which orthogonal $R_g$ preserve.
    """
    z, omega = basis.anchors, basis.value("omega")
    rotated = torch.einsum("gij,pj->gpi", rotations.to(z), z)
    return torch.stack(
        [evaluate_basis(anchors, basis.shape, omega, basis.form) for anchors in rotated]
    )


def interpolation_error(group: PointGroup, kernel: int) -> float:
    r"""Return the largest relative error of rotating a smooth filter; 0 for exact groups.

    The filter is a Gaussian of width k / 6, centred an eighth of the kernel away from its middle.
    Coarse grids cannot represent it at other angles, fine grids can.
    """
    positions, width = grid_positions((kernel,) * group.dims), kernel / 6
    centre = torch.tensor([kernel / 2 ** (3 + d) for d in range(group.dims)], dtype=torch.float64)

    def gaussian(mean: Tensor) -> Tensor:
        return torch.exp(-(positions - mean).square().sum(-1) / (2 * width**2))

    errors = []
    for R, T in zip(group.matrices, interpolation(group, kernel), strict=True):
        expected = gaussian(R @ centre)
        errors.append(float((gaussian(centre) @ T - expected).norm() / expected.norm()))
    return max(errors)
