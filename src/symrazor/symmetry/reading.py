"""What was learned, as numbers: effective parameters, measured symmetry, fit and calibration."""

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
    runtime_checkable,
)

import torch
from torch import nn

from symrazor.accelerate.processes import unwrap
from symrazor.core.evidence import Evidence
from symrazor.core.files import json_ready
from symrazor.core.parameters import weights
from symrazor.core.prior import Prior
from symrazor.curvature.tape import Input
from symrazor.inference.razor import Razor
from symrazor.inference.razor_state import latest_razor
from symrazor.layers.relaxed import Relaxed, spatial_layers
from symrazor.symmetry.equivariance import Errors, layer_errors
from symrazor.symmetry.invariances import Invariance, invariance_sentence, invariances_of, shape_of
from symrazor.symmetry.verdict import (
    TRANSLATION,
    LayerReading,
    PathReading,
    as_range,
    percent,
    support,
    table,
    words,
)


@runtime_checkable
class Weighed(Protocol):
    """A module and its weight tensors, by name."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def tensors(self) -> Iterable[str]: ...  # noqa: D102


@runtime_checkable
class Learned(Protocol):
    """What a reading is made of: a `Razor`, or a `Variational` network."""

    @property
    def model(self) -> nn.Module: ...  # noqa: D102

    @property
    def prior(self) -> Prior: ...  # noqa: D102

    @property
    def layers(self) -> Sequence[Weighed]: ...  # noqa: D102

    @property
    def at_bound(self) -> list[str]: ...  # noqa: D102

    @property
    def config(self) -> Any: ...  # noqa: D102


SCHEMA = 3
"""Version of the JSON document, see docs/how-to/read-a-result.md."""
READABLE = (2, SCHEMA)  # one of schema 2 has no invariances

WIDTH = 110
"""Columns of the table."""


class Spread(NamedTuple):
    """Mean, smallest and largest of some values."""

    mean: float
    min: float
    max: float


@dataclass(frozen=True)
class Reading:
    """Everything a run learned, ready for a table, a page or JSON (see `to_json`).

    Args:
        verdict: the outcome in words.
        evidence: log evidence and its terms.
        train: what it was trained on.
        test: figures on held-out data, if there were any.
        layers: precision, effective parameters, share and measured error, by layer and path.
        equivariance_error: group -> measured relative error of the whole network.
        invariances: generator -> learned width of an `Augmented` network.
        config: options of the evidence.
        versions: of Python and torch.
        schema: version of the document.
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
        r"""Type of path -> mean, min and max of its share over the relaxed layers (ELLA Table 3).

        $r_{l,p} = \gamma_{l,p} / \sum_{p'} \gamma_{l,p'}$ for layer l and path p; two paths of one
        type in one layer count together.
        """
        shares: dict[str, dict[str, float]] = {}
        for layer in self.layers:
            trained = [path for path in layer.paths if path.parameters]  # a frozen one has no share
            for path in trained if layer.relaxed else []:
                of_type = shares.setdefault(path.path, {})
                of_type[layer.name] = of_type.get(layer.name, 0.0) + path.share
        return {
            kind: Spread(sum(r.values()) / len(r), min(r.values()), max(r.values()))
            for kind, r in shares.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, numbers and strings; None for a number that is not finite."""
        shares = self.relative_effective_parameters()
        relative = {kind: spread._asdict() for kind, spread in shares.items()}
        found: dict[str, Any] = json_ready(
            {**asdict(self), "relative_effective_parameters": relative}
        )
        return found

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Reading":
        """The reading that `to_dict` or a JSON document of it came from.

        A number that was not finite, null in JSON, comes back as not a number.

        Raises:
            ValueError: a document of another schema.
        """
        if document.get("schema") not in READABLE:
            raise ValueError(f"expected a reading of schema {SCHEMA}, got {document.get('schema')}")
        found: Reading = _revived(cls, document)
        return found

    def to_json(self) -> str:
        """The reading as a JSON document."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        """A table for the terminal, and the verdict."""
        lines = table(self.layers, WIDTH)
        if any(layer.error is not None for layer in self.layers):
            lines.append(
                "error: what a shifted input changes beyond a shift of the output, "
                "relative to the output's spread"
                if all(layer.group in (None, TRANSLATION) for layer in self.layers)
                else "error: what moving the input by its group changes beyond moving the output, "
                "relative to the output's spread"
            )
        shares = [
            f"{kind} {percent(r.mean)} ({as_range(r)})"
            for kind, r in self.relative_effective_parameters().items()
        ]
        if shares:
            lines.append(f"share over layers, mean (min to max): {', '.join(shares)}")
        if self.invariances:
            widths = ", ".join(f"{name} {one}" for name, one in self.invariances.items())
            lines.extend(textwrap.wrap(f"widths: {widths}", WIDTH))
        if self.test:
            lines.append("test: " + ", ".join(f"{k} {v:.4f}" for k, v in self.test.items()))
        verdict = textwrap.fill(self.verdict.replace(" %", "\0%"), WIDTH, break_on_hyphens=False)
        return "\n".join([*lines, verdict.replace("\0%", " %")])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return reading_html(self)


def _revived(kind: Any, value: Any) -> Any:
    """What `json_ready` and `asdict` made a document of, by its annotation."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        known = [f.name for f in fields(kind) if f.name in value]
        return kind(**{name: _revived(hints[name], value[name]) for name in known})  # type: ignore[operator]
    if kind is float and value is None:
        return math.nan
    origin, parts = get_origin(kind), get_args(kind)
    if origin is list:
        return [_revived(parts[0], part) for part in value]
    if origin is tuple:
        return tuple(_revived(parts[0], part) for part in value)
    if origin is dict:
        return {key: _revived(parts[1], part) for key, part in value.items()}
    return value


def reading(
    model: nn.Module, x: Input, razor: Razor | None = None, evidence: Evidence | None = None
) -> Reading:
    """What was learned about a model: precisions, effective parameters, measured equivariance.

    Args:
        model: the network.
        x: some of its inputs, [n, c, *size]; the equivariance errors are measured on them.
        razor: by default the one that was made last for this model.
        evidence: by default what that razor found last. `Razor.step` looks before it moves the
            precisions; call `razor.evidence(loader)` to see the state as it is.

    Raises:
        ValueError: no razor, no evidence, or those of another model.
    """
    model = unwrap(model)
    razor = latest_razor(model) if razor is None else razor
    if razor is None:
        raise ValueError(
            "expected a model with a Razor, got none that is alive; make one, "
            "razor = Razor(model, likelihood, n_data), or pass razor="
        )
    if razor.model is not model:
        raise ValueError("expected the razor of this model, got that of another one")
    evidence = razor.latest if evidence is None else evidence
    if evidence is None:
        raise ValueError(
            "expected an evidence, got a razor that has not measured any; "
            "call razor.evidence(loader) first"
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
    """The reading of a model as its razor sees it, with equivariance errors measured on inputs x.

    Learned widths in pixels need the `shape` of one datum, that of x unless told.

    Raises:
        ValueError: an evidence without the effective parameters of this model's weights.
    """
    missing = sorted(set(weights(razor.model)) - set(evidence.effective_parameters))
    if missing:
        raise ValueError(f"expected an evidence of this model, got one without {missing}")
    errors = Errors({}, {}) if x is None else layer_errors(razor.model, x)
    found = _layers(razor, evidence.effective_parameters, errors.layers)
    total = sum(path.parameters for layer in found for path in layer.paths)
    used = sum(layer.effective_parameters for layer in found)
    numbers = (
        f"Log evidence {float(evidence.log_evidence):,.1f} ({float(evidence.per_datum):.3f} per "
        f"datum): fit {float(evidence.log_likelihood):,.1f}, complexity "
        f"{float(evidence.complexity):,.1f}; the data determine {used:,.0f} of {total:,} parameters"
    )
    if razor.at_bound:
        numbers += f"; precision at its bound: {', '.join(razor.at_bound)}"
    off = errors.network
    described = [layer.group for layer in found if layer.group in off]
    in_words = words(found, off.get(TRANSLATION, off[described[0]] if described else None))
    others = [f"under {group} {percent(off[group])}" for group in off if group != TRANSLATION]
    if TRANSLATION in off and others:
        in_words = f"{in_words.removesuffix('.')}; {', '.join(others)}."
    widths = invariances_of(razor.model, shape_of(x) if shape is None else shape)
    told = [part for part in (in_words, invariance_sentence(widths), f"{numbers}.") if part]
    return Reading(
        verdict=" ".join(told),
        evidence=evidence.to_dict(),
        train=train or {},
        test=test or {},
        layers=found,
        equivariance_error=errors.network,
        invariances=widths,
        config={f.name: json_ready(getattr(razor.config, f.name)) for f in fields(razor.config)},
        versions={"python": platform.python_version(), "torch": torch.__version__},
    )


def _layers(
    razor: Learned, gamma: dict[str, float], errors: dict[str, dict[str, float]]
) -> list[LayerReading]:
    """One entry per relaxed layer with its paths, and per other layer with one path."""
    modules = dict(razor.model.named_modules())
    tensors = {name: _places(name, layer) for name, layer in spatial_layers(razor.model).items()}
    for layer in razor.layers:
        owners = (o for o in tensors if not o or f"{layer.name}.".startswith(f"{o}."))
        owner = next(owners, layer.name)
        places = tensors.setdefault(owner, {owner: []})
        place = next(p for p in places if not p or f"{layer.name}.".startswith(f"{p}."))
        places[place].extend(layer.tensors)
    found: list[LayerReading] = []
    for name in sorted(tensors, key=list(modules).index):
        layer, measured = modules[name], errors.get(name, {})
        paths = _paths(razor, modules, tensors[name], gamma)
        relaxed = isinstance(layer, Relaxed)
        groups = support(layer, [p.share for p in paths], measured) if relaxed else []
        found.append(LayerReading(name, paths, measured, relaxed, groups))
    return found


def _places(name: str, layer: nn.Module) -> dict[str, list[str]]:
    """Names of the paths of a layer, to be filled with the tensors of each."""
    if not isinstance(layer, Relaxed):
        return {name: []}
    return {f"{name}.paths.{i}".lstrip("."): [] for i in range(len(layer.paths))}


def _paths(
    razor: Learned,
    modules: dict[str, nn.Module],
    paths: dict[str, list[str]],
    gamma: dict[str, float],
) -> list[PathReading]:
    theta = weights(razor.model)
    used = {place: sum(gamma[name] for name in names) for place, names in paths.items()}
    total = sum(used.values())
    return [
        PathReading(
            getattr(modules[place], "label", type(modules[place]).__name__),
            getattr(modules[place], "group", None),
            used[place] / total if total > 0 else 1 / len(paths),
            used[place],
            sum(theta[name].numel() for name in names),
            {
                name.removeprefix(f"{place}."): float(
                    razor.prior.precision_of(name).detach().mean()
                )
                for name in names
                if name in razor.prior.group_of  # a point estimate has no prior
            },
            getattr(modules[place], "strict", True),
        )
        for place, names in paths.items()
    ]


KEPT, FREE, FIXED = "#2a8f87", "#cf6347", "#8a867c"
"""Colours of bars that stand out on white and on black alike; text takes the notebook's."""

_CELL = "padding:.15em .9em .15em 0;text-align:"


def reading_html(reading: "Reading") -> str:
    """Verdict, test figures and a row per layer with its bar."""
    errors = any(layer.error is not None for layer in reading.layers)
    heads = ["layer", "share of its paths", "effective", "of", *(["error"] if errors else [])]
    head = "".join(
        f'<th scope="col" style="{_CELL}{"left" if i < 2 else "right"}">{name}</th>'
        for i, name in enumerate(heads)
    )
    rows = "".join(_row(layer, errors) for layer in reading.layers)
    test = ", ".join(f"{html.escape(k)} {v:.4f}" for k, v in reading.test.items())
    return (
        '<div style="font-family:system-ui,sans-serif;max-width:46em;line-height:1.5">'
        f'<p style="margin:.3em 0">{html.escape(reading.verdict)}</p>'
        + (f'<p style="margin:.3em 0">Test: {test}</p>' if test else "")
        + '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(layer: LayerReading, errors: bool) -> str:
    cells = [
        f"{layer.effective_parameters:,.1f}",
        f"{sum(path.parameters for path in layer.paths):,}",
    ]
    if errors:
        cells.append("" if layer.error is None else percent(layer.error))
    named = ", ".join(f"{path.path} {percent(path.share)}" for path in layer.paths)
    right = "".join(f'<td style="{_CELL}right">{html.escape(cell)}</td>' for cell in cells)
    return (
        f'<tr><th scope="row" style="{_CELL}left">{html.escape(layer.name or "network")}</th>'
        f'<td style="{_CELL}left">{_bar(layer)}{html.escape(named)}</td>{right}</tr>'
    )


def _bar(layer: LayerReading) -> str:
    """A strip of 8 em, split by share."""
    parts = []
    for path in layer.paths:
        colour = KEPT if path.group else FREE if layer.relaxed else FIXED
        width = f"{8 * path.share:.2f}em" if math.isfinite(path.share) else "0"
        style = f"display:inline-block;height:.75em;width:{width};background:{colour}"
        parts.append(f'<span style="{style}"></span>')
    strip = "display:inline-block;width:8em;white-space:nowrap;margin-right:.8em;line-height:0"
    return f'<span aria-hidden="true" style="{strip}">{"".join(parts)}</span>'


def fit_html(reading: "Reading", history: Sequence[dict[str, Any]]) -> str:
    """The reading, and the log evidence over training as a line."""
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
    words = f"log evidence {values[0]:,.0f} at epoch {epochs[0]}, {values[-1]:,.0f} at {epochs[-1]}"
    return (
        f'<svg role="img" aria-label="{words}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><polyline points="{points}" fill="none" '
        f'stroke="{KEPT}" stroke-width="2"/></svg>'
        f'<div style="font-family:system-ui,sans-serif;font-size:.9em">{words}</div>'
    )
