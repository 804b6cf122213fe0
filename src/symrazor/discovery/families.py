"""Define the kinds of data that `discover` accepts, and the candidates for each of them.

A kind of data is one `DataKind`: its name, how it is recognised, which networks are compared, and
how the result is put in words. `register_kind` makes it known to `discover`. The built-in kinds:

- Images, volumes and series: a relaxed CNN, whose convolutions have free paths beside them with
  weights that depend on position; a plain CNN; and a fully connected network. The evidence decides
  layer by layer how much of a free path is used.
- Sets of points: layers that are equivariant to every permutation of the points, followed by a mean
  over the points, are permutation-invariant. The relaxed network has a free path beside each of
  these layers. Networks take sets as [n, features, points].
- Vectors have no geometry: the candidates differ in the number of hidden layers.
- Groups of the user that permute positions: the relaxed network has a path for each group and a
  free path in every layer (`relaxed_over`). Each group also has a network that is exactly
  equivariant to it. These networks average over positions at the end, so that a symmetry of the
  layers is an invariance of the output. Inputs reach the layers as [n, channels, *positions].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from symrazor.data import Dataset
from symrazor.data.datasets import plural, register_shape
from symrazor.discovery.grids import fully_connected_structure, grid_family
from symrazor.discovery.matrix_groups import are_matrices, matrix_family
from symrazor.discovery.question import (
    NEUTRAL,
    Family,
    Structure,
    Symmetry,
    UserGroup,
    Wording,
    slug,
)
from symrazor.discovery.wording import (
    IMAGE_WORDING,
    SERIES_WORDING,
    SET_WORDING,
    VECTOR_WORDING,
    describe_invariance,
)
from symrazor.groups import (
    Group,
    cyclic_permutations,
    defining,
    dihedral_permutations,
    equivariant_maps,
    symmetric,
    translations,
)
from symrazor.layers import FC, FFC, DeepSets, Relaxed, SetPool, relaxed_over
from symrazor.layers.path import Path
from symrazor.layers.plain import (
    perceptron,
)
from symrazor.symmetry.verdict import join_names

MIN_POSITIONS = 4
SET_WIDTH = 32
PERMUTATION_WIDTH = 16
"""Channels of the layers of a permutation network."""
MAX_DENSE_POSITIONS = 64
"""Free paths on more positions are factored instead of dense."""
MAX_PATH_WEIGHTS = 1 << 20
POSITION_GROUPS: dict[str, Callable[[int], Group]] = {
    "permutation": symmetric,
    "cyclic": cyclic_permutations,
    "dihedral": dihedral_permutations,
}
"""Name -> group on n positions: all permutations; cyclic shifts; cyclic shifts and reversals."""
PERCEPTRONS = {
    "linear model": "a linear model",
    "one hidden layer": "a network with one hidden layer",
    "two hidden layers": "a network with two hidden layers",
}
"""Name -> label of the candidates for vectors, by number of hidden layers."""


Candidates = Callable[[Dataset, Sequence[UserGroup] | None], Family]


@dataclass(frozen=True)
class DataKind:
    """A kind of data that `discover` accepts.

    Args:
        name: singular noun; the value of `kind` and `--kind`.
        candidates: returns the networks to compare on a data set, given the groups of the user
            (None if the user named none).
        wording: headlines for the relaxed network.
        axes: axes of the array of inputs, such as "[n, channels, time]". Inputs are standardised
            along the second axis.
        recognise: returns whether inputs x with labels y are of this kind. None if `symrazor.data`
            recognises the kind, or if it always has to be named.
    """

    name: str
    candidates: Candidates
    wording: Wording = NEUTRAL
    axes: str = ""
    recognise: Callable[[Tensor, Tensor | None], bool] | None = None


_KINDS: dict[str, DataKind] = {}


def register_kind(kind: DataKind) -> None:
    """Make a kind of data known to `discover` and to `symrazor.data`; replaces one of this name."""
    _KINDS[kind.name] = kind
    if kind.axes:
        register_shape(kind.name, kind.axes, kind.recognise)


def registered_kinds() -> tuple[str, ...]:
    """Return the names of the kinds for which there are candidates."""
    return tuple(_KINDS)


def candidates_for(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    """Return the networks to compare; without groups, the default symmetries of the kind."""
    kind = _KINDS[data.kind]
    family = kind.candidates(data, groups)
    return family if family.wording else replace(family, wording=kind.wording)


def _free_path(channels: int, width: int, positions: Sequence[int]) -> Path:
    free = FC if math.prod(positions) <= MAX_DENSE_POSITIONS else FFC
    return free(channels, width, positions, out_shape=positions)


# Images, volumes and series


def _grid_candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if permutes_positions(groups):
        return permutation_family(data, groups or ())
    shape = tuple(data.x.shape[1:])
    if math.prod(shape[1:]) < MIN_POSITIONS:
        raise ValueError(
            f"{data.source}: {plural(data.kind)} need at least {MIN_POSITIONS} positions, got "
            f"{list(shape[1:])}. Use --kind vector."
        )
    return grid_family(shape, data.outputs, groups)


# Sets and vectors


def deep_sets(features: int, points: int, outputs: int, free: bool = False) -> nn.Module:
    """Return a permutation-invariant network for sets [n, features, points].

    With `free`, each layer on points has a free path beside it, which breaks the symmetry.
    """
    layers: list[nn.Module] = []
    for channels in (features, SET_WIDTH):
        paths: list[Path] = [DeepSets(channels, SET_WIDTH, points)]
        if free:
            paths.append(_free_path(channels, SET_WIDTH, (points,)))
        layers += [Relaxed(paths), nn.ReLU()]
    head = [nn.Linear(SET_WIDTH, SET_WIDTH), nn.ReLU(), nn.Linear(SET_WIDTH, outputs)]
    return nn.Sequential(*layers, SetPool("mean"), *head)


def _set_candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if groups is not None and set(groups) != {"permutation"}:
        return permutation_family(data, groups)
    points, features = data.x.shape[1:]
    make = partial(deep_sets, features, points, data.outputs)
    structures = [
        Structure("relaxed", partial(make, free=True), "a relaxed Deep Sets network"),
        Structure("shared", make, "a Deep Sets network"),
        fully_connected_structure((features, points), data.outputs),
    ]
    symmetries = (Symmetry("permutation", "shared", ("relaxed", "fully connected")),)
    return Family(structures, "relaxed", "shared", symmetries, permutes_points=True)


def _vector_candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if groups is not None and are_matrices(groups):
        return matrix_family(data, [group for group in groups if isinstance(group, Group)])
    if groups is not None:
        return permutation_family(data, groups)
    structures = [
        Structure(name, partial(perceptron, data.x.shape[1], data.outputs, hidden_layers), label)
        for hidden_layers, (name, label) in enumerate(PERCEPTRONS.items())
    ]
    linear, *rivals = PERCEPTRONS
    return Family(structures, symmetries=(Symmetry("linear", linear, rivals),))


# Groups of the user that permute positions


def permutes_positions(groups: Sequence[UserGroup] | None) -> bool:
    """Return whether a group permutes positions instead of transforming a grid."""
    return any(
        group in POSITION_GROUPS if isinstance(group, str) else group.permutations is not None
        for group in groups or ()
    )


def permutation_network(
    shape: Sequence[int], outputs: int, groups: Sequence[Group], free: bool, add_channel: bool
) -> nn.Module:
    """Return two layers with a path per group, a mean over positions, and two dense layers.

    The shape is [channels, *positions]; with `add_channel`, inputs lack the channel dimension.
    With `free`, each of the two layers also has a free path.
    """
    channels, *positions = shape
    layers: list[nn.Module] = [nn.Unflatten(1, (1, *positions))] if add_channel else []
    width = PERMUTATION_WIDTH
    for c in (channels, width):
        equivariant = relaxed_over(c, width, groups, positions, free=False)
        paths = [equivariant.path(i) for i in range(len(groups))]
        if free:
            paths.append(_free_path(c, width, positions))
        layers += [Relaxed(paths), nn.Tanh()]
    head = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers, SetPool("mean"), *head)


def _label(group: str) -> str:
    return f"a network with {group} built in"


def permutation_family(data: Dataset, groups: Sequence[UserGroup]) -> Family:
    """Return the networks for data whose positions are permuted by groups.

    The equivariant maps of two groups overlap, and both paths would share the overlap. So with
    several groups, the relaxed network also has a path for the symmetric group: it contains every
    other group, and its maps are the ones they have in common.
    """
    if not permutes_positions(groups):
        names = ", ".join(group if isinstance(group, str) else group.name for group in groups)
        raise ValueError(
            f"Groups for {plural(data.kind)} must permute positions, got {names}. Use "
            f"{', '.join(POSITION_GROUPS)}, or a file of permutations."
        )
    shape = tuple(data.x.shape[1:])
    shape = {"vector": (1, *shape), "set": shape[::-1]}.get(data.kind, shape)
    position_groups = [_on_positions(group, data, shape[1:]) for group in groups]
    needs_symmetric = len(groups) > 1 and not any(g.is_symmetric for g in position_groups)
    common = [symmetric(position_groups[0].size)] if needs_symmetric else []
    by_name = {group.name: group for group in (*position_groups, *common)}
    _check_candidate_names([group.name for group in (*position_groups, *common)])
    build = partial(permutation_network, shape, data.outputs, add_channel=data.kind == "vector")
    relaxed = partial(build, [*common, *position_groups], free=True)
    with torch.random.fork_rng([]):
        relaxed()  # raises if the paths cannot be combined
    structures = [
        Structure("relaxed", relaxed, "a relaxed network"),
        *(
            Structure(g.name, partial(build, [g], free=False), _label(g.name))
            for g in position_groups
        ),
        fully_connected_structure(shape, data.outputs),
    ]
    n_maps = {g.name: equivariant_maps(defining(g), defining(g)).count for g in position_groups}
    symmetries = [
        Symmetry(
            name,
            name,
            ["relaxed", "fully connected", *(g for g in n_maps if n_maps[g] > n_maps[name])],
        )
        for name in n_maps
    ]
    return Family(
        structures,
        relaxed="relaxed" if len(groups) == 1 else "",
        built_in=position_groups[0].name if len(groups) == 1 else "",
        symmetries=symmetries,
        describe=describe_invariance,
        groups=by_name,
    )


def _check_candidate_names(names: Sequence[str]) -> None:
    """Raise ValueError unless the folder names of all candidates differ."""
    reserved = ("relaxed", "fully connected")
    if len({slug(name) for name in (*reserved, *names)} - {""}) < len(names) + len(reserved):
        raise ValueError(
            "Groups need different names with letters or digits, other than "
            f"{join_names(reserved)}; got {join_names(names)}. Rename a group."
        )


def _on_positions(group: UserGroup, data: Dataset, positions: Sequence[int]) -> Group:
    """Return a group on the positions of the data; ValueError if it does not act on them."""
    n = math.prod(positions)
    if isinstance(group, str):
        known = [*POSITION_GROUPS, "translation"]
        if group not in known:
            raise ValueError(
                f"{data.source}: unknown group {group!r} for {plural(data.kind)}. Use "
                f"{', '.join(known)}, or a file of permutations."
            )
        group = POSITION_GROUPS[group](n) if group in POSITION_GROUPS else translations(positions)
    if group.permutations is None or group.size != n:
        acts = f"{'matrices' if group.permutations is None else 'permutations'} of {group.size}"
        raise ValueError(
            f"Group {group.name} consists of {acts}, but {plural(data.kind)} of "
            f"{' x '.join(map(str, data.x.shape[1:]))} need permutations of {n} positions."
        )
    maps = equivariant_maps(defining(group), defining(group)).count
    max_maps = MAX_PATH_WEIGHTS // PERMUTATION_WIDTH**2
    if maps > max_maps:
        raise ValueError(
            f"Group {group.name} has {maps:,} equivariant maps on {n} positions; at most "
            f"{max_maps:,} are supported. Add generators, or remove positions."
        )
    return group


register_kind(DataKind("image", _grid_candidates, IMAGE_WORDING))
register_kind(DataKind("volume", _grid_candidates, IMAGE_WORDING))
register_kind(DataKind("series", _grid_candidates, SERIES_WORDING))
register_kind(DataKind("set", _set_candidates, SET_WORDING))
register_kind(DataKind("vector", _vector_candidates, VECTOR_WORDING))
