r"""Select and clean the parts of a document that the page embeds.

Records of a training history become columns, images become data URLs. Conserved quantities become a
question with the flows that they generate: a quadratic quantity
$C(x) = \tfrac12 x^\top A x + b^\top x$ of states $x = (q, p)$ generates the flow
$\dot x = J \nabla C = J (A x + b)$, along which the dynamics are invariant (Noether).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.validation import json_ready
from symrazor.report import pictures

SCHEMA = 1
"""Version of the document."""

Content = dict[str, Any]
_READING_KEYS = (
    *("verdict", "evidence", "train", "test", "layers", "equivariance_error"),
    *("config", "versions", "invariances", "conserved"),
)
_QUESTION_KEYS = (
    *("name", "question", "verdict", "margin", "network", "chosen"),
    *("calibration", "anchors", "collapse", "costs"),
)
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
_COLUMNS_BY_NAME = ("precisions", "effective_parameters")
_SCALAR_COLUMNS = (
    "nll",
    "log_evidence",
    "log_likelihood",
    "complexity",
    "per_datum",
    "test_accuracy",
)


@dataclass(frozen=True)
class Detail:
    """Limits on what a page shows.

    Args:
        images: number of example images per question, and of transformed copies.
        pixels: longest side of an image.
        points: number of points of a curve.
    """

    images: int
    pixels: int
    points: int


LEVELS = (Detail(24, 64, 150), Detail(12, 48, 80), Detail(8, 32, 40), Detail(4, 16, 20))
"""Levels of detail, richest first; a page uses the first level that fits its size limit."""


def visible_text(value: object, max_length: int = 2000) -> str:
    """Return a string with invisible, bidirectional and broken characters replaced."""
    whole = str(value).encode("utf-8", "replace").decode()
    shown = _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", whole)
    return shown if len(shown) <= max_length else f"{shown[:max_length]}..."


def clean(value: Any) -> Any:
    """Return a JSON-ready value with six digits per number and visible strings."""
    if isinstance(value, Mapping):
        return {visible_text(key): clean(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(part) for part in value]
    if isinstance(value, str):
        return visible_text(value)
    plain = json_ready(value)
    if isinstance(plain, float):
        return float(f"{plain:.6g}")
    return clean(plain) if isinstance(plain, (list, str)) else plain


def page_content(document: Mapping[str, Any], detail: Detail) -> Content:
    """Return the parts of a document that the page embeds.

    Raises:
        ValueError: if the document has no questions, another schema, or malformed parts.
    """
    questions = list(document.get("questions") or ())
    if document.get("dynamics"):
        questions.append(dynamics_question(document["dynamics"]))
    if not questions:
        raise ValueError('The document has no "questions", so there is nothing to show.')
    if document.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(
            f"The document has schema {document['schema']!r}; this version reads schema {SCHEMA}."
        )
    head = ("title", "kind", "task", "command", "versions", "data", "load")
    return {
        **{key: clean(document[key]) for key in head if document.get(key) is not None},
        "questions": [
            _question(question, number, detail) for number, question in enumerate(questions, 1)
        ],
    }


def _question(question: Mapping[str, Any], number: int, detail: Detail) -> Content:
    if not question.get("candidates"):
        raise ValueError(f"Question {number} has no candidates.")
    entry = {key: clean(question[key]) for key in _QUESTION_KEYS if question.get(key) is not None}
    entry.setdefault("question", entry.get("name", f"Question {number}"))
    candidates = [_candidate(part, detail) for part in question["candidates"]]
    entry.setdefault("verdict", candidates[0]["reading"].get("verdict", ""))
    entry["candidates"] = candidates
    if question.get("final"):  # a candidate trained for longer, which is not compared
        final = _candidate(question["final"], detail)
        entry["final"] = {**final, "of": final["name"], "name": f"{final['name']}, longer"}
    if question.get("examples"):
        entry["examples"] = _examples(question["examples"], detail)
    if question.get("filters"):
        entry["filters"] = {
            visible_text(name): _filters(values, 2 * detail.images)
            for name, values in question["filters"].items()
        }
    return entry


def _candidate(candidate: Mapping[str, Any], detail: Detail) -> Content:
    reading = candidate.get("reading")
    if not isinstance(reading, Mapping):
        raise ValueError(f"A candidate must have a reading; this one has only {sorted(candidate)}.")
    kept = {key: clean(reading[key]) for key in _READING_KEYS if reading.get(key) is not None}
    if isinstance(kept.get("conserved"), list):
        kept["conserved"] = [_thin_flow(part, detail.points) for part in kept["conserved"]]
    paths = [place for layer in kept.get("layers", []) for place in path_names(layer)]
    history = candidate.get("history") or []
    entry: Content = {"name": visible_text(candidate.get("name", "network"), 200), "reading": kept}
    if history:
        entry["series"] = history_columns(history, paths, detail.points)
    return entry


def _thin_flow(part: Any, points: int) -> Any:
    flow = part.get("flow") if isinstance(part, dict) else None
    if isinstance(flow, list) and len(flow) > 4 * points:
        part["flow"] = flow[:: -(-len(flow) // (4 * points))]
    return part


def path_names(layer: Mapping[str, Any]) -> list[str]:
    """Return the module names of the paths of a layer, in the order of the reading."""
    name = str(layer["name"])
    if not layer.get("relaxed"):
        return [name]
    return [f"{name}.paths.{number}".lstrip(".") for number in range(len(layer["paths"]))]


def history_columns(history: Sequence[Mapping[str, Any]], paths: list[str], points: int) -> Content:
    """Convert a training history from records to columns.

    Args:
        history: one record per epoch, as in `Fit.history`.
        paths: module names of paths, to which precisions and effective parameters are assigned.
        points: maximal number of records to keep, including the last one.

    Returns:
        The epochs (or steps: "clock" says which), a column for each number, and columns by path
        under "precisions" (by prior group) and "effective_parameters" (summed). None where an epoch
        has no value.
    """
    measured = [record for record in history if "log_evidence" in record]
    chosen = {id(record) for part in (history, measured) for record in _thinned(part, points // 2)}
    kept = [record for record in history if id(record) in chosen]
    clock = "epoch" if all("epoch" in record for record in kept) else "step"
    columns: Content = {"clock": clock}
    columns["epoch"] = [record.get(clock, i) for i, record in enumerate(kept, 1)]
    for key in _SCALAR_COLUMNS:
        if any(key in record for record in kept):
            columns[key] = [record.get(key) for record in kept]
    precisions: dict[str, dict[str, list[Any]]] = {}
    names = {name for record in kept for key in _COLUMNS_BY_NAME for name in record.get(key) or ()}
    owner = {name: _owning_path(name, paths) for name in names}
    effective: dict[str, list[Any]] = {}
    for row, record in enumerate(kept):
        for name, value in (record.get("precisions") or {}).items():
            by_group = precisions.setdefault(owner[name], {})
            by_group.setdefault(name, [None] * len(kept))[row] = value
        for name, value in (record.get("effective_parameters") or {}).items():
            column = effective.setdefault(owner[name], [None] * len(kept))
            column[row] = None if value is None else (column[row] or 0.0) + value
    cleaned: Content = clean(
        {**columns, "precisions": precisions, "effective_parameters": effective}
    )
    return cleaned


def _owning_path(name: str, paths: list[str]) -> str:
    """Return the longest path name that a tensor or prior group belongs to, else its own name."""
    owners = [p for p in paths if not p or f"{name}.".startswith(f"{p}.")]
    return max(owners, key=len, default=name)


def _thinned(records: Sequence[Any], count: int) -> list[Any]:
    if len(records) <= count:
        return list(records)
    return [records[round(i * (len(records) - 1) / (count - 1))] for i in range(count)]


def _examples(examples: Mapping[str, Any], detail: Detail) -> Content:
    """Return example images as data URLs, series as numbers, and labels."""
    values = examples.get("images")
    if values is None or len(values) == 0:
        return {}
    entry: Content = {}
    labels = examples.get("labels")
    if labels is not None:
        entry["labels"] = [
            visible_text(clean(label), 60) for label in list(labels)[: detail.images]
        ]
    if isinstance(values[0], str):
        entry["images"] = [pictures.checked_data_url(text) for text in values[: detail.images]]
        return entry
    array = pictures.as_array(values[: detail.images])
    if array.ndim == 2:
        step = -(-array.shape[1] // 200)
        entry["lines"] = clean(array[:, ::step].tolist())
        return entry
    images = pictures.as_images(array)
    levels = pictures.grey_levels(images)
    entry["images"] = [pictures.image_data_url(image, detail.pixels) for image in levels]
    moved = examples.get("transformed")
    if moved is not None:
        orbits = pictures.as_array(moved)
        orbits = orbits[None] if orbits.ndim == array.ndim else orbits
        if orbits.ndim != array.ndim + 1:
            raise ValueError(
                f"Transformed images must have shape [example, draw, ...] for images of shape "
                f"{list(array.shape)}, got {list(orbits.shape)}."
            )
        limits = None if images.dtype == np.uint8 else (float(images.min()), float(images.max()))
        entry["transformed"] = [
            [
                pictures.image_data_url(image, detail.pixels)
                for image in pictures.grey_levels(pictures.as_images(orbit), limits)
            ]
            for orbit in orbits[: max(2, detail.images // 4), : detail.images // 2]
        ]
    return entry


def _filters(values: Any, count: int) -> list[str]:
    """Return filters [..., h, w] as data URLs.

    Raises:
        ValueError: if the array has fewer than two dimensions or is empty.
    """
    array = np.asarray(values, dtype=float)
    if array.ndim < 2 or 0 in array.shape:
        raise ValueError(f"Filters must have shape [..., h, w], got {list(array.shape)}.")
    flat = np.nan_to_num(array.reshape(-1, *array.shape[-2:])[:count])
    scale = float(np.abs(flat).max())
    return [pictures.signed_data_url(pictures.downsample(image, 64), scale) for image in flat]


CURVES, POINTS_PER_CURVE = 3, 60  # of the flow of a conserved quantity


def dynamics_question(dynamics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the question for the "dynamics" of a document: with and without conserved quantities.

    Bounds per data point, "neg_elbo" and "nll", become evidence and fit of all data.
    """
    n = dynamics.get("n_data") or 1
    evidence = dynamics.get("evidence") or {}
    errors = dynamics.get("held_out_mse") or {}
    histories = dynamics.get("history") or {}
    units = (dynamics.get("scale"), dynamics.get("centre"))
    conserved = [add_flow(entry, *units) for entry in dynamics.get("conserved") or ()]
    return {
        "name": "dynamics",
        "question": "Which quantities are conserved?",
        "verdict": dynamics.get("verdict", ""),
        "margin": evidence.get("margin"),
        "candidates": [
            {
                "name": title,
                "reading": {
                    "evidence": _evidence(evidence.get(key) or {}, n),
                    "train": {"n": n},
                    "test": {"mse": errors[key]} if key in errors else {},
                    "layers": [],
                    "conserved": conserved if key == "learned" else None,
                },
                "history": [
                    {**record, **_evidence(record, n)} for record in histories.get(key) or ()
                ],
            }
            for key, title in (
                ("learned", "with conserved quantities"),
                ("plain", "without conserved quantities"),
            )
        ],
    }


def _evidence(bound: Mapping[str, float], n: int) -> dict[str, float]:
    if "neg_elbo" not in bound or "nll" not in bound:
        return {}
    return {
        "log_evidence": -n * bound["neg_elbo"],
        "log_likelihood": -n * bound["nll"],
        "per_datum": -bound["neg_elbo"],
    }


def add_flow(
    entry: Mapping[str, Any],
    scale: Sequence[float] | None = None,
    centre: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return a conserved quantity with its flow, unless it has a flow or is not quadratic.

    Args:
        entry: the quantity, with "matrix" A and optionally "linear" b.
        scale: typical size of each entry of a state.
        centre: state around which the flow is drawn; zero by default.
    """
    A = torch.as_tensor(entry.get("matrix", []), dtype=torch.float64)
    if "flow" in entry or A.dim() != 2 or A.shape[0] != A.shape[1] or len(A) % 2 or not len(A):
        return dict(entry)
    b = torch.as_tensor(entry.get("linear", [0.0] * len(A)), dtype=torch.float64)
    if centre is not None:
        b = b + A @ torch.as_tensor(centre, dtype=torch.float64)
    size = torch.ones(len(A), dtype=torch.float64) if scale is None else torch.as_tensor(scale)
    states = flow(A, b, size.to(A))
    if not bool(states.isfinite().all()):
        return dict(entry)
    plane = largest_plane(states)
    n = len(A) // 2
    names = [f"{'qp'[i // n]}{i % n + 1 if n > 1 else ''}" for i in plane]
    return {**entry, "flow": states[..., plane].tolist(), "axes": names}


def flow(
    A: Float[Tensor, "d d"], b: Float[Tensor, " d"], scale: Float[Tensor, " d"]
) -> Float[Tensor, "curves points d"]:
    """Return states along the flow, in units of the scale.

    The curves start at three sizes and cover about one period of the fastest rotation.
    """
    n = len(A) // 2
    rows = torch.cat([A[n:], -A[:n]]) * scale / scale.unsqueeze(1)  # J A in scaled units
    drift = torch.cat([b[n:], -b[:n]]) / scale
    affine = torch.zeros(2 * n + 1, 2 * n + 1, dtype=A.dtype)
    affine[:-1, :-1], affine[:-1, -1] = rows, drift
    speed = float(torch.linalg.eigvals(rows).abs().max())
    turn = 2 * torch.pi / speed if speed > 1e-6 else 1 / max(float(drift.abs().max()), 1e-12)
    grows = float(torch.linalg.eigvals(rows).real.max()) * turn
    times = torch.linspace(
        0, turn * min(1.0, 1.5 / max(grows, 1e-12)), POINTS_PER_CURVE, dtype=A.dtype
    )
    maps = torch.linalg.matrix_exp(times.view(-1, 1, 1) * affine)
    start = torch.ones(2 * n + 1, CURVES, dtype=A.dtype)
    start[:-1] = torch.linspace(0.4, 1.0, CURVES, dtype=A.dtype)
    states: Tensor = (maps @ start)[:, :-1].permute(2, 0, 1)
    return states


def largest_plane(states: Float[Tensor, "curves points d"]) -> list[int]:
    """Return the two state entries in whose plane the curves enclose or move most."""
    centred, steps = states[:, :-1] - states.mean(1, keepdim=True), states.diff(dim=1)
    area = torch.einsum("cti,ctj->ij", centred, steps)
    area = (area - area.T).abs()
    if float(area.max()) > 1e-9:
        return sorted(divmod(int(area.argmax()), len(area)))
    moves = (states.amax(1) - states.amin(1)).sum(0)
    return sorted(moves.topk(2).indices.tolist())
