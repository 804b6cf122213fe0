# Over 400 lines: the candidates for all kinds of data, so that they are read together.
"""Define the kinds of data that `discover` accepts, and the candidates for each of them.

A kind of data is one `DataKind`: its name, how it is recognised, which networks are compared, and
how the result is put in words. `register_kind` makes it known to `discover`. The built-in kinds:

- Images, volumes and series: a plain CNN with a global pool, which is invariant to shifts, and
  rivals that are not: a relaxed CNN, whose convolutions have free paths beside them with weights
  that depend on position; networks whose readout also sees the position of every feature, or one
  coordinate of it; and a fully connected network. The evidence decides layer by layer how much of a
  free path is used.
- Sets of points: layers that are equivariant to every permutation of the points, followed by a mean
  over the points, are permutation-invariant. The relaxed network has a free path beside each of
  these layers. Networks take sets as [n, features, points].
- Vectors have no geometry: the candidates differ in the number of hidden layers.
- For groups of the user, see `symrazor.discovery.user_groups`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.data import Dataset
from symrazor.data.shapes import plural, register_shape
from symrazor.discovery.headlines import (
    IMAGE_WORDING,
    SERIES_WORDING,
    SET_WORDING,
    VECTOR_WORDING,
    describe_invariance,
    describe_shifts,
)
from symrazor.discovery.question import (
    NEUTRAL,
    Family,
    Structure,
    Symmetry,
    UserGroup,
    Wording,
    fully_connected_structure,
)
from symrazor.discovery.user_groups import (
    are_matrices,
    free_path,
    matrix_family,
    permutation_family,
    permutes_positions,
)
from symrazor.groups import Group
from symrazor.layers import DeepSets, Relaxed, SetPool
from symrazor.layers.path import Path
from symrazor.layers.plain import (
    OrbitPooled,
    Readout,
    Reads,
    conv_channels,
    convolutional,
    group_convolutions,
    ordinary_convolutional,
    perceptron,
)
from symrazor.layers.point_group import point_group
from symrazor.layers.relaxed import relaxed_convolution, split_off
from symrazor.symmetry.breaking import CONVS
from symrazor.symmetry.relax import POINT_GROUPS, TRANSLATIONS, canonical_name, check_groups

MIN_POSITIONS = 4
SET_WIDTH = 32
IMAGE_CHANNELS = 16
"""Fewest channels of the first convolution on images."""
SMALL_IMAGE_SIDES, SMALL_IMAGE_KERNELS = range(9, 21), (5, 3)
"""Lengths of the shorter side of images on which a third convolution predicts worse than a larger
first filter: after two pools an object is a few positions wide."""
WIDER = 2
"""Channels of the final network, relative to those of the comparison."""
WIDE_PERCEPTRON = 256
"""Hidden units of each layer of the final network for vectors."""
MAX_COPIES = 8
"""Elements of a group over which a network that sees positions is averaged."""
AXES = ("x", "y")
"""Axes of images. A network that reads only rows is invariant along x."""
PERCEPTRONS = {
    "linear model": "a linear model",
    "one hidden layer": "a network with one hidden layer",
    "two hidden layers": "a network with two hidden layers",
}
"""Name -> label of the candidates for vectors, by number of hidden layers."""


Candidates = Callable[[Dataset, Sequence[UserGroup] | None], Family]


@dataclass(frozen=True)
class DataKind:
    """A kind of data that `discover` accepts.

    Args:
        name: singular noun; the value of `kind` and `--kind`.
        candidates: returns the networks to compare on a data set, given the groups of the user
            (None if the user named none).
        wording: headlines for the relaxed network.
        axes: axes of the array of inputs, such as "[n, channels, time]". Inputs are standardised
            along the second axis.
        recognise: returns whether inputs x with labels y are of this kind. None if `symrazor.data`
            recognises the kind, or if it always has to be named.
    """

    name: str
    candidates: Candidates
    wording: Wording = NEUTRAL
    axes: str = ""
    recognise: Callable[[Tensor, Tensor | None], bool] | None = None


_KINDS: dict[str, DataKind] = {}


def register_kind(kind: DataKind) -> None:
    """Make a kind of data known to `discover` and to `symrazor.data`; replaces one of this name."""
    _KINDS[kind.name] = kind
    if kind.axes:
        register_shape(kind.name, kind.axes, kind.recognise)


def registered_kinds() -> tuple[str, ...]:
    """Return the names of the kinds for which there are candidates."""
    return tuple(_KINDS)


def candidates_for(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    """Return the networks to compare; without groups, the default symmetries of the kind."""
    kind = _KINDS[data.kind]
    family = kind.candidates(data, groups)
    return family if family.wording else replace(family, wording=kind.wording)


# Images, volumes and series


def relaxed_cnn(
    shape: Sequence[int], outputs: int, width: int | None, groups: Sequence[UserGroup]
) -> nn.Module:
    """Return the convolutional network with a free path beside every convolution."""
    layers, _ = _relaxed_layers(shape, outputs, width, groups)
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
    layers, _ = _relaxed_layers(shape, outputs, width, groups)
    channels, *positions = _maps(layers, shape)
    for index, layer in enumerate(layers):
        if isinstance(layer, Relaxed):
            layers[index] = Relaxed([path for path in layer.path_list if path.group is not None])
    return nn.Sequential(*layers, Readout(channels, outputs, positions, reads))


@torch.no_grad()
def _relaxed_layers(
    shape: Sequence[int], outputs: int, width: int | None, groups: Sequence[UserGroup]
) -> tuple[list[nn.Module], dict[str, str]]:
    """Return the layers of `relax(convolutional(...))` before the pool.

    Also returns, for each group that does not fit a layer, its name and the reason.
    """
    layers = list(convolutional(shape, outputs, width, kernels_for(shape)).children())[:-3]
    x, missing = torch.zeros(1, *shape), dict[str, str]()
    extra_groups = [canonical_name(group) for group in groups if group not in TRANSLATIONS]
    for index, layer in enumerate(layers):
        size, x = x.shape[2:], layer(x)
        if isinstance(layer, CONVS):
            paths, reasons = split_off(layer, size, extra_groups, is_image=index == 0)
            layers[index] = relaxed = relaxed_convolution(layer, size, group_paths=paths)
            relaxed.scale_free_paths(math.inf)
            missing = reasons | missing
    return layers, missing


@torch.no_grad()
def _maps(layers: Sequence[nn.Module], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the feature maps of one input."""
    return tuple(nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1:])


def group_cnn(shape: Sequence[int], outputs: int, group: UserGroup, width: int | None) -> nn.Module:
    """Return group convolutions with the readout of the other networks."""
    layers, channels = group_convolutions(shape, group, width, kernels_for(shape))
    return nn.Sequential(*layers, Readout(channels, outputs, order=point_group(group).order))


def orbit_cnn(shape: Sequence[int], outputs: int, group: UserGroup, width: int | None) -> nn.Module:
    """Return a network that sees positions, averaged over a point group."""
    layers = list(convolutional(shape, outputs, width, kernels_for(shape)).children())[:-3]
    channels, *positions = _maps(layers, shape)
    readout = Readout(channels, outputs, positions, "position")
    return OrbitPooled(nn.Sequential(*layers), readout, group, shape[1:])


def channels_for(shape: Sequence[int], groups: Sequence[UserGroup]) -> int:
    """Return the channels of the first convolution: a multiple of the order of every group."""
    orders = (point_group(group).order for group in groups if group not in TRANSLATIONS)
    multiple, channels = math.lcm(*orders), conv_channels(shape)
    if len(shape) == 3:
        channels = max(channels, IMAGE_CHANNELS)
    return multiple * math.ceil(channels / multiple)


def kernels_for(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the filters; () for those of `convolutional`."""
    is_small_image = len(shape) == 3 and min(shape[1:]) in SMALL_IMAGE_SIDES
    return SMALL_IMAGE_KERNELS if is_small_image else ()


def grid_family(
    shape: Sequence[int],
    outputs: int,
    groups: Sequence[UserGroup] | None = None,
    by_axis: bool = True,
) -> Family:
    """Return the networks for grids of a shape; `by_axis` adds questions about single axes."""
    groups = tuple(dict.fromkeys([*TRANSLATIONS, *(groups or ())]))  # all layers are convolutional
    known = (*TRANSLATIONS, *POINT_GROUPS)
    unknown = [group for group in groups if isinstance(group, str) and group not in known]
    if unknown:
        raise ValueError(
            f"Unknown group {unknown[0]!r}. Use {', '.join(known)}, or a file that ends with .json."
        )
    width = channels_for(shape, groups)
    if len(groups) > 1:
        check_groups([canonical_name(group) for group in groups])
    relaxed = partial(relaxed_cnn, shape, outputs, width, groups)
    strict = partial(strict_cnn, shape, outputs, width, groups)
    with torch.random.fork_rng([]):
        _check_paths(*_relaxed_layers(shape, outputs, width, groups), groups)
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
    build = partial(ordinary_convolutional, shape, outputs, width)
    ordinary = Structure("ordinary", build, "an ordinary CNN")
    wide = partial(strict_cnn, shape, outputs, WIDER * width, groups)
    readouts: dict[str, tuple[Reads, str]] = {
        "convolutional": (None, "a plain CNN"),
        "x-invariant": ("row", "a CNN with a readout by row"),
        "y-invariant": ("column", "a CNN with a readout by column"),
        "positional": ("position", "a CNN with a readout by position"),
    }
    wider = {
        name: Structure(f"{name}, wider", partial(wide, reads=reads), f"{label}, twice as wide")
        for name, (reads, label) in readouts.items()
    }
    options: dict[str, Any] = {"ordinary": ordinary, "wider": wider}
    make_family = partial(Family, structures, "relaxed", "convolutional")
    rivals = ["relaxed", "positional", "fully connected"]
    symmetries = [Symmetry("translation", "convolutional", rivals)]
    point_groups = [(point_group(group), group) for group in groups if group not in TRANSLATIONS]
    if not point_groups:
        is_image = len(shape) == 3
        describe = describe_shifts if is_image else None
        if is_image and by_axis:
            structures[2:2], symmetries = [_one_axis(strict, a) for a in AXES], _with_axes(rivals)
            options["optional"] = [structure.name for structure in structures[2:4]]
        return make_family(symmetries=symmetries, describe=describe, **options)
    # Networks of the group convolutions are translation-invariant as well. Only networks that share
    # this property show what the group adds. Where position matters, the same question is asked
    # of networks that see positions. More symmetry comes first: it is preferred among networks that
    # predict equally well.
    for fitting, group in sorted(point_groups, key=lambda pair: pair[0].order):
        name = fitting.name
        make = partial(group_cnn, shape, outputs, group)
        structures.append(Structure(name, partial(make, width), f"a CNN with {name} built in"))
        wide_label = f"a CNN with {name} built in, twice as wide"
        wider[name] = Structure(f"{name}, wider", partial(make, WIDER * width), wide_label)
        smaller = [point.name for point, _ in point_groups if point.order < fitting.order]
        added = [Symmetry(name, name, ["convolutional", *smaller])]
        if len(shape) == 3 and fitting.exact and fitting.order <= MAX_COPIES:
            seeing = f"{name}, positional"
            make = partial(orbit_cnn, shape, outputs, group)
            label = f"a CNN with a readout by position, averaged over {name}"
            structures.append(Structure(seeing, partial(make, width), label))
            wide_label = f"{label}, twice as wide"
            wider[seeing] = Structure(f"{seeing}, wider", partial(make, WIDER * width), wide_label)
            seeing_smaller = [f"{point}, positional" for point in smaller]
            added.append(Symmetry(name, seeing, ["positional", *seeing_smaller]))
        symmetries = [*added, *symmetries]
    return make_family(symmetries=symmetries, describe=describe_invariance, **options)


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


def _check_paths(
    layers: Sequence[nn.Module], missing: Mapping[str, str], groups: Sequence[UserGroup]
) -> None:
    """Raise ValueError for a group of which no layer has a path; the message gives the reason."""
    paths = [path.group for m in layers if isinstance(m, Relaxed) for path in m.path_list]
    for group in groups:
        name = group if group in TRANSLATIONS else point_group(group).name
        if name not in paths:
            raise ValueError(f"Group {name} does not fit the data: {missing[name]}")


def _grid_candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if groups and permutes_positions(groups):
        return permutation_family(data, groups or ())
    shape = tuple(data.x.shape[1:])
    if math.prod(shape[1:]) < MIN_POSITIONS:
        raise ValueError(
            f"{data.source}: {plural(data.kind)} need at least {MIN_POSITIONS} positions, got "
            f"{list(shape[1:])}. Use --kind vector."
        )
    return grid_family(shape, data.outputs, groups)


# Sets and vectors


def deep_sets(features: int, points: int, outputs: int, free: bool = False) -> nn.Module:
    """Return a permutation-invariant network for sets [n, features, points].

    With `free`, each layer on points has a free path beside it, which breaks the symmetry.
    """
    layers: list[nn.Module] = []
    for channels in (features, SET_WIDTH):
        paths: list[Path] = [DeepSets(channels, SET_WIDTH, points)]
        if free:
            paths.append(free_path(channels, SET_WIDTH, (points,)))
        layers += [Relaxed(paths), nn.ReLU()]
    head = [nn.Linear(SET_WIDTH, SET_WIDTH), nn.ReLU(), nn.Linear(SET_WIDTH, outputs)]
    return nn.Sequential(*layers, SetPool("mean"), *head)


def _set_candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if groups is not None and set(groups) != {"permutation"}:
        return permutation_family(data, groups)
    points, features = data.x.shape[1:]
    make = partial(deep_sets, features, points, data.outputs)
    structures = [
        Structure("relaxed", partial(make, free=True), "a relaxed Deep Sets network"),
        Structure("shared", make, "a Deep Sets network"),
        fully_connected_structure((features, points), data.outputs),
    ]
    symmetries = (Symmetry("permutation", "shared", ("relaxed", "fully connected")),)
    return Family(structures, "relaxed", "shared", symmetries, permutes_points=True)


def _vector_candidates(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    if groups is not None and are_matrices(groups):
        return matrix_family(data, [group for group in groups if isinstance(group, Group)])
    if groups is not None:
        return permutation_family(data, groups)
    structures, wider = [], {}
    for hidden_layers, (name, label) in enumerate(PERCEPTRONS.items()):
        make = partial(perceptron, data.x.shape[1], data.outputs, hidden_layers)
        structures.append(Structure(name, make, label))
        if hidden_layers:
            wide = partial(make, width=WIDE_PERCEPTRON)
            wider[name] = Structure(f"{name}, wider", wide, f"{label}, four times as wide")
    linear, *rivals = PERCEPTRONS
    return Family(structures, symmetries=(Symmetry("linear", linear, rivals),), wider=wider)


register_kind(DataKind("image", _grid_candidates, IMAGE_WORDING))
register_kind(DataKind("volume", _grid_candidates, IMAGE_WORDING))
register_kind(DataKind("series", _grid_candidates, SERIES_WORDING))
register_kind(DataKind("set", _set_candidates, SET_WORDING))
register_kind(DataKind("vector", _vector_candidates, VECTOR_WORDING))
