"""Results of the experiments on conserved quantities, as JSON and as markdown tables."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from symrazor.experiments.options import Common
from symrazor.experiments.results import table, write_json

Row = dict[str, Any]
HEADLINE_KEYS = (
    "parallelness",
    "singular_values",
    "dimension",
    "span",
    "conserved",
    "test_mse",
    "neg_elbo_per_datum",
)


def document(
    name: str, rows: Sequence[Row], small: bool, device: str, top: str | None = "learned"
) -> Row:
    """Return the results for JSON: means and seeds of each model, and all runs.

    Args:
        name: of the experiment.
        rows: runs, each with its "model" and "seed".
        small: whether this is the small version.
        device: where it ran.
        top: model whose first run has its main results at the top level; None for the only run, if
            there is exactly one.
    """
    models: Row = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        runs = [row for row in rows if row["model"] == model and "error" not in row]
        names = {key for row in runs for key, value in row.items() if isinstance(value, float)}
        models[model] = {
            key: mean(row[key] for row in runs if row.get(key) is not None) for key in sorted(names)
        }
        models[model]["seeds"] = {str(row["seed"]): _headline(row) for row in runs}
    results: Row = {"experiment": name, "small": small, "device": device}
    first = [row for row in rows if top in (row["model"], None) and "error" not in row]
    if first and (top is not None or len(rows) == 1):
        results |= _headline(first[0])
    return results | {"models": models, "runs": list(rows)}


def _headline(row: Row) -> Row:
    return {key: row[key] for key in HEADLINE_KEYS if key in row}


def save(options: Common, name: str, rows: Sequence[Row], top: str | None = "learned") -> None:
    """Write the results to the file of the options, if there is one; see `document`."""
    write_json(options.json, document(name, rows, options.small, options.resolved_device, top))


HEAD = (
    *("model", "seed", "-ELBO/N", "NLL/N", "KL/N", "test MSE", "other MSE", "energy drift"),
    *("found", "parallelness", "recovered", "s"),
)


def markdown(rows: Sequence[Row], paper: Sequence[str]) -> str:
    """Return a table of all runs, with ratios between models and lines about the paper below."""
    return "\n".join([table(HEAD, map(_cells, rows)), "", *_ratios(rows), *paper])


def _cells(row: Row) -> list[str]:
    start = [row["model"], str(row["seed"])]
    if "error" in row:
        return [*start, row["error"], *[""] * 9]
    others = [f"{k[:-4]} {v:.3g}" for k, v in row.items() if k in ("moved_mse", "wider_mse")]
    inside = row.get("parallelness", [])[: row.get("dimension", 0)]
    return [
        *start,
        *(f"{row[f'{key}_per_datum']:.3f}" for key in ("neg_elbo", "nll", "kl")),
        f"{row['test_mse']:.3g}",
        ", ".join(others) or "none",
        cell(row.get("energy_drift"), ".2g"),
        cell(row.get("span")),
        f"{min(inside):.4f} to {max(inside):.4f}" if inside else "none",
        cell(min(row.get("recovered", []), default=None), ".4f"),
        f"{row['seconds']:.0f}",
    ]


def cell(value: float | None, form: str = "") -> str:
    """Return a number as a table cell, "none" if it is None."""
    return "none" if value is None else format(value, form)


def _ratios(rows: Sequence[Row]) -> list[str]:
    """Return ratios of mean errors between the learned model and the other two."""
    lines = []
    for key in (key for key in ("test_mse", "moved_mse", "wider_mse") if key in rows[0]):
        parts = []
        for model, other in (("learned", "oracle"), ("hnn", "learned")):
            errors, other_errors = (
                [row[key] for row in rows if row["model"] == name and key in row]
                for name in (model, other)
            )
            if errors and other_errors:
                parts.append(f"{model} / {other} {mean(errors) / mean(other_errors):.3f}")
        if parts:
            lines.append(f"{key[:-4]} MSE: {', '.join(parts)}")
    return lines
