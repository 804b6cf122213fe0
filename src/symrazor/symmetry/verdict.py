r"""Turn the measured symmetry of layers, and the evidence, into verdict sentences.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, get_args

from symrazor.core.validation import join_names
from symrazor.curvature.estimate import Method
from symrazor.inference.evidence import Evidence
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

    The share of each path is its part of the layer's effective parameters; errors are measured
    equivariance errors by group.
    """
    paths = [layer.path(i) for i in range(len(layer.paths))]
    path_of = {path.group: path for path in paths if path.group is not None}
    outside = {
        name: sum(s for p, s in zip(paths, shares, strict=True) if not p.is_equivariant_under(path))
        for name, path in path_of.items()
    }
    supported = [
        name
        for name in path_of
        if (errors[name] < SMALL_ERROR if name in errors else outside[name] < FREE_SHARE)
    ]

    def strictly_contains(larger: str, smaller: str) -> bool:
        large, small = path_of[larger], path_of[smaller]
        return large.is_equivariant_under(small) and not small.is_equivariant_under(large)

    largest = [n for n in supported if not any(strictly_contains(other, n) for other in supported)]
    return [
        Support(name, outside[name], errors.get(name), name in supported, name in largest)
        for name in path_of
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


def network_sentence(
    errors: Mapping[str, float | None], breaking: Mapping[str, str] | None = None
) -> str:
    """Return sentences that say under which groups the whole network is equivariant.

    Args:
        errors: group -> measured error of the whole network; None if it was not measured.
        breaking: module name -> why it breaks translation equivariance.
    """
    measured = {group: error for group, error in errors.items() if error is not None}
    kept = [f"{g}-equivariant (error {percent(e)})" for g, e in measured.items() if e < SMALL_ERROR]
    lost = [
        f"not {g}-equivariant (error {percent(e)})" for g, e in measured.items() if e >= SMALL_ERROR
    ]
    if not measured:
        return ""
    text = f"The whole network is {join_names([*kept, *lost])}."
    if breaking and measured.get(TRANSLATION, 0.0) >= SMALL_ERROR:
        verb = "breaks" if len(set(breaking.values())) == 1 else "break"
        text += (
            f" Shift equivariance is lost between layers: {describe_breaking(breaking)} {verb} it. "
            "symrazor.make_equivariant(model, x) replaces such modules."
        )
    return text


def describe_breaking(reasons: Mapping[str, str]) -> str:
    """Return reasons with their modules, as in "pooling with a stride (2, 5)"."""
    modules: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        modules.setdefault(reason, []).append(name or "(root)")
    return join_names([f"{reason} ({', '.join(names)})" for reason, names in modules.items()])


def layer_verdict(layers: Sequence[LayerReading], network: str | None = None) -> str:
    """Return sentences that say which layers have the symmetry and which break it.

    Layers without a measured error are left out. The sentences on the whole network come first.
    """
    measured = [layer for layer in layers if layer.kind is not None]
    if not measured:
        return ""
    present = {layer.kind for layer in measured}
    clauses = [_clause(kind, measured) for kind in get_args(Kind) if kind in present]
    text = f"{network} " if network else ""
    text += f"{capitalize('; '.join(clauses))}."
    for layer in layers:
        if len(layer.symmetry) > 1:
            text += f" {supported_groups(layer.name or '(the model)', layer.symmetry)}"
    return text


def _clause(kind: Kind, layers: Sequence[LayerReading]) -> str:
    of_kind = [layer for layer in layers if layer.kind == kind]
    is_single = len(of_kind) == 1
    names = _layer_names(kind, layers)
    be, their = ("is", "its") if is_single else ("are", "their")
    groups = " or ".join(dict.fromkeys(layer.group or "" for layer in of_kind))
    errors = [layer.error for layer in of_kind if layer.error is not None]
    largest = max(errors)
    exact = is_single or not largest or "below" in percent(largest)
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
            property_ = f"{'depends' if is_single else 'depend'} on position"
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


def evidence_sentences(
    evidence: Evidence, layers: Sequence[LayerReading], at_bound: Sequence[str]
) -> str:
    """Return log evidence, fit, complexity and the number of effective parameters."""
    total = sum(path.parameters for layer in layers for path in layer.paths)
    effective = sum(layer.effective_parameters for layer in layers)
    text = (
        f"Log evidence {float(evidence.log_evidence):,.1f} ({float(evidence.per_datum):.3f} per "
        f"data point): fit {float(evidence.log_likelihood):,.1f}, complexity "
        f"{float(evidence.complexity):,.1f}. Effective parameters: {effective:,.0f} of {total:,}."
    )
    if evidence.structure == Method().description:
        text += f" Curvature: {evidence.structure}, error unknown."
    elif evidence.structure:
        text += f" Curvature: {evidence.structure}{_gap_in_words(evidence)}."
    if at_bound:
        text += f" Prior precision at its bound: {', '.join(at_bound)}."
    return text


def _gap_in_words(evidence: Evidence) -> str:
    gap = evidence.gap
    if gap is None or gap < 0.05:
        return ""
    if "bound" in evidence.structure:
        return f" ({gap:,.1f} nats above a second lower bound)"
    return f" (at most {gap:,.1f} nats too low)"
