"""Define the candidates for sets of points and for vectors.

Sets: layers that are equivariant to every permutation of the points, followed by a mean over the
points, are permutation-invariant. The relaxed network has a free path beside each of these layers,
with weights for every position in the list. Networks take sets as [n, features, points].

Vectors have no geometry: the candidates differ in the number of hidden layers.
"""

from collections.abc import Sequence
from functools import partial

from torch import nn

from symrazor.data import Dataset
from symrazor.discovery.candidates import DataKind, Family, Structure, UserGroup, Wording
from symrazor.discovery.groups import (
    MAX_DENSE_POSITIONS,
    POSITION_GROUPS,
    permutation_family,
    permutes_positions,
)
from symrazor.layers import FC, FFC, DeepSets, Relaxed
from symrazor.layers.networks import SET_WIDTH, deep_sets, fully_connected, perceptron, set_network

_SETS = Wording(
    "Permutation-invariant: the order of the points does not matter.",
    "Not permutation-invariant: the order of the points matters.",
    {r"\bS\d+-equivariant": "permutation-equivariant"},
)


def relaxed_deep_sets(
    features: int, points: int, outputs: int, width: int = SET_WIDTH
) -> nn.Module:
    """Return `deep_sets` with a free path beside each layer on points."""
    free = FC if points <= MAX_DENSE_POSITIONS else FFC
    first, second = (
        Relaxed([DeepSets(c, width, points), free(c, width, (points,), out_shape=(points,))])
        for c in (features, width)
    )
    return set_network(first, second, outputs, width)


def _set_candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if groups is not None and set(groups) != {"permutation"}:
        _check_positions(data.kind, groups)
        return permutation_family(data, groups)
    points, features = data.x.shape[1:]
    shape = (features, points, data.outputs)
    dense = partial(fully_connected, (features, points), data.outputs)
    structures = [
        Structure("relaxed", partial(relaxed_deep_sets, *shape), "a relaxed Deep Sets network"),
        Structure("shared", partial(deep_sets, *shape), "a Deep Sets network"),
        Structure("fully connected", dense, "a fully connected network"),
    ]
    return Family(structures, "relaxed", "shared", permutes_points=True)


def _vector_candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if groups is not None:
        _check_positions(data.kind, groups)
        return permutation_family(data, groups)
    labels = {"linear model": "a linear model"}
    labels |= {"one hidden layer": "a network with one hidden layer"}
    labels |= {"two hidden layers": "a network with two hidden layers"}
    structures = [
        Structure(name, partial(perceptron, data.x.shape[1], data.outputs, hidden_layers), label)
        for hidden_layers, (name, label) in enumerate(labels.items())
    ]
    return Family(structures)


def _check_positions(kind: str, groups: Sequence[UserGroup]) -> None:
    if not permutes_positions(groups):
        names = ", ".join(group if isinstance(group, str) else group.name for group in groups)
        raise ValueError(
            f"Groups for {kind}s must permute positions, got {names}. Use "
            f"{', '.join(POSITION_GROUPS)}, or a file of permutations."
        )


SET = DataKind("set", _set_candidates, _SETS)
VECTOR = DataKind("vector", _vector_candidates)
