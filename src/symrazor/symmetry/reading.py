"""Collect what a model learned: effective parameters, measured symmetry, fit and calibration.

A `Reading` prints as a table, converts to and from JSON, and shows itself in notebooks.
"""

import html
import json
import math
import platform
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import (
    Any,
    NamedTuple,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor, nn

from symrazor.accelerate.processes import unwrap
from symrazor.core.evidence import Evidence
from symrazor.core.parameters import weights
from symrazor.core.prior import Prior
from symrazor.core.validation import json_ready
from symrazor.data.batches import Input
from symrazor.inference.razor import Razor
from symrazor.inference.razor_config import latest_razor
from symrazor.layers.relaxed import Relaxed, spatial_layers
from symrazor.report.page import verdict_html
from symrazor.symmetry.equivariance import Errors, layer_errors
from symrazor.symmetry.invariances import (
    Invariance,
    invariance_sentence,
    invariances_of,
)
from symrazor.symmetry.verdict import (
    TRANSLATION,
    LayerReading,
    PathReading,
    layer_table,
    layer_verdict,
    percent,
    percent_range,
    support,
)

SCHEMA = 3
"""Version of the JSON document, see docs/how-to/read-a-result.md."""
READABLE_SCHEMAS = (2, SCHEMA)  # schema 2 has no invariances
TABLE_WIDTH = 110
"""Columns of the printed table."""
EQUIVARIANT_COLOUR, FREE_COLOUR, PLAIN_COLOUR = "#2a8f87", "#cf6347", "#8a867c"
"""Colours of notebook bars, readable on white and on black."""


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
        """Restore a reading from `to_dict` or from its JSON document.

        Numbers that were not finite, null in JSON, become nan.

        Raises:
            ValueError: if the document has an unknown schema.
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
        return (
            f"Reading({self.verdict.partition('. ')[0].rstrip('.')!r}, {len(self.layers)} layers)"
        )

    def __str__(self) -> str:
        """Return a table for the terminal, followed by the verdict."""
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
        """Return what a notebook shows."""
        return reading_html(self)


def _restore(annotation: Any, value: Any) -> Any:
    """Invert `asdict` and `json_ready` for a value with a type annotation."""
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        known = [f.name for f in fields(annotation) if f.name in value]
        return annotation(**{name: _restore(hints[name], value[name]) for name in known})  # type: ignore[operator]
    if annotation is float and value is None:
        return math.nan
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is list:
        return [_restore(parts[0], part) for part in value]
    if origin is tuple:
        return tuple(_restore(parts[0], part) for part in value)
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
    if shape is None:
        shape = x.shape[1:] if isinstance(x, Tensor) else ()
    widths = invariances_of(razor.model, shape)
    sentences = [
        _symmetry_sentences(layers, errors.network),
        invariance_sentence(widths),
        _evidence_sentences(razor, evidence, layers),
    ]
    return Reading(
        verdict=" ".join(sentence for sentence in sentences if sentence),
        evidence=evidence.to_dict(),
        train=train or {},
        test=test or {},
        layers=layers,
        equivariance_error=errors.network,
        invariances=widths,
        config={f.name: json_ready(getattr(razor.config, f.name)) for f in fields(razor.config)},
        versions={"python": platform.python_version(), "torch": torch.__version__},
    )


def _symmetry_sentences(layers: Sequence[LayerReading], network: Mapping[str, float]) -> str:
    """Return the verdict on the layers, with the error of the network under every group."""
    described = [layer.group for layer in layers if layer.group in network]
    main = network.get(TRANSLATION, network[described[0]] if described else None)  # type: ignore[index]
    text = layer_verdict(layers, main)
    others = [
        f"{percent(network[group])} under {group}" for group in network if group != TRANSLATION
    ]
    if TRANSLATION in network and others:
        text = f"{text.removesuffix('.')}; {', '.join(others)}."
    return text


def _evidence_sentences(razor: Learned, evidence: Evidence, layers: Sequence[LayerReading]) -> str:
    """Return log evidence, fit, complexity and the number of effective parameters."""
    total = sum(path.parameters for layer in layers for path in layer.paths)
    effective = sum(layer.effective_parameters for layer in layers)
    text = (
        f"Log evidence {float(evidence.log_evidence):,.1f} ({float(evidence.per_datum):.3f} per "
        f"data point): fit {float(evidence.log_likelihood):,.1f}, complexity "
        f"{float(evidence.complexity):,.1f}. Effective parameters: {effective:,.0f} of {total:,}."
    )
    if razor.at_bound:
        text += f" Prior precision at its bound: {', '.join(razor.at_bound)}."
    return text


def _layer_readings(
    razor: Learned, gamma: dict[str, float], errors: dict[str, dict[str, float]]
) -> list[LayerReading]:
    """Return one entry per relaxed layer, with its paths, and per plain layer, with one path."""
    modules = dict(razor.model.named_modules())
    tensors = {
        name: {path: list[str]() for path in _path_names(name, layer)}
        for name, layer in spatial_layers(razor.model).items()
    }
    for weight_layer in razor.layers:
        owners = (o for o in tensors if not o or f"{weight_layer.name}.".startswith(f"{o}."))
        owner = next(owners, weight_layer.name)
        paths = tensors.setdefault(owner, {owner: []})
        path = next(p for p in paths if not p or f"{weight_layer.name}.".startswith(f"{p}."))
        paths[path].extend(weight_layer.tensors)
    readings: list[LayerReading] = []
    for name in sorted(tensors, key=list(modules).index):
        layer, measured = modules[name], errors.get(name, {})
        path_readings = _path_readings(razor, modules, tensors[name], gamma)
        relaxed = isinstance(layer, Relaxed)
        supports = support(layer, [p.share for p in path_readings], measured) if relaxed else []
        readings.append(LayerReading(name, path_readings, measured, relaxed, supports))
    return readings


def _path_names(name: str, layer: nn.Module) -> list[str]:
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


_CELL = "padding:.15em .9em .15em 0;text-align:"


def reading_html(reading: Reading) -> str:
    """Return the verdict, the test metrics and a table of layers as HTML for notebooks."""
    with_errors = any(layer.error is not None for layer in reading.layers)
    heads = ["layer", "share of its paths", "effective", "of", *["error"] * with_errors]
    head = "".join(
        f'<th scope="col" style="{_CELL}{"left" if i < 2 else "right"}">{name}</th>'
        for i, name in enumerate(heads)
    )
    rows = "".join(_html_row(layer, with_errors) for layer in reading.layers)
    test = ", ".join(f"{html.escape(k)} {v:.4f}" for k, v in reading.test.items())
    return (
        '<div style="font-family:system-ui,sans-serif;max-width:46em;line-height:1.5">'
        f'<p style="margin:.3em 0">{verdict_html(reading.verdict)}</p>'
        + (f'<p style="margin:.3em 0">Test: {test}</p>' if test else "")
        + '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _html_row(layer: LayerReading, with_errors: bool) -> str:
    cells = [
        f"{layer.effective_parameters:,.1f}",
        f"{sum(path.parameters for path in layer.paths):,}",
    ]
    if with_errors:
        cells.append("" if layer.error is None else percent(layer.error))
    shares = ", ".join(f"{path.path} {percent(path.share)}" for path in layer.paths)
    right = "".join(f'<td style="{_CELL}right">{html.escape(cell)}</td>' for cell in cells)
    return (
        f'<tr><th scope="row" style="{_CELL}left">{html.escape(layer.name or "network")}</th>'
        f'<td style="{_CELL}left">{_html_bar(layer)}{html.escape(shares)}</td>{right}</tr>'
    )


def _html_bar(layer: LayerReading) -> str:
    """Return a bar 8 em wide, split by the shares of the paths."""
    parts = []
    for path in layer.paths:
        free = FREE_COLOUR if layer.relaxed else PLAIN_COLOUR
        colour = EQUIVARIANT_COLOUR if path.group else free
        width = f"{8 * path.share:.2f}em" if math.isfinite(path.share) else "0"
        style = f"display:inline-block;height:.75em;width:{width};background:{colour}"
        parts.append(f'<span style="{style}"></span>')
    bar = "display:inline-block;width:8em;white-space:nowrap;margin-right:.8em;line-height:0"
    return f'<span aria-hidden="true" style="{bar}">{"".join(parts)}</span>'


def fit_html(reading: Reading, history: Sequence[dict[str, Any]]) -> str:
    """Return the reading as HTML, followed by the log evidence over training as a curve."""
    curve = [
        (record["epoch"], record["log_evidence"])
        for record in history
        if math.isfinite(record.get("log_evidence", math.nan))
    ]
    return reading_html(reading) + (_sparkline(curve) if len(curve) > 1 else "")


def _sparkline(curve: Sequence[tuple[Any, float]], width: int = 240, height: int = 48) -> str:
    epochs, values = zip(*curve, strict=True)
    low, high = min(values), max(values)
    points = " ".join(
        f"{width * (epoch - epochs[0]) / max(epochs[-1] - epochs[0], 1):.1f},"
        f"{height - (height - 4) * (value - low) / ((high - low) or 1.0) - 2:.1f}"
        for epoch, value in curve
    )
    label = f"log evidence {values[0]:,.0f} at epoch {epochs[0]}, {values[-1]:,.0f} at {epochs[-1]}"
    return (
        f'<svg role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><polyline points="{points}" fill="none" '
        f'stroke="{EQUIVARIANT_COLOUR}" stroke-width="2"/></svg>'
        f'<div style="font-family:system-ui,sans-serif;font-size:.9em">{label}</div>'
    )
