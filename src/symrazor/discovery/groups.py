"""Read the groups of the user, and build the candidates for groups that permute positions.

Such data are vectors, sets, series, or images with few pixels. The relaxed network has a path for
each group and a free path in every layer (`relaxed_over`). Each group also has a network that is
exactly equivariant to it, and a fully connected network has no symmetry. All networks but the last
average over positions at the end, so that a symmetry of the layers is an invariance of the output.
Inputs reach the layers as [n, channels, *positions].
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symrazor.data import Dataset
from symrazor.data.datasets import plural
from symrazor.discovery.candidates import Family, Structure, UserGroup, slug
from symrazor.groups import (
    Group,
    cyclic_permutations,
    defining,
    dihedral_permutations,
    equivariant_maps,
    from_file,
    symmetric,
    translations,
)
from symrazor.groups.constructors import is_group_file
from symrazor.layers import FC, FFC, Relaxed, SetPool, relaxed_over
from symrazor.layers.networks import fully_connected
from symrazor.symmetry.reading import Reading
from symrazor.symmetry.verdict import SMALL_ERROR, join_names, percent

WIDTH = 16
MAX_DENSE_POSITIONS = 64
"""Free paths on more positions are factored instead of dense."""
MAX_PATH_WEIGHTS = 1 << 20
POSITION_GROUPS: dict[str, Callable[[int], Group]] = {
    "permutation": symmetric,
    "cyclic": cyclic_permutations,
    "dihedral": dihedral_permutations,
}
"""Name -> group on n positions: all permutations; cyclic shifts; cyclic shifts and reversals."""


def as_groups(groups: object) -> tuple[UserGroup, ...]:
    """Return names and groups as a tuple, and read groups that are files.

    Args:
        groups: a name, a file that ends with .json, a `Group`, or a sequence of these.

    Raises:
        ValueError: no group, a value of another type, or a file without a valid group.
        OSError: a file that cannot be read.
    """
    is_sequence = isinstance(groups, Sequence) and not isinstance(groups, str)
    given: Sequence[object] = groups if is_sequence else [groups]  # type: ignore[assignment]
    if not given:
        raise ValueError("groups is empty. Name at least one group, or omit the option.")
    return tuple(_as_group(str(group) if isinstance(group, Path) else group) for group in given)


def _as_group(group: object) -> UserGroup:
    if not isinstance(group, str | Group):
        raise ValueError(
            "A group must be a name, a file that ends with .json, or a Group, got "
            f"{type(group).__name__}."
        )
    return from_file(str(group)) if is_group_file(group) else group


def permutes_positions(groups: Sequence[UserGroup] | None) -> bool:
    """Return whether a group permutes positions instead of transforming a grid."""
    return any(
        group in POSITION_GROUPS if isinstance(group, str) else group.permutations is not None
        for group in groups or ()
    )


def groups_as_json(groups: Sequence[UserGroup] | None) -> list[Any] | None:
    """Return names and generators as lists; two groups of one name can differ."""
    return None if groups is None else [_group_as_json(group) for group in groups]


def _group_as_json(group: UserGroup) -> Any:
    if isinstance(group, str):
        return group
    lie_generators = None if group.lie is None else group.lie.generators
    parts = (group.permutations, group.matrices, lie_generators)
    return [group.name, *(None if part is None else part.tolist() for part in parts)]


def permutation_network(
    shape: Sequence[int], outputs: int, groups: Sequence[Group], free: bool, add_channel: bool
) -> nn.Module:
    """Return two layers with a path per group, a mean over positions, and two dense layers.

    Args:
        shape: [channels, *positions].
        outputs: number of outputs.
        groups: groups on the positions.
        free: whether to add a free path to each of the two layers.
        add_channel: whether the inputs lack the channel dimension.
    """
    channels, *positions = shape
    layers: list[nn.Module] = [nn.Unflatten(1, (1, *positions))] if add_channel else []
    for c in (channels, WIDTH):
        equivariant = relaxed_over(c, WIDTH, groups, positions, free=False)
        paths = [equivariant.path(i) for i in range(len(groups))]
        if free:
            free_path = FC if math.prod(positions) <= MAX_DENSE_POSITIONS else FFC
            paths.append(free_path(c, WIDTH, positions, out_shape=positions))
        layers += [Relaxed(paths), nn.Tanh()]
    head = [SetPool("mean"), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)]
    return nn.Sequential(*layers, *head)


def describe_invariance(names: Sequence[str], network: str, reading: Reading) -> str:
    """Return a headline: the groups under which a candidate is invariant.

    Args:
        names: names of the groups.
        network: name of the candidate; the name of a group if that is built in.
        reading: its reading, with an equivariance error for every group.
    """
    if network in names:
        return f"Invariant under {network}: {_label(network)} has the highest evidence."
    errors = {name: reading.equivariance_error[name] for name in names}
    kept = [name for name in names if errors[name] < SMALL_ERROR]
    if not kept:
        nearest = min(errors, key=lambda name: errors[name])
        change = f"{nearest} changes the output by {percent(errors[nearest])}"
        return f"Not invariant under {' or '.join(names)} ({change})."
    supports = [support for layer in reading.layers for support in layer.symmetry]
    largest = {support.group for support in supports if support.largest} & {*kept} or {*kept}
    named = [name for name in kept if name in largest]
    change = percent(max(errors[name] for name in named))
    effect = f"transforming the input changes the output by {change}"
    return f"Invariant under {join_names(named)} ({effect})."


def _label(group: str) -> str:
    return f"a network with {group} built in"


def permutation_family(data: Dataset, groups: Sequence[UserGroup]) -> Family:
    """Return the networks for data whose positions are permuted by groups.

    The equivariant maps of two groups overlap, and both paths would share the overlap. So with
    several groups, the relaxed network also has a path for the symmetric group: it contains every
    other group, and its maps are the ones they have in common.

    Raises:
        ValueError: groups that do not act on the positions of the data, groups with the same name,
            or a group whose path has too many weights.
    """
    shape = tuple(data.x.shape[1:])
    shape = {"vector": (1, *shape), "set": shape[::-1]}.get(data.kind, shape)
    position_groups = [_on_positions(group, data, shape[1:]) for group in groups]
    needs_symmetric = len(groups) > 1 and not any(g.is_symmetric for g in position_groups)
    common = [symmetric(position_groups[0].size)] if needs_symmetric else []
    by_name = {group.name: group for group in (*position_groups, *common)}
    _check_names([group.name for group in (*position_groups, *common)])
    build = partial(permutation_network, shape, data.outputs, add_channel=data.kind == "vector")
    relaxed = partial(build, [*common, *position_groups], free=True)
    with torch.random.fork_rng([]):
        relaxed()  # raises if the paths cannot be combined
    dense = partial(fully_connected, shape, data.outputs)
    structures = [
        Structure("relaxed", relaxed, "a relaxed network"),
        *(
            Structure(g.name, partial(build, [g], free=False), _label(g.name))
            for g in position_groups
        ),
        Structure("fully connected", dense, "a fully connected network"),
    ]
    return Family(structures, describe=partial(describe_invariance, [*by_name]), groups=by_name)


def _check_names(names: Sequence[str]) -> None:
    """Raise ValueError unless the folder names of all candidates differ."""
    reserved = ("relaxed", "fully connected")
    if len({slug(name) for name in (*reserved, *names)} - {""}) < len(names) + len(reserved):
        raise ValueError(
            "Groups need different names with letters or digits, other than "
            f"{join_names(reserved)}; got {join_names(names)}. Rename a group."
        )


def _on_positions(group: UserGroup, data: Dataset, positions: Sequence[int]) -> Group:
    """Return a group on the positions of the data.

    Raises:
        ValueError: an unknown name, a group on another number of positions, or too many weights.
    """
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
    if maps * WIDTH**2 > MAX_PATH_WEIGHTS:
        raise ValueError(
            f"Group {group.name} has {maps:,} equivariant maps on {n} positions; at most "
            f"{MAX_PATH_WEIGHTS // WIDTH**2:,} are supported. Add generators, or remove positions."
        )
    return group
