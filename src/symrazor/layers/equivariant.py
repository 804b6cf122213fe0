r"""Define linear layers that commute with any group: for vectors, sets, sequences and graphs.

On maps x[n, c, s], where a group acts on the s positions and in the same way on every channel,

$$ W[o, i, t, s] = \sum_b u[o, i, b]\, Q_b[t, s] $$

with a basis $Q_b$ of the maps that commute with the group (`symrazor.groups.maps`). In the
weight-sharing format the coefficients u are shared by the output positions t, and their inputs are
$a[n, t, (i, b)] = \sum_s Q_b[t, s]\, x[n, i, s]$. Layers have few coefficients as a rule, and then
their curvature is exact.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.groups import (
    Group,
    Representation,
    automorphisms,
    cyclic_permutations,
    defining,
    equivariant_maps,
    invariant,
    symmetric,
)
from symrazor.groups.maps import MapBasis
from symrazor.layers.fully_connected import FC
from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed

MAX_EXACT_COEFFICIENTS = 512
"""Layers with more coefficients have a Kronecker-factored instead of an exact curvature block."""


class _ModuleOnBasis(nn.Module):
    """Base class of modules with constant tensors, rounded from float64 whenever they move."""

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, Tensor] = {}

    def register_constant(self, name: str, value: Tensor) -> None:
        """Register a non-persistent buffer."""
        self._exact[name] = value
        self.register_buffer(name, value.to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_ModuleOnBasis":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in self._exact.items():
            setattr(self, name, value.to(getattr(self, name)))
        return self


class EquivariantMap(_ModuleOnBasis):
    r"""Compute $y[n, o, t] = \sum_{i, b, s} u[o, i, b]\, Q_b[t, s]\, x[n, i, s]$.

    The coefficients u are drawn such that the output has the variance of He's initialisation.
    """

    weight: nn.Parameter
    basis: Tensor
    scales: Tensor
    labels: Tensor

    def __init__(self, in_channels: int, out_channels: int, maps: MapBasis) -> None:
        super().__init__()
        bound = math.sqrt(6 / max(1, in_channels * maps.count))
        values = torch.empty(out_channels, in_channels, maps.count).uniform_(-bound, bound)
        self.weight = nn.Parameter(values)
        (self.t, self.s), self.count = maps.shape, maps.count
        self.inputs, self.outputs = in_channels, out_channels
        self.maps_first = maps.count * (self.s + out_channels) < self.s * out_channels
        self.labelled = maps.labels is not None
        if maps.labels is not None and maps.scales is not None:
            self.register_constant("scales", maps.scales)
            self.register_buffer("labels", maps.labels, persistent=False)
        if self.maps_first or not self.labelled:
            self.register_constant("basis", maps.matrices())

    def mapped(self, x: Float[Tensor, "n i s"]) -> Float[Tensor, "n i b t"]:
        """Apply every basis map to every channel."""
        if self.maps_first or not self.labelled:
            y: Tensor = F.linear(x, self.basis.flatten(0, 1)).unflatten(2, (self.count, self.t))
            return y
        expanded = x.unsqueeze(2).expand(-1, -1, self.t, -1)
        index = self.labels.expand(*x.shape[:2], -1, -1)
        sums = x.new_zeros(*x.shape[:2], self.t, self.count).scatter_add(3, index, expanded)
        return (sums * self.scales).transpose(2, 3)

    def matrix(self) -> Float[Tensor, "ot is"]:
        """Return W as one matrix."""
        if self.labelled:
            W = (self.weight * self.scales)[:, :, self.labels]
        else:
            W = torch.einsum("oib,bts->oits", self.weight, self.basis)
        return W.transpose(1, 2).reshape(self.outputs * self.t, self.inputs * self.s)

    def forward(self, x: Float[Tensor, "n i s"]) -> Float[Tensor, "n o t"]:
        """Apply the basis maps first, or the whole matrix, whichever is cheaper."""
        if self.maps_first:
            y: Tensor = self.weight.flatten(1) @ self.mapped(x).flatten(1, 2)
        else:
            y = F.linear(x.flatten(1), self.matrix()).unflatten(1, (self.outputs, self.t))
        return y

    def extra_repr(self) -> str:
        """Return the sizes."""
        spaces = f"{self.inputs} x {self.s} -> {self.outputs} x {self.t}"
        return f"{spaces}, {self.count} basis maps"


@sharing.register
def _equivariant_map(module: EquivariantMap) -> Sharing:
    shape = module.weight.shape

    def inputs(x: Float[Tensor, "n i s"]) -> Float[Tensor, "n t 1 ib"]:
        return module.mapped(x).flatten(1, 2).transpose(1, 2).unsqueeze(2)

    return Sharing(
        inputs=inputs,
        outputs=lambda g: g.transpose(1, 2).unsqueeze(2),
        bias=None,
        to_blocks=lambda weight: weight.flatten(1).unsqueeze(0),
        from_blocks=lambda blocks: blocks.reshape(shape),
        dense=module.weight.numel() <= MAX_EXACT_COEFFICIENTS,
    )


class InvariantBias(_ModuleOnBasis):
    r"""Add $\sum_b v[o, b]\, q_b[t]$ for invariant vectors $q_b$; v is initially zero."""

    values: nn.Parameter
    basis: Tensor

    def __init__(self, channels: int, maps: MapBasis) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(channels, maps.count))
        self.register_constant("basis", maps.matrices().squeeze(2))

    def forward(self, y: Float[Tensor, "n o t"]) -> Float[Tensor, "n o t"]:
        """Add the bias."""
        return y + self.values @ self.basis

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{len(self.values)} channels, {self.values.shape[1]} invariants"


@sharing.register
def _invariant_bias(module: InvariantBias) -> Sharing:
    def inputs(y: Float[Tensor, "n o t"]) -> Float[Tensor, "n t 1 b"]:
        return module.basis.T.reshape(1, y.shape[2], 1, -1).expand(len(y), -1, -1, -1).to(y)

    return Sharing(
        inputs=inputs,
        outputs=lambda g: g.transpose(1, 2).unsqueeze(2),
        weight="values",
        bias=None,
        dense=True,
    )


class EquivariantLinear(Path):
    """Linear layer that commutes with a group, in the space of all such maps.

    It maps [n, c, *in_shape] to [n, d, *out_shape]; the group acts on the positions, in row-major
    order, by two of its representations.

    Args:
        in_channels: number of input channels, c.
        out_channels: number of output channels, d.
        source: representation on the input positions; for a `Group`, its defining representation.
        target: representation on the output positions; by default the same.
        in_shape: shape of the input positions, if they form a grid.
        out_shape: shape of the output positions, if they form a grid.
        bias: add a bias per channel and invariant vector of the target.
        orthogonal_to: larger groups, whose maps are removed because paths of these groups stand
            beside this one. The sum of the paths can represent the same maps, and each has one
            prior.

    Raises:
        ValueError: no map remains, or the representations do not fit the shapes.
    """

    affine = True
    map: EquivariantMap
    offset: nn.Module

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        source: Group | Representation,
        target: Group | Representation | None = None,
        *,
        in_shape: Sequence[int] | None = None,
        out_shape: Sequence[int] | None = None,
        bias: bool = True,
        orthogonal_to: Sequence[Group] = (),
    ) -> None:
        before = _representation(source)
        after = before if target is None else _representation(target)
        if isinstance(target, Group) and target is before.group:
            after = before if after.size == before.size else after
        in_shape = (before.size,) if in_shape is None else in_shape
        if out_shape is None:
            out_shape = in_shape if after is before else (after.size, *(1,) * (len(in_shape) - 1))
        super().__init__(
            in_channels,
            out_channels,
            in_shape,
            out_shape=out_shape,
            maps_between=(before, after),
            bias=bias,
            orthogonal_to=orthogonal_to,
        )

    def _build(
        self,
        *,
        maps_between: tuple[Representation, Representation],
        bias: bool,
        orthogonal_to: Sequence[Group],
    ) -> None:
        before, after = maps_between
        group = before.group
        if (self.pixels_in, self.pixels_out) != (before.size, after.size):
            raise ValueError(
                f"The representations of {group.name} need {before.size} input and {after.size} "
                f"output positions, got the shapes {self.in_shape} and {self.out_shape}."
            )
        listed: object = orthogonal_to
        if not isinstance(listed, Sequence) or not all(isinstance(g, Group) for g in listed):
            raise ValueError(f"orthogonal_to must be a list of groups, got {listed!r}.")
        maps = equivariant_maps(before, after)
        biases = equivariant_maps(invariant(group), after)
        if orthogonal_to:
            maps = maps.orthogonal_to([_maps_of(g, before, after) for g in orthogonal_to])
            biases = biases.orthogonal_to(
                [equivariant_maps(invariant(g), defining(g)) for g in orthogonal_to]
            )
        if not maps.count:
            raise ValueError(
                f"{group.name} has no equivariant map from {before.size} to {after.size} "
                "dimensions" + (" orthogonal to the given groups." if orthogonal_to else ".")
            )
        self.map = EquivariantMap(self.in_channels, self.out_channels, maps)
        self.offset = nn.Identity()
        if bias and biases.count:
            self.offset = InvariantBias(self.out_channels, biases)
        self.maps, self.group, self.representations = maps, group.name, (before, after)

    @property
    def label(self) -> str:
        """Type and group, because a layer may have paths of several groups."""
        return f"Linear[{self.group}]"

    def is_equivariant_under(self, other: Path) -> bool:
        """Return whether every map of this path commutes with the group of another path."""
        if other.representations is None:
            return super().is_equivariant_under(other)
        return self.maps.commutes(*other.representations)

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Map the positions of every channel, then add the bias."""
        self.check(x)
        y: Tensor = self.offset(self.map(x.flatten(2))).unflatten(2, self.out_shape)
        return y


def _maps_commute(group: Group, other: Group) -> bool:
    """Return whether all maps of a group commute with another group."""
    rho, sigma = defining(group), defining(other)
    return equivariant_maps(rho, rho).commutes(sigma, sigma)


def _maps_of(group: Group, before: Representation, after: Representation) -> MapBasis:
    """Return the maps of a larger group on the same positions."""
    smaller = before.group
    if not (smaller.size == group.size == before.size == after.size):
        raise ValueError(
            f"orthogonal_to needs groups on the {before.size} positions of {smaller.name}, got "
            f"{group.name} on {group.size}."
        )
    return equivariant_maps(defining(group), defining(group))


def _representation(source: Group | Representation) -> Representation:
    if isinstance(source, Group):
        return defining(source)
    if isinstance(source, Representation):
        return source
    raise ValueError(f"Pass a Group or a Representation, got {type(source).__name__}.")


def relaxed_over(
    in_channels: int,
    out_channels: int,
    groups: Sequence[Group],
    shape: Sequence[int] | None = None,
    free: bool = True,
) -> Relaxed:
    """Return a relaxed layer in which the evidence selects one of several symmetries, or none.

    It has one path per group, without the maps of larger groups, and a free path. Every map belongs
    to the path of the largest group it commutes with, so that paths do not overlap.

    Args:
        in_channels: number of input channels.
        out_channels: number of output channels.
        groups: groups on the same positions, in any order.
        shape: shape of the positions, if they form a grid.
        free: whether to add a free path.

    Raises:
        ValueError: no groups, or two groups with the same maps, which no data can distinguish.
    """
    listed: object = groups
    if not isinstance(listed, Sequence):
        raise ValueError(f"groups must be a list of groups, got {listed!r}.")
    invalid = [member for member in listed if not isinstance(member, Group)]
    if not listed or invalid:
        got = repr(invalid[0]) if invalid else "none"
        raise ValueError(f"groups must contain at least one symrazor.groups.Group, got {got}.")
    for other, group in combinations(groups, 2):
        if _maps_commute(group, other) and _maps_commute(other, group):
            raise ValueError(
                f"{other.name} and {group.name} have the same equivariant maps. Remove one of them."
            )
    paths: list[Path] = []
    for group in groups:
        larger = [g for g in groups if _maps_commute(g, group) and not _maps_commute(group, g)]
        options: dict[str, Any] = {"in_shape": shape, "out_shape": shape, "orthogonal_to": larger}
        paths.append(EquivariantLinear(in_channels, out_channels, group, **options))
    if free:
        positions = (groups[0].size,) if shape is None else shape
        paths.append(FC(in_channels, out_channels, positions, out_shape=positions))
    return Relaxed(paths)


def DeepSets(in_channels: int, out_channels: int, n: int, **options: Any) -> EquivariantLinear:
    """Return a permutation-equivariant layer for sets of n points (Zaheer et al. 2017).

    It has two maps per pair of channels: from each point to itself, and from the others to it.
    """
    return EquivariantLinear(in_channels, out_channels, symmetric(n), **options)


def Circulant(in_channels: int, out_channels: int, n: int, **options: Any) -> EquivariantLinear:
    """Return a layer for periodic sequences: a circular convolution over all n positions."""
    return EquivariantLinear(in_channels, out_channels, cyclic_permutations(n), **options)


def GraphLinear(
    in_channels: int, out_channels: int, adjacency: Shaped[Tensor, "n n"], **options: Any
) -> EquivariantLinear:
    """Return a layer for signals on a graph that commutes with the automorphisms of the graph."""
    return EquivariantLinear(in_channels, out_channels, automorphisms(adjacency), **options)
