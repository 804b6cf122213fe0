"""Candidates for data on places that some groups permute: which of these symmetries do they have?

Vectors, sets, series, or maps of few positions. A relaxed network has a path for each group in each
of its layers and a free one beside them (`relaxed_over`); for every group there is a network that
has it built in, and a fully connected one has none. All but the last average over places at the
end, so that a symmetry of the layers is one of the answer. Inputs reach the layers as
[n, channels, *places].
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from symrazor.data import Dataset
from symrazor.data.datasets import plural
from symrazor.discovery.question import slug
from symrazor.discovery.structures import Family, Structure
from symrazor.discovery.user_groups import ON_PLACES, Offered
from symrazor.groups import Group, defining, equivariant_maps, symmetric, translations
from symrazor.layers import FC, FFC, Relaxed, SetPool, relaxed_over
from symrazor.layers.networks import fully_connected
from symrazor.symmetry.reading import Reading
from symrazor.symmetry.verdict import SMALL_ERROR, join_names, percent

WIDTH = 16
FEW = 64
"""Up to so many places free paths are dense; beyond, they are factored."""
LARGEST = 1 << 20
"""Weights of the path of a group, at most."""


def network(
    shape: Sequence[int], outputs: int, groups: Sequence[Group], free: bool, lift: bool
) -> nn.Module:
    """Two layers with a path per group, a mean over places, two layers.

    Args:
        shape: [channels, *places].
        outputs: of the network.
        groups: on the places.
        free: whether to add a free path to each of the two layers.
        lift: whether data come without the dimension of channels.
    """
    channels, *places = shape
    layers: list[nn.Module] = [nn.Unflatten(1, (1, *places))] if lift else []
    for c in (channels, WIDTH):
        strict = relaxed_over(c, WIDTH, groups, places, free=False)
        paths = [strict.path(i) for i in range(len(groups))]
        if free:
            kind = FC if math.prod(places) <= FEW else FFC
            paths.append(kind(c, WIDTH, places, out_shape=places))
        layers += [Relaxed(paths), nn.Tanh()]
    head = [SetPool("mean"), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)]
    return nn.Sequential(*layers, *head)


def says(names: Sequence[str], network: str, reading: Reading) -> str:
    """Which symmetry a candidate stands for, by name or by what groups change of its outputs."""
    if network in names:
        return f"The data ask for {_label(network)}."
    errors = {name: reading.equivariance_error[name] for name in names}
    kept = [name for name in names if errors[name] < SMALL_ERROR]
    if not kept:
        nearest = min(errors, key=lambda name: errors[name])
        none = (
            f"{nearest} is not kept" if len(names) == 1 else f"None of {join_names(names)} is kept"
        )
        return f"{none}: {nearest} changes the outputs by {percent(errors[nearest])}."
    symmetry = [one for layer in reading.layers for one in layer.symmetry]
    largest = {one.group for one in symmetry if one.largest} & {*kept} or {*kept}
    named = [name for name in kept if name in largest]
    changed, verb = percent(max(errors[name] for name in named)), "are" if named[1:] else "is"
    return (
        f"{join_names(named)} {verb} kept: moving the inputs so changes the outputs by {changed}."
    )


def _label(group: str) -> str:
    return f"a network with {group} built in"


def candidates(data: Dataset, groups: Sequence[Offered]) -> Family:
    """The networks for data on the places of some groups.

    The layers of two groups have maps in common, which both paths would share. So where there are
    several, the relaxed network has a path for the group of all orders, which contains every other:
    its maps are those in common.

    Raises:
        ValueError: groups that do not act on the places of the data, two that cannot be told apart,
            or one that leaves too many weights.
    """
    shape = tuple(data.x.shape[1:])
    shape = {"vector": (1, *shape), "set": shape[::-1]}.get(data.kind, shape)
    given = [_on(group, data, shape[1:]) for group in groups]
    every = symmetric(given[0].size)
    all_orders = [] if len(given) < 2 or any(g.is_symmetric for g in given) else [every]
    names = [group.name for group in (*given, *all_orders)]
    _check_names(names)
    build = partial(network, shape, data.outputs, lift=data.kind == "vector")
    relaxed = partial(build, [*all_orders, *given], free=True)
    with torch.random.fork_rng([]):
        relaxed()  # refuses what cannot be side by side
    dense = partial(fully_connected, shape, data.outputs)
    structures = [
        Structure("relaxed", relaxed, "a relaxed network"),
        *(Structure(g.name, partial(build, [g], free=False), _label(g.name)) for g in given),
        Structure("fully connected", dense, "a fully connected network"),
    ]
    moved = dict(zip(names, (*given, *all_orders), strict=True))
    return Family(structures, says=partial(says, names), groups=moved)


def _check_names(names: Sequence[str]) -> None:
    """Raise ValueError for names that candidates cannot be told apart by."""
    fixed = ("relaxed", "fully connected")
    if len({slug(name) for name in (*fixed, *names)} - {""}) < len(names) + len(fixed):
        raise ValueError(
            f"expected a name of its own for each group, with letters or digits, and none of "
            f"{join_names(fixed)}, got {join_names(names)}; do: change a name"
        )


def _on(group: Offered, data: Dataset, places: Sequence[int]) -> Group:
    """A group on the places of the data.

    Raises:
        ValueError: none by that name, one that does not permute so many, or too many weights.
    """
    n = math.prod(places)
    if isinstance(group, str):
        known = [*ON_PLACES, "translation"]
        if group not in known:
            raise ValueError(
                f"expected groups among {join_names(known)}, or files of permutations, for "
                f"{plural(data.kind)} in {data.source}, got {group!r}"
            )
        group = ON_PLACES[group](n) if group in ON_PLACES else translations(places)
    if group.permutations is None or group.size != n:
        acts = f"{'matrices' if group.permutations is None else 'permutations'} of {group.size}"
        raise ValueError(
            f"expected permutations of {n} places for {plural(data.kind)} of "
            f"{' x '.join(map(str, data.x.shape[1:]))}, got {acts} in {group.name}"
        )
    maps = equivariant_maps(defining(group), defining(group)).count
    if maps * WIDTH**2 > LARGEST:
        raise ValueError(
            f"expected a group with at most {LARGEST // WIDTH**2:,} maps that commute with it, got "
            f"{maps:,} on {n} places for {group.name}; do: add generators, or use fewer places"
        )
    return group
