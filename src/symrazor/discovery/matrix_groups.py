"""Define the candidates for vectors under groups of matrices: is the function invariant?

A group of matrices acts on the vectors as they are, so that data are scaled by one number and not
centred.
"""

from collections.abc import Sequence
from functools import partial

import torch

from symrazor.data import Dataset
from symrazor.data.datasets import plural
from symrazor.discovery.grids import fully_connected_structure
from symrazor.discovery.question import Family, Structure, Symmetry, UserGroup
from symrazor.discovery.wording import describe_invariance
from symrazor.groups import Group
from symrazor.layers.matrix_invariants import MatrixInvariant


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
