"""Define the candidates for groups of the user, other than point groups of a grid.

- Permutations of positions: the relaxed network has a path for each group and a free path in every
  layer (`relaxed_over`). Each group also has a network that is exactly equivariant to it. These
  networks average over positions at the end, so that a symmetry of the layers is an invariance of
  the output. Inputs reach the layers as [n, channels, *positions].
- Groups of matrices act on vectors as they are, so that data are scaled by one number and not
  centred. Networks see the invariants of a group.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from symrazor.core.validation import join_names
from symrazor.data import Dataset
from symrazor.data.shapes import plural
from symrazor.discovery.headlines import describe_invariance
from symrazor.discovery.question import (
    Family,
    Structure,
    Symmetry,
    UserGroup,
    fully_connected_structure,
    slug,
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
from symrazor.layers import FC, FFC, Relaxed, SetPool, relaxed_over
from symrazor.layers.matrix_invariants import MatrixInvariant
from symrazor.layers.path import Path

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


def free_path(channels: int, width: int, positions: Sequence[int]) -> Path:
    """Return a path without any symmetry."""
    free = FC if math.prod(positions) <= MAX_DENSE_POSITIONS else FFC
    return free(channels, width, positions, out_shape=positions)


# Permutations


def permutes_positions(groups: Sequence[UserGroup] | None) -> bool:
    """Return whether a group permutes positions instead of transforming a grid."""
    return any(
        group in POSITION_GROUPS if isinstance(group, str) else group.permutations is not None
        for group in groups or ()
    )


class MeanAndMax(nn.Module):
    """Take the mean and the maximum over the positions of [n, c, *shape]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, 2c]."""
        flat = x.flatten(2)
        return torch.cat([flat.mean(2), flat.amax(2)], 1)


def permutation_network(
    shape: Sequence[int],
    outputs: int,
    groups: Sequence[Group],
    free: bool,
    add_channel: bool,
    is_wide: bool = False,
) -> nn.Module:
    """Return two layers with a path per group, a mean over positions, and two dense layers.

    The shape is [channels, *positions]; with `add_channel`, inputs lack the channel dimension.
    With `free`, each of the two layers also has a free path. With `is_wide`, layers have twice the
    width and rectified units, and the maximum over positions is used as well.
    """
    channels, *positions = shape
    layers: list[nn.Module] = [nn.Unflatten(1, (1, *positions))] if add_channel else []
    width, activation = PERMUTATION_WIDTH * (2 if is_wide else 1), nn.ReLU if is_wide else nn.Tanh
    pool, features = (MeanAndMax(), 2 * width) if is_wide else (SetPool("mean"), width)
    for c in (channels, width):
        equivariant = relaxed_over(c, width, groups, positions, free=False)
        paths = [equivariant.path(i) for i in range(len(groups))]
        if free:
            paths.append(free_path(c, width, positions))
        layers += [Relaxed(paths), activation()]
    head = [nn.Linear(features, width), activation(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers, pool, *head)


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
    wider = {
        g.name: Structure(
            f"{g.name}, wider",
            partial(build, [g], free=False, is_wide=True),
            f"{_label(g.name)}, twice as wide",
        )
        for g in position_groups
    }
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
        wider=wider,
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


# Matrices


def are_matrices(groups: Sequence[UserGroup] | None) -> bool:
    """Return whether all groups consist of matrices."""
    return bool(groups) and all(
        isinstance(group, Group) and group.permutations is None for group in groups or ()
    )


def matrix_family(data: Dataset, groups: Sequence[Group]) -> Family:
    """Return an invariant network for each group, a relaxed one, and a fully connected one."""
    features = data.x.shape[1]
    for group in groups:
        if group.size != features:
            raise ValueError(
                f"Group {group.name} consists of matrices of {group.size} rows, but "
                f"{plural(data.kind)} have {features} features."
            )
    structures, symmetries = [], []
    for group in groups:
        make = partial(MatrixInvariant, group, data.outputs)
        with torch.random.fork_rng([]):
            make()  # raises if the group has no invariants
        structures.append(Structure(group.name, make, f"a network with {group.name} built in"))
        symmetries.append(Symmetry(group.name, group.name, ["fully connected"]))
    if len(groups) == 1:
        (group,) = groups
        relaxed = partial(MatrixInvariant, group, data.outputs, free=True)
        structures.insert(0, Structure("relaxed", relaxed, "a relaxed network"))
        symmetries = [Symmetry(group.name, group.name, ["relaxed", "fully connected"])]
    structures.append(fully_connected_structure((features,), data.outputs))
    return Family(
        structures,
        built_in=groups[0].name if len(groups) == 1 else "",
        symmetries=symmetries,
        describe=describe_invariance,
        groups={group.name: group for group in groups},
    )
