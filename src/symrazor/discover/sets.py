"""Candidates for sets of points: does their order matter?

A network that treats all points alike and then averages over them (deep sets) is relaxed: beside
each shared layer stands a path with weights of its own for every place in the list. Inputs reach
the network as [n, features, points], where a shared layer is a convolution of one position.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from symrazor.data import Dataset
from symrazor.discover.maps import fully_connected
from symrazor.discover.structures import Family, Structure
from symrazor.relax import GROUPS, relax

WIDTH = 32
FEW = 64
"""Up to so many points free paths are dense; beyond, they are factored."""
TERMS = {
    "translation-equivariant": "the same for all points",
    "uses position": "tells points apart by their place in the list",
    "use position": "tell points apart by their place in the list",
}


def shared(features: int, outputs: int, width: int = WIDTH) -> nn.Module:
    """Two layers for every point alike, a mean over points, two layers."""
    return nn.Sequential(
        nn.Conv1d(features, width, 1),
        nn.ReLU(),
        nn.Conv1d(width, width, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


def relaxed(features: int, points: int, outputs: int, groups: Sequence[str] = GROUPS) -> nn.Module:
    """The shared network with a free path beside each layer that sees points."""
    paths = "fc+conv" if points <= FEW else "f-fc+conv"
    return relax(shared(features, outputs), torch.zeros(2, features, points), groups, paths)


def candidates(data: Dataset, groups: Sequence[str] | None = None) -> Family:
    """The networks for sets."""
    points, features = data.x.shape[1:]
    networks = {
        "relaxed": (
            partial(relaxed, features, points, data.outputs, groups or GROUPS),
            "a relaxed network of points",
        ),
        "shared": (partial(shared, features, data.outputs), "a network that treats points alike"),
        "fully connected": (
            partial(fully_connected, (features, points), data.outputs),
            "a fully connected network",
        ),
    }
    structures = [Structure(name, make, label) for name, (make, label) in networks.items()]
    kept = "The order of the points does not matter."
    return Family(structures, "relaxed", kept, "The order of the points matters.", "shared", TERMS)
