"""Show readings in notebooks, as HTML, and collapsed networks in the terminal."""

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from symrazor.report.page import verdict_html
from symrazor.symmetry.verdict import LayerReading, percent

if TYPE_CHECKING:
    from symrazor.symmetry.reading import Reading

EQUIVARIANT_COLOUR, FREE_COLOUR, PLAIN_COLOUR = "#2a8f87", "#cf6347", "#8a867c"
"""Colours of bars, readable on white and on black."""
_CELL = "padding:.15em .9em .15em 0;text-align:"


def reading_html(reading: "Reading") -> str:
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


def fit_html(reading: "Reading", history: Sequence[dict[str, Any]]) -> str:
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


def collapse_table(plain: nn.Module) -> str:
    """Return the report of a collapsed network as a table for the terminal."""
    report = getattr(plain, "collapse_report", None)
    if not isinstance(report, dict):
        raise ValueError(f"This {type(plain).__name__} was not made by collapse().")
    width = max([5, *(len(layer["name"]) for layer in report["layers"])])
    lines = [f"{'layer':<{width}}  {'path':<12}{'share':>8}   fate"] if report["layers"] else []
    for layer in report["layers"]:
        for path in layer["paths"]:
            share = "" if path["share"] is None else f"{100 * path['share']:.1f} %"
            name = f"{layer['name']:<{width}}  {path['path']:<12}"
            lines.append(f"{name}{share:>8}   {path['fate']}")
    lines.append(f"{'':<26}{'before':>14}{'after':>14}")
    for key, title, form in (
        ("parameters", "parameters", ",d"),
        ("flops", "FLOPs per input", ",d"),
        ("latency_ms", f"ms for {report['data']} inputs", ",.3f"),
    ):
        pair = report[key]
        lines.append(f"{title:<26}{pair['before']:>14{form}}{pair['after']:>14{form}}")
    moved = report["change"]
    lines.append(
        f"outputs change by {moved['rms']:.1e} (rms), at most {moved['largest']:.1e} for one input"
    )
    return "\n".join([*lines, _threshold(report["threshold"])])


def _threshold(chosen: dict[str, Any]) -> str:
    if chosen["value"] is None:
        return "only paths with zero output were dropped, because no shares were given"
    text = f"threshold on shares: {chosen['value']:.3g}, {chosen['chosen_by']}"
    if chosen["candidates"]:
        full, best = chosen["candidates"][0], max(c["log_evidence"] for c in chosen["candidates"])
        text += f": {full['log_evidence']:,.1f} with all paths, {best:,.1f} with the kept paths"
    return text
