"""Candidates for vectors, which have no geometry: how much of a network do the data ask for?"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import nn

from symrazor.data import Dataset
from symrazor.discovery.structures import Family, Structure
from symrazor.discovery.user_groups import ON_PLACES, Offered

WIDTH = 64


def perceptron(features: int, outputs: int, hidden: int) -> nn.Module:
    """A linear model, or one with hidden layers of `WIDTH` tanh units."""
    widths = [features, *[WIDTH] * hidden, outputs]
    layers: list[nn.Module] = []
    for c_in, c_out in pairwise(widths):
        layers += [nn.Linear(c_in, c_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def candidates(data: Dataset, groups: Sequence[Offered] | None = None) -> Family:
    """A linear model, one hidden layer, two hidden layers.

    Raises:
        ValueError: groups that turn grids.
    """
    if groups:
        raise ValueError(
            f"expected groups of permutations for vectors, {' or '.join(ON_PLACES)} or from a "
            f"file, got {list(groups)}"
        )
    labels = ("a linear model", "one hidden layer", "two hidden layers")
    structures = [
        Structure(
            label.removeprefix("a "), partial(perceptron, data.x.shape[1], data.outputs, h), label
        )
        for h, label in enumerate(labels)
    ]
    return Family(structures)
