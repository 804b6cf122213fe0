"""Candidates for vectors, which have no geometry: how much of a network do the data ask for?"""

from collections.abc import Sequence
from functools import partial

from symrazor.data import Dataset
from symrazor.discovery.structures import Family, Structure
from symrazor.discovery.user_groups import ON_PLACES, Offered
from symrazor.layers.networks import perceptron


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
