"""Candidates for data on a grid: images, volumes and series.

A convolutional network is relaxed: beside every convolution stands a path whose weights depend on
place, and the evidence decides layer by layer how much of it is used. Two networks with a fixed
structure stand beside it: the convolutional one as it is, and a fully connected one.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from symrazor.data import Dataset
from symrazor.data.datasets import plural
from symrazor.discovery.structures import Family, Structure
from symrazor.discovery.user_groups import Offered
from symrazor.layers.networks import conv_channels, convolutional, fully_connected
from symrazor.layers.point_group import point_group
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.relax import POINT_GROUPS, TRANSLATIONS, relax
from symrazor.symmetry.relaxation import relaxation

_WORDS = {
    "image": ("Position does not matter.", "Position matters."),
    "volume": ("Position does not matter.", "Position matters."),
    "series": ("When it happens does not matter.", "When it happens matters."),
}


def relaxed(
    shape: Sequence[int],
    outputs: int,
    width: int | None = None,
    groups: Sequence[Offered] = TRANSLATIONS,
) -> nn.Module:
    """The convolutional network with a free path beside every convolution."""
    return relax(convolutional(shape, outputs, width), torch.zeros(2, *shape), groups)


def width_for(shape: Sequence[int], groups: Sequence[Offered]) -> int:
    """Channels of the first convolution that all groups with turns can share out."""
    usual = conv_channels(shape)
    whole = math.lcm(*(point_group(group).order for group in groups if group not in TRANSLATIONS))
    return whole * math.ceil(usual / whole)


def family(
    shape: Sequence[int],
    outputs: int,
    kind: str = "image",
    groups: Sequence[Offered] | None = None,
) -> Family:
    """The three networks for data of a shape.

    Raises:
        ValueError: groups of which no layer can have a path.
    """
    groups = tuple(dict.fromkeys([*TRANSLATIONS, *(groups or ())]))  # all layers are convolutional
    _check_names(groups)
    width = width_for(shape, groups)
    with torch.random.fork_rng([]):
        _check_paths(relaxed(shape, outputs, width, groups), groups)
    networks = {
        "relaxed": (partial(relaxed, shape, outputs, width, groups), "a relaxed CNN"),
        "convolutional": (partial(convolutional, shape, outputs, width), "a plain CNN"),
        "fully connected": (partial(fully_connected, shape, outputs), "a fully connected network"),
    }
    structures = [Structure(name, make, label) for name, (make, label) in networks.items()]
    kept, broken = _WORDS[kind]
    terms = {"on position": "on time"} if kind == "series" else {}
    return Family(structures, "relaxed", kept, broken, "convolutional", terms)


def _check_names(groups: Sequence[Offered]) -> None:
    """Raise ValueError for a name that grids do not have."""
    known = (*TRANSLATIONS, *POINT_GROUPS)
    wrong = [group for group in groups if isinstance(group, str) and group not in known]
    if wrong:
        raise ValueError(
            f"expected groups among {', '.join(known)}, or files that end with .json, got "
            f"{wrong[0]!r}"
        )


def _check_paths(model: nn.Module, groups: Sequence[Offered]) -> None:
    """Raise ValueError for a group that no layer has a path of; says why."""
    paths = [path for m in model.modules() if isinstance(m, Relaxed) for path in m.paths]
    for group in groups:
        name = group if group in TRANSLATIONS else point_group(group).name
        if name not in [path.group for path in paths]:
            why = next(iter(relaxation(model).changed.values())).partition(f"no {name}: ")[2]
            raise ValueError(f"expected groups that fit the data, got {name}: {why}")


def candidates(data: Dataset, groups: Sequence[Offered] | None = None) -> Family:
    """The networks for images, volumes or series.

    Raises:
        ValueError: maps of one position, on which nothing can move.
    """
    shape = tuple(data.x.shape[1:])
    if math.prod(shape[1:]) < 4:
        raise ValueError(
            f"expected {plural(data.kind)} with at least 4 positions, got {list(shape[1:])} in "
            f"{data.source}; do --kind vector"
        )
    return family(shape, data.outputs, data.kind, groups)
