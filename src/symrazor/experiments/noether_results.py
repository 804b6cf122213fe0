"""Results of the experiments on conserved quantities: JSON by model and seed, and a table."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from symrazor.core.files import write_atomically

Row = dict[str, Any]
HEADLINE = (
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
    """The results as JSON: by model (means, and figures of each seed), and all runs.

    Args:
        name: of the experiment.
        rows: runs, each with its "model" and "seed".
        small: whether the experiment is.
        device: where it ran.
        top: the model whose first run has its figures on top; None for the only run, if so.
    """
    models: Row = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model and "error" not in row]
        names = {key for row in own for key, value in row.items() if isinstance(value, float)}
        models[model] = {
            key: mean(row[key] for row in own if row.get(key) is not None) for key in sorted(names)
        }
        models[model]["seeds"] = {str(row["seed"]): _headline(row) for row in own}
    found: Row = {"experiment": name, "small": small, "device": device}
    first = [row for row in rows if top in (row["model"], None) and "error" not in row]
    if first and (top is not None or len(rows) == 1):
        found |= _headline(first[0])
    return found | {"models": models, "runs": list(rows)}


def _headline(row: Row) -> Row:
    return {key: row[key] for key in HEADLINE if key in row}


def save(file: Path | None, found: Row) -> None:
    """Write results, if there is a file for them."""
    if file is not None:
        write_atomically(file, (json.dumps(found, indent=1) + "\n").encode())


def markdown(rows: Sequence[Row], paper: Sequence[str]) -> str:
    """A table of all runs."""
    lines = [
        "| model | seed | -ELBO/N | NLL/N | KL/N | test MSE | other MSE "
        "| energy drift | found | parallelness | recovered | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            cells = " |" * 9
            lines.append(f"| {row['model']} | {row['seed']} | {row['error']} |{cells}")
            continue
        others = [f"{k[:-4]} {v:.3g}" for k, v in row.items() if k in ("moved_mse", "wider_mse")]
        kept = row.get("parallelness", [])[: row.get("dimension", 0)]
        least = f"{min(kept):.4f} to {max(kept):.4f}" if kept else "none"
        lines.append(
            f"| {row['model']} | {row['seed']} | {row['neg_elbo_per_datum']:.3f} | "
            f"{row['nll_per_datum']:.3f} | {row['kl_per_datum']:.3f} | {row['test_mse']:.3g} | "
            f"{', '.join(others) or 'none'} | {cell(row.get('energy_drift'), '.2g')} | "
            f"{cell(row.get('span'))} | {least} | "
            f"{cell(min(row.get('recovered', []), default=None), '.4f')} | "
            f"{row['seconds']:.0f} |"
        )
    ratios = _ratios(rows)
    return "\n".join([*lines, "", *ratios, *paper])


def cell(value: float | None, form: str = "") -> str:
    """Return a number as a cell of a table, "none" where there is none."""
    return "none" if value is None else format(value, form)


def _ratios(rows: Sequence[Row]) -> list[str]:
    """The learned model against the other two, over all seeds."""

    def ratio(one: str, other: str, key: str) -> float | None:
        found = [
            [row[key] for row in rows if row["model"] == model and key in row]
            for model in (one, other)
        ]
        return mean(found[0]) / mean(found[1]) if all(found) else None

    lines = []
    for key in (key for key in ("test_mse", "moved_mse", "wider_mse") if key in rows[0]):
        ratios = {
            "learned / oracle": ratio("learned", "oracle", key),
            "hnn / learned": ratio("hnn", "learned", key),
        }
        known = [f"{name} {value:.3f}" for name, value in ratios.items() if value is not None]
        if known:
            lines.append(f"{key[:-4]} MSE: {', '.join(known)}")
    return lines
