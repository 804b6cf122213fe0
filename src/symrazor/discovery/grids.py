"""Define the candidates for images, volumes and series.

Convolutional networks with a global pool are invariant to shifts. Rivals are not: a relaxed
network, whose convolutions have free paths beside them; networks whose readout also sees the
position of every feature, or one coordinate of it; and a fully connected network.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from symrazor.discovery.question import Family, Structure, Symmetry, UserGroup
from symrazor.discovery.wording import describe_invariance, describe_shifts
from symrazor.layers import Relaxed
from symrazor.layers.plain import (
    Readout,
    Reads,
    conv_channels,
    convolutional,
    fully_connected,
    group_convolutional,
)
from symrazor.layers.point_group import point_group
from symrazor.symmetry.relax import POINT_GROUPS, TRANSLATIONS, relax
from symrazor.symmetry.replacement import relaxation

AXES = ("x", "y")
"""Axes of images. A network that reads only rows is invariant along x."""


def fully_connected_structure(shape: Sequence[int], outputs: int) -> Structure:
    """Return the candidate without any symmetry."""
    make = partial(fully_connected, shape, outputs)
    return Structure("fully connected", make, "a fully connected network")


def relaxed_cnn(
    shape: Sequence[int], outputs: int, width: int | None, groups: Sequence[UserGroup]
) -> nn.Module:
    """Return the convolutional network with a free path beside every convolution."""
    layers = _relaxed_layers(shape, outputs, width, groups)
    return nn.Sequential(*layers, Readout(_maps(layers, shape)[0], outputs))


def strict_cnn(
    shape: Sequence[int],
    outputs: int,
    width: int | None,
    groups: Sequence[UserGroup],
    reads: Reads = None,
) -> nn.Module:
    """Return the relaxed network without its free paths: every layer is equivariant.

    With `reads`, the readout also sees the position of every feature, or one coordinate of it.
    """
    layers = _relaxed_layers(shape, outputs, width, groups)
    channels, *positions = _maps(layers, shape)
    for index, layer in enumerate(layers):
        if isinstance(layer, Relaxed):
            layers[index] = Relaxed([path for path in layer.path_list if path.group is not None])
    return nn.Sequential(*layers, Readout(channels, outputs, positions, reads))


def _relaxed_layers(
    shape: Sequence[int], outputs: int, width: int | None, groups: Sequence[UserGroup]
) -> list[nn.Module]:
    """Return the relaxed convolutional network without its pool, flattening and linear layer."""
    model = relax(convolutional(shape, outputs, width), torch.zeros(2, *shape), groups)
    return list(model.children())[:-3]


@torch.no_grad()
def _maps(layers: Sequence[nn.Module], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the feature maps of one input."""
    return tuple(nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1:])


def channels_for(shape: Sequence[int], groups: Sequence[UserGroup]) -> int:
    """Return the channels of the first convolution: a multiple of the order of every group."""
    orders = (point_group(group).order for group in groups if group not in TRANSLATIONS)
    multiple = math.lcm(*orders)
    return multiple * math.ceil(conv_channels(shape) / multiple)


def grid_family(
    shape: Sequence[int], outputs: int, groups: Sequence[UserGroup] | None = None
) -> Family:
    """Return the three networks for grids of a shape; ValueError if a group does not fit."""
    groups = tuple(dict.fromkeys([*TRANSLATIONS, *(groups or ())]))  # all layers are convolutional
    known = (*TRANSLATIONS, *POINT_GROUPS)
    unknown = [group for group in groups if isinstance(group, str) and group not in known]
    if unknown:
        raise ValueError(
            f"Unknown group {unknown[0]!r}. Use {', '.join(known)}, or a file that ends with .json."
        )
    width = channels_for(shape, groups)
    relaxed = partial(relaxed_cnn, shape, outputs, width, groups)
    strict = partial(strict_cnn, shape, outputs, width, groups)
    with torch.random.fork_rng([]):
        _check_paths(
            relax(convolutional(shape, outputs, width), torch.zeros(2, *shape), groups), groups
        )
    structures = [
        Structure("relaxed", relaxed, "a relaxed CNN"),
        Structure("convolutional", strict, "a plain CNN"),
        Structure(
            "positional",
            partial(strict, reads="position"),
            "a CNN with a readout by position",
        ),
        fully_connected_structure(shape, outputs),
    ]
    rivals = ["relaxed", "positional", "fully connected"]
    symmetries = [Symmetry("translation", "convolutional", rivals)]
    given = [(point_group(group), group) for group in groups if group not in TRANSLATIONS]
    if not given:
        is_image = len(shape) == 3
        describe = describe_shifts if is_image else None
        if is_image:
            structures[2:2] = [_one_axis(strict, axis) for axis in AXES]
            symmetries = _with_axes(rivals)
        return Family(structures, "relaxed", "convolutional", symmetries, describe=describe)
    # Networks with a point group built in are translation-invariant as well. Only networks that
    # share this property tell what the group adds. More symmetry comes first: it is preferred
    # among networks that predict equally well.
    for fitting, group in sorted(given, key=lambda pair: pair[0].order):
        make = partial(group_convolutional, shape, outputs, group, width)
        structures.append(Structure(fitting.name, make, f"a CNN with {fitting.name} built in"))
        smaller = [other.name for other, _ in given if other.order < fitting.order]
        compared = ["convolutional", *smaller]
        symmetries = [Symmetry(fitting.name, fitting.name, compared), *symmetries]
    return Family(structures, "relaxed", "convolutional", symmetries, describe=describe_invariance)


def _one_axis(strict: Callable[..., nn.Module], axis: str) -> Structure:
    """Return the network that is invariant to shifts along one axis only."""
    reads = "row" if axis == "x" else "column"
    label = f"a CNN with a readout by {reads}"
    return Structure(f"{axis}-invariant", partial(strict, reads=reads), label)


def _with_axes(rivals: Sequence[str]) -> list[Symmetry]:
    """Return the symmetry under all shifts, and those along one axis, which follow from it."""
    names = [f"{axis}-invariant" for axis in AXES]
    axes = [
        Symmetry(
            f"{axis}-translation",
            name,
            [*rivals, *(other for other in names if other != name)],
            follows_from="translation",
        )
        for axis, name in zip(AXES, names, strict=True)
    ]
    return [Symmetry("translation", "convolutional", [*rivals, *names]), *axes]


def _check_paths(model: nn.Module, groups: Sequence[UserGroup]) -> None:
    """Raise ValueError for a group of which no layer has a path; the message gives the reason."""
    paths = [path for m in model.modules() if isinstance(m, Relaxed) for path in m.paths]
    for group in groups:
        name = group if group in TRANSLATIONS else point_group(group).name
        if name not in [path.group for path in paths]:
            reason = next(iter(relaxation(model).changed.values())).partition(f"no {name}: ")[2]
            raise ValueError(f"Group {name} does not fit the data: {reason}")
