"""Candidates for sets of points: does their order matter?

Layers that commute with every order of the points (deep sets: each point to itself, and the others
to it), then a mean over points, stand for a set. Relaxed, each has a path with weights of its own
for every place in the list beside it. Inputs reach the network as [n, features, points].
"""

from collections.abc import Sequence
from functools import partial

from torch import nn

from symrazor.data import Dataset
from symrazor.discovery.structures import Family, Structure
from symrazor.discovery.user_groups import ON_PLACES, Offered
from symrazor.layers import FC, FFC, DeepSets, Relaxed
from symrazor.layers.networks import SET_WIDTH, deep_sets, fully_connected, set_network

FEW = 64
"""Up to so many points free paths are dense; beyond, they are factored."""
GROUP = "permutation"


def relaxed(features: int, points: int, outputs: int, width: int = SET_WIDTH) -> nn.Module:
    """The same with a free path beside each layer that sees points."""
    free = FC if points <= FEW else FFC
    layers = [
        Relaxed([DeepSets(c, width, points), free(c, width, (points,), out_shape=(points,))])
        for c in (features, width)
    ]
    return set_network(*layers, outputs=outputs, width=width)


def terms(points: int) -> dict[str, str]:
    """Words of a reading -> what they are called for sets."""
    return {
        f"is not S{points}-equivariant": "tells points apart by their place in the list",
        f"are not S{points}-equivariant": "tell points apart by their place in the list",
        f"S{points}-equivariant": "alike for all orders of the points",
    }


def candidates(data: Dataset, groups: Sequence[Offered] | None = None) -> Family:
    """The networks for sets.

    Raises:
        ValueError: groups that turn grids.
    """
    if groups is not None and set(groups) != {GROUP}:
        raise ValueError(
            f"expected groups of permutations for sets, {' or '.join(ON_PLACES)} or from a file, "
            f"got {list(groups)}"
        )
    points, features = data.x.shape[1:]
    shape = (features, points, data.outputs)
    networks = {
        "relaxed": (partial(relaxed, *shape), "a relaxed network of points"),
        "shared": (partial(deep_sets, *shape), "a network that treats points alike"),
        "fully connected": (
            partial(fully_connected, (features, points), data.outputs),
            "a fully connected network",
        ),
    }
    structures = [Structure(name, make, label) for name, (make, label) in networks.items()]
    kept, broken = "The order of the points does not matter.", "The order of the points matters."
    return Family(structures, "relaxed", kept, broken, "shared", terms(points))
