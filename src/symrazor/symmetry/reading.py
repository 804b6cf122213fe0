"""Collect what a model learned: effective parameters, measured symmetry, fit and calibration.

A `Reading` prints as a table, converts to and from JSON, and shows itself in notebooks.
"""

import json
import math
import platform
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from symrazor.accelerate.processes import unwrap
from symrazor.core.parameters import weights
from symrazor.core.prior import Prior
from symrazor.core.validation import counted, json_ready
from symrazor.data.batches import Input
from symrazor.inference.evidence import Evidence, latest_razor
from symrazor.inference.razor import Razor
from symrazor.invariance.averaged_network import Augmented
from symrazor.layers.relaxed import Relaxed, spatial_layers
from symrazor.symmetry.breaking import breaking_modules, record_calls
from symrazor.symmetry.equivariance import Errors, layer_errors
from symrazor.symmetry.tables import reading_html
from symrazor.symmetry.verdict import (
    SMALL_ERROR,
    TRANSLATION,
    LayerReading,
    PathReading,
    evidence_sentences,
    layer_verdict,
    network_sentence,
    percent,
    percent_range,
    support,
)
from symrazor.symmetry.widths import Invariance, invariance_sentence, invariances_of

SCHEMA = 3
"""Version of the JSON document, see docs/how-to/read-a-result.md."""
READABLE_SCHEMAS = (2, SCHEMA)  # schema 2 has no invariances
TABLE_WIDTH = 110
"""Columns of the printed table."""


class WeightLayer(Protocol):
    """A module and the names of its weight tensors."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def tensors(self) -> Iterable[str]: ...  # noqa: D102


class Learned(Protocol):
    """A trained model with a prior: a `Razor` or a `Variational` network."""

    @property
    def model(self) -> nn.Module: ...  # noqa: D102

    @property
    def prior(self) -> Prior: ...  # noqa: D102

    @property
    def layers(self) -> Sequence[WeightLayer]: ...  # noqa: D102

    @property
    def at_bound(self) -> list[str]: ...  # noqa: D102

    @property
    def config(self) -> Any: ...  # noqa: D102


class Spread(NamedTuple):
    """Mean, smallest and largest of several values."""

    mean: float
    min: float
    max: float


@dataclass(frozen=True)
class Reading:
    """What a training run learned, ready for a table, a page or JSON.

    Args:
        verdict: the result in sentences.
        evidence: log evidence and its terms.
        train: description of the training data.
        test: metrics on held-out data, if there were any.
        layers: precision, effective parameters, share and measured error of every layer and path.
        equivariance_error: group -> measured relative error of the whole network.
        breaking: module name -> why it breaks the translation equivariance of the network, if the
            network is not equivariant.
        invariances: generator -> learned width of an `Augmented` network.
        config: options of the evidence.
        versions: versions of Python and torch.
        schema: version of the JSON document.
    """

    verdict: str
    evidence: dict[str, float]
    train: dict[str, float]
    test: dict[str, float]
    layers: list[LayerReading]
    equivariance_error: dict[str, float] = field(default_factory=dict)
    breaking: dict[str, str] = field(default_factory=dict)
    invariances: dict[str, Invariance] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def relative_effective_parameters(self) -> dict[str, Spread]:
        r"""Return the mean, min and max share of each path type over the relaxed layers.

        The share of path p in layer l is $r_{l,p} = \gamma_{l,p} / \sum_{p'} \gamma_{l,p'}$ (ELLA,
        Table 3); paths of the same type in one layer are added. Frozen paths are left out.
        """
        shares: dict[str, dict[str, float]] = {}
        for layer in self.layers:
            trained = [path for path in layer.paths if path.parameters]
            for path in trained if layer.relaxed else []:
                of_type = shares.setdefault(path.path, {})
                of_type[layer.name] = of_type.get(layer.name, 0.0) + path.share
        return {
            path_type: Spread(sum(r.values()) / len(r), min(r.values()), max(r.values()))
            for path_type, r in shares.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Convert to dictionaries, lists, numbers and strings; non-finite numbers become None."""
        shares = self.relative_effective_parameters()
        relative = {path_type: spread._asdict() for path_type, spread in shares.items()}
        document: dict[str, Any] = json_ready(
            {**asdict(self), "relative_effective_parameters": relative}
        )
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Reading":
        """Restore a reading from `to_dict` or from its JSON document, unless its schema is unknown.

        Numbers that were not finite, null in JSON, become nan.
        """
        schema = document.get("schema")
        if schema not in READABLE_SCHEMAS:
            raise ValueError(
                f"Cannot read a reading of schema {schema}: this version reads schemas "
                f"{', '.join(map(str, READABLE_SCHEMAS))}."
            )
        restored: Reading = _restore(cls, document)
        return restored

    def to_json(self) -> str:
        """Return the reading as a JSON document."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __repr__(self) -> str:
        headline = self.verdict.partition(". ")[0].rstrip(".")
        return f"Reading({headline!r}, {counted(len(self.layers), 'layer')})"

    def __str__(self) -> str:
        lines = layer_table(self.layers, TABLE_WIDTH)
        if any(layer.error is not None for layer in self.layers):
            only_shifts = all(layer.group in (None, TRANSLATION) for layer in self.layers)
            action = "shifted" if only_shifts else "transformed"
            lines.append(
                f"error: output change beyond equivariance when the input is {action}, relative to "
                "the output's spread"
            )
        shares = [
            f"{path_type} {percent(spread.mean)} ({percent_range(spread)})"
            for path_type, spread in self.relative_effective_parameters().items()
        ]
        if shares:
            lines.append(f"share over layers, mean (min to max): {', '.join(shares)}")
        if self.invariances:
            widths = ", ".join(f"{name} {entry}" for name, entry in self.invariances.items())
            lines.extend(textwrap.wrap(f"widths: {widths}", TABLE_WIDTH))
        if self.test:
            lines.append("test: " + ", ".join(f"{k} {v:.4f}" for k, v in self.test.items()))
        # A null character keeps the percent sign on the line of its number.
        glued = self.verdict.replace(" %", "\0%")
        verdict = textwrap.fill(glued, TABLE_WIDTH, break_on_hyphens=False)
        return "\n".join([*lines, verdict.replace("\0%", " %")])

    def _repr_html_(self) -> str:
        return reading_html(self)


def _restore(annotation: Any, value: Any) -> Any:
    """Invert `asdict` and `json_ready` for a value with a type annotation."""
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        field_names = [f.name for f in fields(annotation) if f.name in value]
        return annotation(**{name: _restore(hints[name], value[name]) for name in field_names})  # type: ignore[operator]
    if annotation is float and value is None:
        return math.nan
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (list, tuple):
        return origin(_restore(parts[0], part) for part in value)
    if origin is dict:
        return {key: _restore(parts[1], part) for key, part in value.items()}
    return value


def reading(
    model: nn.Module, x: Input, razor: Razor | None = None, evidence: Evidence | None = None
) -> Reading:
    """Return what a model learned: precisions, effective parameters, measured equivariance.

    Args:
        model: the network.
        x: some of its inputs, [n, c, *size], on which the equivariance errors are measured.
        razor: the razor of the model; by default the latest one made for it.
        evidence: the evidence to report; by default the latest one that the razor measured.
            `Razor.step` measures before it changes the precisions; call `razor.evidence(loader)` to
            report the current state.

    Raises:
        ValueError: if there is no razor or no evidence, or if they belong to another model.
    """
    model = unwrap(model)
    razor = latest_razor(model) if razor is None else razor
    if razor is None:
        raise ValueError(
            "This model has no Razor. Make one with razor = Razor(model, likelihood, n_data), keep "
            "a reference to it, or pass razor=."
        )
    if razor.model is not model:
        raise ValueError("The razor belongs to another model. Pass the razor of this model.")
    evidence = razor.latest if evidence is None else evidence
    if evidence is None:
        raise ValueError(
            "The razor has not measured an evidence yet. Call razor.evidence(loader) first."
        )
    return read(razor, evidence, {"n": razor.n_data}, x=x)


def read(
    razor: Learned,
    evidence: Evidence,
    train: dict[str, float] | None = None,
    test: dict[str, float] | None = None,
    x: Input | None = None,
    shape: Sequence[int] | None = None,
) -> Reading:
    """Build the reading of a trained model.

    Args:
        razor: the razor, or a variational network.
        evidence: its evidence.
        train: description of the training data.
        test: metrics on held-out data.
        x: inputs on which to measure equivariance errors; None to skip the measurement.
        shape: shape of one input, to convert widths to pixels; by default the shape of x.

    Raises:
        ValueError: if the evidence has no effective parameters for a weight of the model.
    """
    missing = sorted(set(weights(razor.model)) - set(evidence.effective_parameters))
    if missing:
        raise ValueError(
            f"The evidence belongs to another model: it has no effective parameters for {missing}."
        )
    errors = Errors({}, {}) if x is None else layer_errors(razor.model, x)
    layers = _layer_readings(razor, evidence.effective_parameters, errors.layers)
    breaking: dict[str, str] = {}
    if x is not None and errors.network.get(TRANSLATION, 0.0) >= SMALL_ERROR:
        breaking = breaking_modules(razor.model, record_calls(razor.model, x)[1])
    if shape is None:
        shape = x.shape[1:] if isinstance(x, Tensor) else ()
    averages = any(isinstance(module, Augmented) for module in razor.model.modules())
    widths = invariances_of(razor.model, shape) if averages else {}
    sentences = [
        layer_verdict(layers, network_sentence(errors.network, breaking)),
        invariance_sentence(widths) if widths else "",
        evidence_sentences(evidence, layers, razor.at_bound),
    ]
    return Reading(
        verdict=" ".join(sentence for sentence in sentences if sentence),
        evidence=evidence.to_dict(),
        train=train or {},
        test=test or {},
        layers=layers,
        equivariance_error=errors.network,
        breaking=breaking,
        invariances=widths,
        config={f.name: json_ready(getattr(razor.config, f.name)) for f in fields(razor.config)},
        versions={"python": platform.python_version(), "torch": torch.__version__},
    )


def _layer_readings(
    razor: Learned, gamma: dict[str, float], errors: dict[str, dict[str, float]]
) -> list[LayerReading]:
    """Return one entry per relaxed layer, with its paths, and per plain layer, with one path."""
    modules = dict(razor.model.named_modules())
    tensors = {
        name: {path: list[str]() for path in path_names(name, layer)}
        for name, layer in spatial_layers(razor.model).items()
    }
    spatial = list(tensors)
    for weight_layer in razor.layers:
        name = weight_layer.name
        if name not in modules:  # a single parameter, read with the module that holds it
            name = name.rpartition(".")[0]
        owner = next((o for o in spatial if not o or f"{name}.".startswith(f"{o}.")), name)
        paths = tensors.setdefault(owner, {owner: []})
        path = next(p for p in paths if not p or f"{name}.".startswith(f"{p}."))
        paths[path].extend(weight_layer.tensors)
    readings: list[LayerReading] = []
    for name in sorted(tensors, key=list(modules).index):
        layer, measured = modules[name], errors.get(name, {})
        path_readings = _path_readings(razor, modules, tensors[name], gamma)
        relaxed = isinstance(layer, Relaxed)
        supports = support(layer, [p.share for p in path_readings], measured) if relaxed else []
        readings.append(LayerReading(name, path_readings, measured, relaxed, supports))
    return readings


def path_names(name: str, layer: nn.Module) -> list[str]:
    """Return the module names of a layer's paths; a plain layer is its own path."""
    if not isinstance(layer, Relaxed):
        return [name]
    return [f"{name}.paths.{i}".lstrip(".") for i in range(len(layer.paths))]


def _path_readings(
    razor: Learned,
    modules: dict[str, nn.Module],
    tensors: dict[str, list[str]],
    gamma: dict[str, float],
) -> list[PathReading]:
    theta = weights(razor.model)
    effective = {path: sum(gamma[name] for name in names) for path, names in tensors.items()}
    total = sum(effective.values())
    return [
        PathReading(
            path=getattr(modules[path], "label", type(modules[path]).__name__),
            group=getattr(modules[path], "group", None),
            share=effective[path] / total if total > 0 else 1 / len(tensors),
            effective_parameters=effective[path],
            parameters=sum(theta[name].numel() for name in names),
            precision={
                name.removeprefix(f"{path}."): float(razor.prior.precision_of(name).detach().mean())
                for name in names
                if name in razor.prior.group_of  # a point estimate has no prior
            },
            strict=getattr(modules[path], "strict", True),
        )
        for path, names in tensors.items()
    ]


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
