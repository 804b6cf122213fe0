r"""Turn the measurements of layers into a table and into verdict sentences.

A layer is classified by its measured equivariance error and by the share of its effective
parameters that is in free paths (`LayerReading.kind`). All thresholds of this classification are in
this module.

A relaxed layer may hold a path for each of several groups. A path that is equivariant to a group is
also equivariant to its subgroups, so the sum of paths is equivariant to H up to the paths whose
group does not contain H. The layer supports H if its measured error under H is small or, where no
error was measured, if these paths hold a small share of its effective parameters. Verdicts name the
largest supported groups.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, get_args

from symrazor.layers.relaxed import Relaxed

FREE_SHARE = 0.05
"""Share of a layer's effective parameters in free paths below which the layer counts as symmetric.

Free paths never reach a share of zero, because no prior precision is infinite. They keep a few per
cent where the data are symmetric, and a quarter or more where they are not.
"""

SMALL_ERROR = 0.05
"""Equivariance error below which a layer counts as equivariant: 1/400 of the output variance.

In five-block networks on embedded digits, layers measured 0.3 to 5 % where the label is independent
of the position, and all but one layer 14 to 28 % where the label includes the position.
"""

LARGE_ERROR = 0.25
"""Equivariance error above which a layer is not approximately equivariant: 1/16 of the variance.

If free paths hold no share, an error this large is not evidence against the symmetry: the data do
not determine the weights that cause it, as in a network after little training.
"""

TRANSLATION = "translation"
"""Name of the translation group, which describes the layers of image networks."""

Kind = Literal["equivariant", "approximate", "unused freedom", "borders", "broken", "undetermined"]


@dataclass(frozen=True)
class Support:
    """The support of one layer for one group.

    Args:
        group: name of the group.
        outside: share of the layer's effective parameters in paths that break the symmetry.
        error: measured equivariance error; None if not measured.
        supported: whether the layer has the symmetry.
        largest: whether the group is supported and no supported candidate contains it.
    """

    group: str
    outside: float
    error: float | None
    supported: bool
    largest: bool = False


def support(layer: Relaxed, shares: Sequence[float], errors: Mapping[str, float]) -> list[Support]:
    """Return the support for the group of every path of a layer.

    Args:
        layer: the relaxed layer.
        shares: share of the layer's effective parameters, for each path.
        errors: group name -> measured equivariance error.
    """
    paths = [layer.path(i) for i in range(len(layer.paths))]
    path_of = {path.group: path for path in paths if path.group is not None}
    supports: dict[str, Support] = {}
    for name, path in path_of.items():
        outside = sum(
            s for p, s in zip(paths, shares, strict=True) if not p.is_equivariant_under(path)
        )
        error = errors.get(name)
        supported = outside < FREE_SHARE if error is None else error < SMALL_ERROR
        supports[name] = Support(name, outside, error, supported)

    def strictly_contains(larger: str, smaller: str) -> bool:
        one, other = path_of[larger], path_of[smaller]
        return one.is_equivariant_under(other) and not other.is_equivariant_under(one)

    supported_names = [name for name, entry in supports.items() if entry.supported]
    return [
        replace(
            entry,
            largest=entry.supported
            and not any(strictly_contains(other, name) for other in supported_names),
        )
        for name, entry in supports.items()
    ]


def supported_groups(layer: str, supports: Sequence[Support]) -> str:
    """Return a sentence that names the groups to which a layer is equivariant."""
    largest = [entry.group for entry in supports if entry.largest]
    contained = [entry.group for entry in supports if entry.supported and not entry.largest]
    unsupported = [entry.group for entry in supports if not entry.supported]
    if not largest:
        return f"Layer {layer} is equivariant to none of {join_names(unsupported)}."
    text = f"Layer {layer} is equivariant to {join_names(largest)}"
    if contained:
        text += f" (which contains {join_names(contained)})"
    return f"{text} but not to {join_names(unsupported)}." if unsupported else f"{text}."


def join_names(names: Sequence[str], conjunction: str = "and") -> str:
    """Join names as in "a, b and c"."""
    return f" {conjunction} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def capitalize(text: str) -> str:
    """Return the text with a capital first letter; the other letters are unchanged."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class PathReading:
    """What the evidence determined about one path of a layer.

    Args:
        path: type of the path.
        group: group to which the path is equivariant; None for a free path or a plain layer.
        share: share of the layer's effective parameters.
        effective_parameters: number of parameters that the data determine.
        parameters: number of trainable parameters.
        precision: prior precision of each tensor; the mean if every weight has its own precision.
        strict: whether the path is exactly equivariant, not only up to borders and strides.
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
    """What the evidence determined about one layer; a plain layer has one path.

    Args:
        name: name of the module.
        paths: its paths, in order.
        equivariance_error: group -> measured relative error, where measured.
        relaxed: whether the layer is a sum of paths.
        symmetry: support for each of its groups, if the layer is relaxed.
    """

    name: str
    paths: list[PathReading]
    equivariance_error: dict[str, float] = field(default_factory=dict)
    relaxed: bool = False
    symmetry: list[Support] = field(default_factory=list)

    @property
    def effective_parameters(self) -> float:
        """Return the number of effective parameters of all paths."""
        return sum(path.effective_parameters for path in self.paths)

    @property
    def free_share(self) -> float:
        """Return the share of the effective parameters that is in paths without a group."""
        return sum(path.share for path in self.paths if path.group is None)

    @property
    def group(self) -> str | None:
        """Return the group that describes the layer, None if no error was measured.

        Translations come first, then the largest supported group, then the group with the smallest
        error.
        """
        if not self.equivariance_error or TRANSLATION in self.equivariance_error:
            return TRANSLATION if self.equivariance_error else None
        largest = [entry.group for entry in self.symmetry if entry.largest]
        return min(largest or self.equivariance_error, key=lambda g: self.equivariance_error[g])

    @property
    def error(self) -> float | None:
        """Return the measured error under `group`."""
        return None if self.group is None else self.equivariance_error[self.group]

    @property
    def kind(self) -> Kind | None:
        """Classify the layer by its equivariance error and the share of its free paths.

        | error | free share | kind |
        |---|---|---|
        | below `SMALL_ERROR` | small | equivariant |
        | below `SMALL_ERROR` | large | unused freedom: free parameters that do not break it |
        | below 100 % | small, paths not strict | borders: equivariant up to borders and strides |
        | below `LARGE_ERROR` | small | approximate: approximately equivariant |
        | larger | small | undetermined: weights that the data do not determine break the symmetry |
        | larger | large | broken: the data break the symmetry |
        """
        if self.error is None:
            return None
        few_free = self.free_share < FREE_SHARE
        if self.error < SMALL_ERROR:
            return "equivariant" if few_free else "unused freedom"
        if not few_free:
            return "broken"
        if not all(path.strict for path in self.paths) and self.error < 1:
            return "borders"
        return "approximate" if self.error < LARGE_ERROR else "undetermined"


def percent(value: float) -> str:
    """Format a fraction as a percentage with two digits; "0 %" only for an exact 0."""
    if not math.isfinite(value):
        return "infinite"
    if 0 < value < 1e-4:
        return "below 0.01 %"
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.2g} %"


def percent_range(values: Sequence[float]) -> str:
    """Format the smallest and the largest of several fractions, as in "2 to 5 %"."""
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def layer_verdict(layers: Sequence[LayerReading], network_error: float | None) -> str:
    """Return sentences that say which layers have the symmetry and which break it.

    Args:
        layers: the layers; those without a measured error are left out.
        network_error: equivariance error of the whole network, if measured.
    """
    measured = [layer for layer in layers if layer.kind is not None]
    if not measured:
        return ""
    present = {layer.kind for layer in measured}
    clauses = [_clause(kind, measured) for kind in get_args(Kind) if kind in present]
    text = f"{capitalize('; '.join(clauses))}."
    for layer in layers:
        if len(layer.symmetry) > 1:
            text += f" {supported_groups(layer.name or '(the model)', layer.symmetry)}"
    if network_error is not None:
        errors = [2 * layer.error for layer in measured if layer.error]
        reason = (
            ", larger than that of its layers because layer errors and subsampling add up"
            if network_error >= max([LARGE_ERROR, *errors])
            else ""
        )
        text += f" Whole network: equivariance error {percent(network_error)}{reason}."
    return text


def _clause(kind: Kind, layers: Sequence[LayerReading]) -> str:
    """Return the clause of the verdict about the layers of one kind."""
    of_kind = [layer for layer in layers if layer.kind == kind]
    single = len(of_kind) == 1
    names = _layer_names(kind, layers)
    be, their = ("is", "its") if single else ("are", "their")
    groups = " or ".join(dict.fromkeys(layer.group or "" for layer in of_kind))
    errors = [layer.error for layer in of_kind if layer.error is not None]
    largest = max(errors)
    exact = single or not largest or "below" in percent(largest)
    error = f"error {'' if exact else 'at most '}{percent(largest)}"
    free_share = percent_range([layer.free_share for layer in of_kind])
    free = f"free paths hold {free_share} of {their} effective parameters"
    match kind:
        case "equivariant":
            return f"{names} {be} {groups}-equivariant ({error})"
        case "approximate":
            return f"{names} {be} approximately {groups}-equivariant ({error})"
        case "unused freedom":
            return f"{names} {be} {groups}-equivariant ({error}), although {free}"
        case "borders":
            return f"{names} {be} {groups}-equivariant up to borders and strides ({error})"
        case "broken":
            property_ = f"{'depends' if single else 'depend'} on position"
            if groups != TRANSLATION:
                property_ = f"{be} not {groups}-equivariant"
            return f"{names} {property_} ({free}, error {percent_range(errors)})"
        case "undetermined":
            question = f"whether {names} {be} {groups}-equivariant"
            return f"the data do not determine {question} ({error}, {free})"


def _layer_names(kind: Kind, layers: Sequence[LayerReading]) -> str:
    """Return the names of the layers of a kind, with runs of three or more as ranges."""
    count = sum(layer.kind == kind for layer in layers)
    parts: list[str] = []
    for run_kind, run in groupby(layers, key=lambda layer: layer.kind):
        names = [layer.name or "(the model)" for layer in run]
        if run_kind == kind:
            parts += [f"{names[0]} to {names[-1]}"] if len(names) > 2 else names
    return f"layer{'' if count == 1 else 's'} {join_names(parts)}"


def layer_table(layers: Sequence[LayerReading], width: int) -> list[str]:
    """Return the lines of a table with one row per path; precisions wrap at the width."""
    short = [n if len(n) <= 24 else f"...{n[-21:]}" for n in (layer.name for layer in layers)]
    name_width = max([5, *map(len, short)])
    path_width = max([10, *(len(path.path) for layer in layers for path in layer.paths)])
    error_width = 15 if any(layer.error is not None for layer in layers) else 0
    head = f"{'layer':<{name_width}}  {'path':<{path_width}}  share  effective         of"
    head += f"{'error' if error_width else '':>{error_width}}   "
    lines = [head + "precision"]
    for layer, name in zip(layers, short, strict=True):
        for number, path in enumerate(layer.paths):
            error = _error_cell(layer, number)
            row = f"{name:<{name_width}}  {path.path:<{path_width}}{100 * path.share:>5.0f} %"
            row += f"{path.effective_parameters:>11.1f}{path.parameters:>11,}"
            row += f"{error:>{error_width}}   "
            for text in textwrap.wrap(_precision_cell(path), max(20, width - len(head))):
                lines.append(row + text)
                row = " " * len(head)
    return lines


def _error_cell(layer: LayerReading, number: int) -> str:
    """Return the error under the path's group, or under the layer's; each group only once."""
    errors = layer.equivariance_error
    groups = [path.group if path.group in errors else layer.group for path in layer.paths]
    group = groups[number]
    return "" if group is None or group in groups[:number] else percent(errors[group])


def _precision_cell(path: PathReading) -> str:
    """Return the precision of each tensor, or a single number if all are equal."""
    values = {name: f"{value:.3g}" for name, value in path.precision.items()}
    if not values:
        return "frozen"
    if len(values) > 1 and len(set(values.values())) == 1:
        return next(iter(values.values()))
    return ", ".join(f"{name} {value}" for name, value in values.items())
