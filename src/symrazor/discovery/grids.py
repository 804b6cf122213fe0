"""Define the candidates for data on a grid: images, volumes and series.

The first candidate is a relaxed CNN: every convolution has a free path beside it whose weights
depend on position, and the evidence decides layer by layer how much of it is used. A plain CNN and
a fully connected network have a fixed structure.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from symrazor.data import Dataset
from symrazor.data.datasets import plural
from symrazor.discovery.candidates import DataKind, Family, Structure, UserGroup, Wording
from symrazor.discovery.groups import permutation_family, permutes_positions
from symrazor.layers.networks import conv_channels, convolutional, fully_connected
from symrazor.layers.point_group import point_group
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.relax import POINT_GROUPS, TRANSLATIONS, relax
from symrazor.symmetry.relaxation import relaxation

MIN_POSITIONS = 4
_IMAGES = Wording(
    "Translation-invariant: position does not matter.",
    "Not translation-invariant: position matters.",
)
_SERIES = Wording(
    "Invariant to shifts in time: it does not matter when something happens.",
    "Not invariant to shifts in time: it matters when something happens.",
    {r"\bon position\b": "on time"},
)


def relaxed_cnn(
    shape: Sequence[int], outputs: int, width: int | None, groups: Sequence[UserGroup]
) -> nn.Module:
    """Return the convolutional network with a free path beside every convolution."""
    return relax(convolutional(shape, outputs, width), torch.zeros(2, *shape), groups)


def channels_for(shape: Sequence[int], groups: Sequence[UserGroup]) -> int:
    """Return the channels of the first convolution: a multiple of the order of every group."""
    orders = (point_group(group).order for group in groups if group not in TRANSLATIONS)
    multiple = math.lcm(*orders)
    return multiple * math.ceil(conv_channels(shape) / multiple)


def grid_family(
    shape: Sequence[int], outputs: int, groups: Sequence[UserGroup] | None = None
) -> Family:
    """Return the three networks for grids of a shape.

    Raises:
        ValueError: a group that is unknown or does not fit the grid.
    """
    groups = tuple(dict.fromkeys([*TRANSLATIONS, *(groups or ())]))  # all layers are convolutional
    _check_names(groups)
    width = channels_for(shape, groups)
    with torch.random.fork_rng([]):
        _check_paths(relaxed_cnn(shape, outputs, width, groups), groups)
    structures = [
        Structure("relaxed", partial(relaxed_cnn, shape, outputs, width, groups), "a relaxed CNN"),
        Structure("convolutional", partial(convolutional, shape, outputs, width), "a plain CNN"),
        Structure(
            "fully connected",
            partial(fully_connected, shape, outputs),
            "a fully connected network",
        ),
    ]
    return Family(structures, "relaxed", "convolutional")


def _check_names(groups: Sequence[UserGroup]) -> None:
    known = (*TRANSLATIONS, *POINT_GROUPS)
    unknown = [group for group in groups if isinstance(group, str) and group not in known]
    if unknown:
        raise ValueError(
            f"Unknown group {unknown[0]!r}. Use {', '.join(known)}, or a file that ends with .json."
        )


def _check_paths(model: nn.Module, groups: Sequence[UserGroup]) -> None:
    """Raise ValueError for a group of which no layer has a path; the message gives the reason."""
    paths = [path for m in model.modules() if isinstance(m, Relaxed) for path in m.paths]
    for group in groups:
        name = group if group in TRANSLATIONS else point_group(group).name
        if name not in [path.group for path in paths]:
            reason = next(iter(relaxation(model).changed.values())).partition(f"no {name}: ")[2]
            raise ValueError(f"Group {name} does not fit the data: {reason}")


def _candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if permutes_positions(groups):
        return permutation_family(data, groups or ())
    shape = tuple(data.x.shape[1:])
    if math.prod(shape[1:]) < MIN_POSITIONS:
        raise ValueError(
            f"{data.source}: {plural(data.kind)} need at least {MIN_POSITIONS} positions, got "
            f"{list(shape[1:])}. Use --kind vector."
        )
    return grid_family(shape, data.outputs, groups)


IMAGE = DataKind("image", _candidates, _IMAGES)
VOLUME = DataKind("volume", _candidates, _IMAGES)
SERIES = DataKind("series", _candidates, _SERIES)
