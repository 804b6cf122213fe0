r"""Linear layers that commute with any group: vectors, sets, sequences, graphs.

On maps x[n, c, s], of which a group acts on the s places and every channel is alike,

$$ W[o, i, t, s] = \sum_b u[o, i, b]\, Q_b[t, s] $$

with the $Q_b$ a basis of the maps that commute with the group (`symrazor.groups.maps`).
"""

import math
from collections.abc import Callable, Sequence
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

EXACT = 512
"""Up to so many coefficients a layer's curvature block is exact, not a Kronecker product."""


class _OnBasis(nn.Module):
    """Tensors of a basis beside parameters: rounded anew from float64 whenever the module moves."""

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, Tensor] = {}

    def keep(self, name: str, value: Tensor) -> None:
        """A buffer that is no part of the state."""
        self._exact[name] = value
        self.register_buffer(name, value.to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_OnBasis":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in self._exact.items():
            setattr(self, name, value.to(getattr(self, name)))
        return self


class EquivariantMap(_OnBasis):
    r"""$y[n, o, t] = \sum_{i, b, s} u[o, i, b]\, Q_b[t, s]\, x[n, i, s]$."""

    weight: nn.Parameter
    basis: Tensor
    scales: Tensor
    labels: Tensor

    def __init__(self, in_channels: int, out_channels: int, maps: MapBasis) -> None:
        """Draw u so that the output has the variance of He's initialisation."""
        super().__init__()
        bound = math.sqrt(6 / max(1, in_channels * maps.count))
        values = torch.empty(out_channels, in_channels, maps.count).uniform_(-bound, bound)
        self.weight = nn.Parameter(values)
        (self.t, self.s), self.count = maps.shape, maps.count
        self.inputs, self.outputs = in_channels, out_channels
        self.maps_first = maps.count * (self.s + out_channels) < self.s * out_channels
        self.labelled = maps.labels is not None
        if maps.labels is not None and maps.scales is not None:
            self.keep("scales", maps.scales)
            self.register_buffer("labels", maps.labels, persistent=False)
        if self.maps_first or not self.labelled:
            self.keep("basis", maps.matrices())

    def mapped(self, x: Float[Tensor, "n i s"]) -> Float[Tensor, "n i b t"]:
        """Every basis map of every channel."""
        if self.maps_first or not self.labelled:
            every: Tensor = F.linear(x, self.basis.flatten(0, 1)).unflatten(2, (self.count, self.t))
            return every
        spread = x.unsqueeze(2).expand(-1, -1, self.t, -1)
        where = self.labels.expand(*x.shape[:2], -1, -1)
        sums = x.new_zeros(*x.shape[:2], self.t, self.count).scatter_add(3, where, spread)
        return (sums * self.scales).transpose(2, 3)

    def written(self) -> Float[Tensor, "ot is"]:
        """The whole matrix."""
        if self.labelled:
            W = (self.weight * self.scales)[:, :, self.labels]
        else:
            W = torch.einsum("oib,bts->oits", self.weight, self.basis)
        return W.transpose(1, 2).reshape(self.outputs * self.t, self.inputs * self.s)

    def forward(self, x: Float[Tensor, "n i s"]) -> Float[Tensor, "n o t"]:
        """Basis maps first, or the matrix written out: whichever is less work."""
        if self.maps_first:
            y: Tensor = self.weight.flatten(1) @ self.mapped(x).flatten(1, 2)
        else:
            y = F.linear(x.flatten(1), self.written()).unflatten(1, (self.outputs, self.t))
        return y

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        spaces = f"{self.inputs} x {self.s} -> {self.outputs} x {self.t}"
        return f"{spaces}, {self.count} basis maps"


@sharing.register
def _equivariant_map(module: EquivariantMap) -> Sharing:
    shape = module.weight.shape

    def seen(x: Float[Tensor, "n i s"]) -> Float[Tensor, "n t 1 ib"]:
        return module.mapped(x).flatten(1, 2).transpose(1, 2).unsqueeze(2)

    return Sharing(
        inputs=seen,
        outputs=lambda g: g.transpose(1, 2).unsqueeze(2),
        bias=None,
        to_blocks=lambda weight: weight.flatten(1).unsqueeze(0),
        from_blocks=lambda blocks: blocks.reshape(shape),
        dense=module.weight.numel() <= EXACT,
    )


class InvariantBias(_OnBasis):
    r"""$y[n, o, t] + \sum_b v[o, b]\, q_b[t]$ for vectors $q_b$ that the group leaves alone."""

    values: nn.Parameter
    basis: Tensor

    def __init__(self, channels: int, maps: MapBasis) -> None:
        """Start at zero."""
        super().__init__()
        self.values = nn.Parameter(torch.zeros(channels, maps.count))
        self.keep("basis", maps.matrices().squeeze(2))

    def forward(self, y: Float[Tensor, "n o t"]) -> Float[Tensor, "n o t"]:
        """Add it."""
        return y + self.values @ self.basis

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"{len(self.values)} channels, {self.values.shape[1]} invariants"


@sharing.register
def _invariant_bias(module: InvariantBias) -> Sharing:
    def seen(y: Float[Tensor, "n o t"]) -> Float[Tensor, "n t 1 b"]:
        return module.basis.T.reshape(1, y.shape[2], 1, -1).expand(len(y), -1, -1, -1).to(y)

    return Sharing(
        inputs=seen,
        outputs=lambda g: g.transpose(1, 2).unsqueeze(2),
        weight="values",
        bias=None,
        dense=True,
    )


class EquivariantLinear(Path):
    """A linear map that commutes with a group, in the space of all such maps.

    It maps [n, c, *in_shape] to [n, d, *out_shape]; the group acts on the places, in row-major
    order, by two of its representations.

    Args:
        in_channels: c.
        out_channels: d.
        source: a representation on the places of the input; for a `Group`, its defining one.
        target: one on the places of the output; by default the same.
        in_shape: of the input's places, if they are a grid.
        out_shape: of the output's.
        bias: a bias per channel and invariant vector of the target.
        orthogonal_to: groups whose maps are left out: the maps of paths of larger groups beside it
            The sum of paths stays the same, and each part of it has one prior.

    Raises:
        ValueError: representations that have no map between them, or do not fit the shapes.
    """

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
        """Find the basis."""
        before = _representation(source)
        after = before if target is None else _representation(target)
        if isinstance(target, Group) and target is before.group:
            after = before if after.size == before.size else after
        in_shape = (before.size,) if in_shape is None else in_shape
        if out_shape is None:
            out_shape = in_shape if after is before else (after.size, *(1,) * (len(in_shape) - 1))
        super().__init__(in_channels, out_channels, in_shape, out_shape=out_shape)
        if (self.pixels_in, self.pixels_out) != (before.size, after.size):
            raise ValueError(
                f"expected shapes of {before.size} and {after.size} places for representations "
                f"of {before.group.name}, got {self.in_shape} and {self.out_shape}"
            )
        maps = equivariant_maps(before, after)
        listed: object = orthogonal_to
        if not isinstance(listed, Sequence) or not all(isinstance(g, Group) for g in listed):
            raise ValueError(f"expected a list of groups as orthogonal_to, got {listed!r}")
        if orthogonal_to:
            maps = maps.orthogonal_to([_larger(group, before, after) for group in orthogonal_to])
        if not maps.count:
            raise ValueError(
                f"expected representations with an equivariant map between them, got none from "
                f"{before.size} to {after.size} dimensions of {before.group.name}"
            )
        self.map = EquivariantMap(in_channels, out_channels, maps)
        self.offset: nn.Module = nn.Identity()
        fixed = equivariant_maps(invariant(before.group), after)
        if orthogonal_to:
            fixed = fixed.orthogonal_to(
                [equivariant_maps(invariant(g), defining(g)) for g in orthogonal_to]
            )
        if bias and fixed.count:
            self.offset = InvariantBias(out_channels, fixed)
        self.maps = maps
        self.group = before.group.name
        self.representations = (before, after)

    @property
    def label(self) -> str:
        """Its type with its group: several may stand side by side."""
        return f"Linear[{self.group}]"

    @property
    def affine(self) -> bool:
        """True."""
        return True

    def is_equivariant_under(self, other: Path) -> bool:
        """Whether every map of this path commutes with the group of another one."""
        if other.representations is None:
            return super().is_equivariant_under(other)
        return self.maps.commutes(*other.representations)

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Map every channel's places, then add the bias."""
        self.check(x)
        y: Tensor = self.offset(self.map(x.flatten(2))).unflatten(2, self.out_shape)
        return y


def _contains(large: Group, small: Group) -> bool:
    """Whether the maps of one group are some of those of another, and not all of them."""
    both = [defining(large), defining(small)]
    maps = [equivariant_maps(one, one) for one in both]
    return maps[0].commutes(both[1], both[1]) and not maps[1].commutes(both[0], both[0])


def _alike(one: Group, two: Group) -> bool:
    """Whether the maps of two groups are the same."""
    both = [defining(one), defining(two)]
    maps = [equivariant_maps(rho, rho) for rho in both]
    return maps[0].commutes(both[1], both[1]) and maps[1].commutes(both[0], both[0])


def _larger(group: Group, before: Representation, after: Representation) -> MapBasis:
    """The maps of a group on the same places."""
    own = before.group
    if not (own.size == group.size == before.size == after.size):
        raise ValueError(
            f"expected groups on the places of {own.name} ({before.size}), got {group.name} "
            f"of size {group.size}"
        )
    return equivariant_maps(defining(group), defining(group))


def _representation(given: Group | Representation) -> Representation:
    if isinstance(given, Group):
        return defining(given)
    if isinstance(given, Representation):
        return given
    raise ValueError(f"expected a Group or a Representation, got {type(given).__name__}")


def relaxed_over(
    in_channels: int,
    out_channels: int,
    groups: Sequence[Group],
    shape: Sequence[int] | None = None,
    free: bool = True,
) -> Relaxed:
    """A layer that the evidence gives one of several symmetries, or none.

    One path per group, with what the paths of larger groups leave out, and a free path: every map
    belongs to the path of the largest group it commutes with, so that no path does another's work.

    Args:
        in_channels: c.
        out_channels: d.
        groups: on the same places; put them in any order.
        shape: of the places, if they are a grid.
        free: whether to add a free path.

    Raises:
        ValueError: no groups, or a group all of whose maps are those of another, or of larger ones:
            data cannot tell these apart.
    """
    listed: object = groups
    if not isinstance(listed, Sequence):
        raise ValueError(f"expected a list of groups, got {listed!r}; do: put it into a list")
    others = [one for one in listed if not isinstance(one, Group)]
    if not listed or others:
        got = repr(others[0]) if others else "none"
        raise ValueError(f"expected at least one group, a symrazor.groups.Group, got {got}")
    for i, one in enumerate(groups):
        for other in groups[:i]:
            if one.size == other.size and _alike(one, other):
                raise ValueError(
                    f"expected groups with different maps, got {other.name} and {one.name}, whose "
                    "layers are the same; do: leave one of them out"
                )
    paths: list[Path] = []
    for group in groups:
        larger = [other for other in groups if _contains(other, group)]
        paths.append(
            EquivariantLinear(
                in_channels,
                out_channels,
                group,
                in_shape=shape,
                out_shape=shape,
                orthogonal_to=larger,
            )
        )
    if free:
        places = (groups[0].size,) if shape is None else shape
        paths.append(FC(in_channels, out_channels, places, out_shape=places))
    return Relaxed(paths)


def DeepSets(in_channels: int, out_channels: int, n: int, **options: Any) -> EquivariantLinear:
    """A layer for sets of n things that treats all orders alike (Zaheer et al. 2017).

    Two maps per pair of channels: each thing to itself, and the others to it.
    """
    return EquivariantLinear(in_channels, out_channels, symmetric(n), **options)


def Circulant(in_channels: int, out_channels: int, n: int, **options: Any) -> EquivariantLinear:
    """A layer for periodic sequences of n places: a circular convolution as wide as they are."""
    return EquivariantLinear(in_channels, out_channels, cyclic_permutations(n), **options)


def GraphLinear(
    in_channels: int, out_channels: int, adjacency: Shaped[Tensor, "n n"], **options: Any
) -> EquivariantLinear:
    """A layer for signals on the nodes of a graph that keeps the symmetries of the graph."""
    return EquivariantLinear(in_channels, out_channels, automorphisms(adjacency), **options)
