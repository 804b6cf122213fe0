"""One layer as it was read; all of them as a table, and as a verdict in words."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed


@dataclass(frozen=True)
class Support:
    """What speaks for one group in one layer.

    Args:
        group: its name.
        outside: share of the layer's effective parameters in paths that break it.
        error: measured equivariance error, if any.
        supported: whether the layer keeps it.
        largest: whether it does, and keeps no candidate that contains it.
    """

    group: str
    outside: float
    error: float | None
    supported: bool
    largest: bool = False


def support(layer: Relaxed, shares: Sequence[float], errors: Mapping[str, float]) -> list[Support]:
    """All groups of a layer's paths, with what speaks for them.

    Args:
        layer: its paths.
        shares: of its effective parameters, path by path.
        errors: group -> measured error.
    """
    paths = [layer.path(i) for i in range(len(layer.paths))]
    by_name = {path.group: path for path in paths if path.group is not None}
    found: dict[str, Support] = {}
    for name, path in by_name.items():
        outside = sum(
            s for p, s in zip(paths, shares, strict=True) if not p.is_equivariant_under(path)
        )
        error = errors.get(name)
        kept = outside < FREE_SHARE if error is None else error < SMALL_ERROR
        found[name] = Support(name, outside, error, kept)
    largest = [
        name
        for name, one in found.items()
        if one.supported
        and not any(
            other.supported
            and by_name[bigger].is_equivariant_under(by_name[name])
            and not _same(by_name, name, bigger)
            for bigger, other in found.items()
        )
    ]
    return [
        Support(s.group, s.outside, s.error, s.supported, s.group in largest)
        for s in found.values()
    ]


def supported_groups(name: str, found: Sequence[Support]) -> str:
    """Which of several groups a layer supports, in words."""
    largest = [one for one in found if one.largest]
    others = [one.group for one in found if not one.supported]
    if not largest:
        return f"Layer {name} supports none of {listed([one.group for one in found])}."
    text = f"Layer {name} supports {listed([one.group for one in largest])}"
    contained = [one.group for one in found if one.supported and not one.largest]
    if contained:
        text += f", which contains {listed(contained)}"
    return f"{text}, not {listed(others)}." if others else f"{text}."


def listed(names: Sequence[str]) -> str:
    """Names as in "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _same(by_name: Mapping[str, Path], one: str, two: str) -> bool:
    """Whether two groups contain each other."""
    return one == two or by_name[one].is_equivariant_under(by_name[two])


FREE_SHARE = 0.05
"""A layer whose free paths hold less of its effective parameters counts as convolutional.

Free paths are never switched off entirely, since no precision is infinite: where position does not
matter they keep a few per cent, where it does a quarter and more.
"""

SMALL_ERROR = 0.05
"""An equivariance error below this counts as small: 1/400 of the variance of the output.

In five-block networks on embedded digits the layers of one that classifies them wherever they are
measured 0.3 to 5 %, all but one layer of one that must also say where they are 14 to 28 %.
"""

LARGE_ERROR = 0.25
"""From this error on a layer is not called nearly equivariant: 1/16 of the variance of the output.

Where the free paths hold no share, such an error is no finding: the data have not decided on
weights that are there all the same, as in a network that was hardly trained.
"""

TRANSLATION = "translation"
"""The group of convolutions, in terms of which networks of images are described."""

Kind = Literal["equivariant", "nearly", "unused freedom", "borders", "position", "unsettled"]


@dataclass(frozen=True)
class PathReading:
    """One path of a layer: what the evidence gave it.

    Args:
        path: its type.
        group: the group it is equivariant to, None for a free path or a plain layer.
        share: of the layer's effective parameters.
        effective_parameters: how many of its parameters the data determined.
        parameters: how many it has, without frozen ones.
        precision: prior precision of each tensor, the mean where weights have their own.
        strict: whether it is exactly equivariant, or only up to borders and strides.
    """

    path: str
    group: str | None
    share: float
    effective_parameters: float
    parameters: int
    precision: dict[str, float]
    strict: bool = True


@dataclass(frozen=True)
class LayerReading:
    """One layer; a plain layer has one path.

    Args:
        name: of the module.
        paths: in order.
        equivariance_error: group -> measured relative error, where it was measured.
        relaxed: whether it is a sum of paths.
        symmetry: what speaks for each of its groups, if it has several paths.
    """

    name: str
    paths: list[PathReading]
    equivariance_error: dict[str, float] = field(default_factory=dict)
    relaxed: bool = False
    symmetry: list[Support] = field(default_factory=list)

    @property
    def effective_parameters(self) -> float:
        """Of all paths together."""
        return sum(path.effective_parameters for path in self.paths)

    @property
    def free_share(self) -> float:
        """Share of the effective parameters that sits in paths without a group."""
        return sum(path.share for path in self.paths if path.group is None)

    @property
    def group(self) -> str | None:
        """The group it is described by: translations, else the largest supported, else the best."""
        if not self.equivariance_error or TRANSLATION in self.equivariance_error:
            return TRANSLATION if self.equivariance_error else None
        largest = [one.group for one in self.symmetry if one.largest]
        return min(largest or self.equivariance_error, key=lambda g: self.equivariance_error[g])

    @property
    def error(self) -> float | None:
        """The measured error under its group, if any."""
        return None if self.group is None else self.equivariance_error[self.group]

    @property
    def kind(self) -> Kind | None:
        """What the layer turned out to be, by what it does and by what it is made of.

        | error | free share | kind |
        |---|---|---|
        | small | small | equivariant |
        | small | larger | unused freedom: free parameters that hardly break the symmetry |
        | below 100 % | small, paths not strict | borders: convolutional up to borders and strides |
        | below `LARGE_ERROR` | small | nearly: equivariant but for a little |
        | larger | small | unsettled: not equivariant, by weights that no data ask for |
        | larger | larger | position: the layer uses it |
        """
        if self.error is None:
            return None
        convolutional = self.free_share < FREE_SHARE
        if self.error < SMALL_ERROR:
            return "equivariant" if convolutional else "unused freedom"
        if not convolutional:
            return "position"
        if not all(path.strict for path in self.paths) and self.error < 1:
            return "borders"
        return "nearly" if self.error < LARGE_ERROR else "unsettled"


def percent(value: float) -> str:
    """A fraction in words: two digits, "0 %" only if it is 0."""
    if not math.isfinite(value):
        return "infinite"
    if 0 < value < 1e-4:
        return "below 0.01 %"
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.2g} %"


def words(layers: Sequence[LayerReading], network: float | None) -> str:
    """Which layers keep a symmetry and which break it, and how far the network is off."""
    measured = [layer for layer in layers if layer.kind is not None]
    if not measured:
        return ""
    kinds = sorted({layer.kind for layer in measured if layer.kind}, key=_PHRASES.index)
    text = "; ".join(_phrase(kind, measured) for kind in kinds)
    text = f"{text[0].upper()}{text[1:]}."
    for layer in layers:
        if len(layer.symmetry) > 1:
            text += f" {supported_groups(layer.name or '(the model)', layer.symmetry)}"
    if network is not None:
        more = network >= max(
            [LARGE_ERROR, *(2 * layer.error for layer in measured if layer.error)]
        )
        why = ", more than that of its layers: small ones and subsampling add up" if more else ""
        text += f" Whole network: error {percent(network)}{why}."
    return text


_PHRASES: list[Kind] = [
    "equivariant",
    "nearly",
    "unused freedom",
    "borders",
    "position",
    "unsettled",
]


def _phrase(kind: Kind, layers: Sequence[LayerReading]) -> str:
    of_kind = [layer for layer in layers if layer.kind == kind]
    one = len(of_kind) == 1
    names = _names(kind, layers)
    be, their = ("is", "its") if one else ("are", "their")
    group = " or ".join(dict.fromkeys(layer.group or "" for layer in of_kind))
    errors = [layer.error for layer in of_kind if layer.error is not None]
    largest = max(errors)
    error = percent(largest)
    exact = one or not largest or "below" in error
    error = f"error {error}" if exact else f"error at most {error}"
    free = f"{as_range([layer.free_share for layer in of_kind])} of {their} effective parameters"
    match kind:
        case "equivariant":
            return f"{names} {be} {group}-equivariant ({error})"
        case "unused freedom":
            return f"{names} {be} nearly {group}-equivariant, with {free} in free paths ({error})"
        case "nearly":
            return f"{names} {be} nearly {group}-equivariant ({error})"
        case "unsettled":
            return f"{names} {be} not settled: not {group}-equivariant ({error}), with {free} free"
        case "borders":
            return f"{names} {be} convolutional up to borders and strides ({error})"
        case "position":
            does = f"{'uses' if one else 'use'} position"
            if group != TRANSLATION:
                does = f"{be} not {group}-equivariant"
            return f"{names} {does} ({free}, error {as_range(errors)})"


def _names(kind: Kind, layers: Sequence[LayerReading]) -> str:
    """Names of the layers of a kind; three or more that follow each other as a range."""
    count = sum(layer.kind == kind for layer in layers)
    runs = []
    for found, run in groupby(layers, key=lambda layer: layer.kind):
        names = [layer.name or "(the model)" for layer in run]
        if found == kind:
            runs += [f"{names[0]} to {names[-1]}"] if len(names) > 2 else names
    listed = ", ".join(runs[:-1]) + (" and " if len(runs) > 1 else "") + runs[-1]
    return f"layer{'' if count == 1 else 's'} {listed}"


def as_range(values: Sequence[float]) -> str:
    """The smallest and the largest of some fractions."""
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def table(layers: Sequence[LayerReading], width: int) -> list[str]:
    """One line per path, the error beside the first of a layer; precisions wrap at the width."""
    short = [n if len(n) <= 24 else f"...{n[-21:]}" for n in (layer.name for layer in layers)]
    names = max([5, *map(len, short)])
    paths = max([10, *(len(path.path) for layer in layers for path in layer.paths)])
    errors = 15 if any(layer.error is not None for layer in layers) else 0
    head = f"{'layer':<{names}}  {'path':<{paths}}  share  effective         of"
    head += f"{'error' if errors else '':>{errors}}   "
    lines = [head + "precision"]
    for layer, name in zip(layers, short, strict=True):
        for number, path in enumerate(layer.paths):
            error = _error(layer, number)
            row = f"{name:<{names}}  {path.path:<{paths}}{100 * path.share:>5.0f} %"
            row += f"{path.effective_parameters:>11.1f}{path.parameters:>11,}{error:>{errors}}   "
            for text in textwrap.wrap(_precisions(path), max(20, width - len(head))):
                lines.append(row + text)
                row = " " * len(head)
    return lines


def _error(layer: LayerReading, number: int) -> str:
    """Beside a path the error of its group; that of the layer beside the first other one."""
    errors = layer.equivariance_error
    own = [path.group if path.group in errors else layer.group for path in layer.paths]
    group = own[number]
    return "" if group is None or group in own[:number] else percent(errors[group])


def _precisions(path: PathReading) -> str:
    """One number if all tensors have the same."""
    values = {name: f"{value:.3g}" for name, value in path.precision.items()}
    if not values:
        return "frozen"
    if len(values) > 1 and len(set(values.values())) == 1:
        return next(iter(values.values()))
    return ", ".join(f"{name} {value}" for name, value in values.items())
