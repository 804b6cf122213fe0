"""What of a document the page embeds: checked, cleaned, and columns in place of records."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.files import json_ready
from symrazor.report import pictures

SCHEMA = 1
"""Version of the document."""

Content = dict[str, Any]
_READING = (
    "verdict",
    "evidence",
    "train",
    "test",
    "layers",
    "equivariance_error",
    "config",
    "versions",
    "invariances",
    "conserved",
)
_QUESTION = (
    *("name", "question", "verdict", "margin", "network", "chosen"),
    *("calibration", "anchors", "collapse", "costs"),
)
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_BY_NAME = ("precisions", "effective_parameters")
_SCALARS = ("nll", "log_evidence", "log_likelihood", "complexity", "per_datum", "test_accuracy")


@dataclass(frozen=True)
class Detail:
    """How much a page shows.

    Args:
        images: of a question, and draws of an orbit.
        pixels: longest side of a picture.
        points: of a curve.
    """

    images: int
    pixels: int
    points: int


LEVELS = (Detail(24, 64, 150), Detail(12, 48, 80), Detail(8, 32, 40), Detail(4, 16, 20))
"""From plenty to little; a page takes the first that fits."""


def text_of(value: object, longest: int = 2000) -> str:
    """A string without what cannot be seen: controls, changes of direction, broken characters."""
    whole = str(value).encode("utf-8", "replace").decode()
    shown = _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", whole)
    return shown if len(shown) <= longest else f"{shown[:longest]}..."


def clean(value: Any) -> Any:
    """Ready for JSON: six digits of each number, strings that show what they are."""
    if isinstance(value, Mapping):
        return {text_of(key): clean(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(part) for part in value]
    if isinstance(value, str):
        return text_of(value)
    plain = json_ready(value)
    if isinstance(plain, float):
        return float(f"{plain:.6g}")
    return clean(plain) if isinstance(plain, (list, str)) else plain


def content(document: Mapping[str, Any], detail: Detail) -> Content:
    """The document as the page embeds it.

    Raises:
        ValueError: no questions, another schema, or parts of another shape.
    """
    questions = list(document.get("questions") or ())
    if document.get("dynamics"):
        questions.append(question_of(document["dynamics"]))
    if not questions:
        raise ValueError('expected a document with a list "questions", got none')
    if document.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"expected a document of schema {SCHEMA}, got {document['schema']!r}")
    head = ("title", "kind", "task", "command", "versions", "data", "load")
    return {
        **{key: clean(document[key]) for key in head if document.get(key) is not None},
        "questions": [
            _question(question, number, detail) for number, question in enumerate(questions, 1)
        ],
    }


def _question(question: Mapping[str, Any], number: int, detail: Detail) -> Content:
    if not question.get("candidates"):
        raise ValueError(f"expected question {number} with candidates, got none")
    found = {key: clean(question[key]) for key in _QUESTION if question.get(key) is not None}
    found.setdefault("question", found.get("name", f"Question {number}"))
    candidates = [_candidate(part, detail) for part in question["candidates"]]
    found.setdefault("verdict", candidates[0]["reading"].get("verdict", ""))
    found["candidates"] = candidates
    if question.get("final"):  # one of them, trained again for longer: not compared with the others
        final = _candidate(question["final"], detail)
        found["final"] = {**final, "of": final["name"], "name": f"{final['name']}, longer"}
    if question.get("examples"):
        found["examples"] = _examples(question["examples"], detail)
    if question.get("filters"):
        found["filters"] = {
            text_of(name): _filters(values, 2 * detail.images)
            for name, values in question["filters"].items()
        }
    return found


def _candidate(candidate: Mapping[str, Any], detail: Detail) -> Content:
    reading = candidate.get("reading")
    if not isinstance(reading, Mapping):
        raise ValueError(f"expected a candidate with a reading, got {sorted(candidate)}")
    kept = {key: clean(reading[key]) for key in _READING if reading.get(key) is not None}
    if isinstance(kept.get("conserved"), list):
        kept["conserved"] = [_conserved(part, detail.points) for part in kept["conserved"]]
    places = [place for layer in kept.get("layers", []) for place in places_of(layer)]
    history = candidate.get("history") or []
    found: Content = {"name": text_of(candidate.get("name", "network"), 200), "reading": kept}
    if history:
        found["series"] = series(history, places, detail.points)
    return found


def _conserved(part: Any, points: int) -> Any:
    flow = part.get("flow") if isinstance(part, dict) else None
    if isinstance(flow, list) and len(flow) > 4 * points:
        part["flow"] = flow[:: -(-len(flow) // (4 * points))]
    return part


def places_of(layer: Mapping[str, Any]) -> list[str]:
    """Where the paths of a layer sit in the network, in the order of the reading."""
    name = str(layer["name"])
    if not layer.get("relaxed"):
        return [name]
    return [f"{name}.paths.{number}".lstrip(".") for number in range(len(layer["paths"]))]


def series(history: Sequence[Mapping[str, Any]], places: list[str], points: int) -> Content:
    """Records as columns.

    Args:
        history: one record per epoch, as in `Fit.history`.
        places: paths, to which precisions and effective parameters are matched by name.
        points: at most so many records stay, the last one among them.

    Returns:
        The epochs (or steps: "clock" says which), a column for each number, and under "precisions"
        (prior group) and "effective_parameters" (summed by path) their columns by place. None
        where an epoch has no value.
    """
    measured = [record for record in history if "log_evidence" in record]
    chosen = {id(record) for part in (history, measured) for record in _thinned(part, points // 2)}
    kept = [record for record in history if id(record) in chosen]
    clock = "epoch" if all("epoch" in record for record in kept) else "step"
    found: Content = {"clock": clock}
    found["epoch"] = [record.get(clock, i) for i, record in enumerate(kept, 1)]
    for key in _SCALARS:
        if any(key in record for record in kept):
            found[key] = [record.get(key) for record in kept]
    precisions: dict[str, dict[str, list[Any]]] = {}
    names = {name for record in kept for key in _BY_NAME for name in record.get(key) or ()}
    owner = {name: _place(name, places) for name in names}
    effective: dict[str, list[Any]] = {}
    for row, record in enumerate(kept):
        for name, value in (record.get("precisions") or {}).items():
            of_place = precisions.setdefault(owner[name], {})
            of_place.setdefault(name, [None] * len(kept))[row] = value
        for name, value in (record.get("effective_parameters") or {}).items():
            column = effective.setdefault(owner[name], [None] * len(kept))
            column[row] = None if value is None else (column[row] or 0.0) + value
    cleaned: Content = clean({**found, "precisions": precisions, "effective_parameters": effective})
    return cleaned


def _place(name: str, places: list[str]) -> str:
    """The longest place that a tensor or a prior group belongs to; itself if there is none."""
    owners = [p for p in places if not p or f"{name}.".startswith(f"{p}.")]
    return max(owners, key=len, default=name)


def _thinned(records: Sequence[Any], count: int) -> list[Any]:
    if len(records) <= count:
        return list(records)
    return [records[round(i * (len(records) - 1) / (count - 1))] for i in range(count)]


def _examples(examples: Mapping[str, Any], detail: Detail) -> Content:
    """Pictures as addresses, series as numbers, and their labels."""
    values = examples.get("images")
    if values is None or len(values) == 0:
        return {}
    found: Content = {}
    labels = examples.get("labels")
    if labels is not None:
        found["labels"] = [text_of(clean(label), 60) for label in list(labels)[: detail.images]]
    if isinstance(values[0], str):
        found["images"] = [pictures.encoded(text) for text in values[: detail.images]]
        return found
    array = pictures.as_array(values[: detail.images])
    if array.ndim == 2:
        step = -(-array.shape[1] // 200)
        found["lines"] = clean(array[:, ::step].tolist())
        return found
    images = pictures.as_images(array)
    levels = pictures.grey_levels(images)
    found["images"] = [pictures.picture(image, detail.pixels) for image in levels]
    moved = examples.get("transformed")
    if moved is not None:
        orbits = pictures.as_array(moved)
        orbits = orbits[None] if orbits.ndim == array.ndim else orbits
        if orbits.ndim != array.ndim + 1:
            raise ValueError(
                "expected transformed pictures [example, draw, ...] of the shape of the images "
                f"{list(array.shape)}, got {list(orbits.shape)}"
            )
        limits = None if images.dtype == np.uint8 else (float(images.min()), float(images.max()))
        found["transformed"] = [
            [
                pictures.picture(image, detail.pixels)
                for image in pictures.grey_levels(pictures.as_images(orbit), limits)
            ]
            for orbit in orbits[: max(2, detail.images // 4), : detail.images // 2]
        ]
    return found


def _filters(values: Any, count: int) -> list[str]:
    """Filters [..., h, w] as addresses; the middle slice of three-dimensional ones is for others.

    Raises:
        ValueError: no array of at least two dimensions.
    """
    array = np.asarray(values, dtype=float)
    if array.ndim < 2 or 0 in array.shape:
        raise ValueError(f"expected filters [..., h, w], got {list(array.shape)}")
    flat = np.nan_to_num(array.reshape(-1, *array.shape[-2:])[:count])
    scale = float(np.abs(flat).max())
    return [pictures.signed(pictures.shrink(one, 64), scale) for one in flat]


CURVES, POINTS = 3, 60


def question_of(dynamics: Mapping[str, Any]) -> dict[str, Any]:
    """The question of a document's "dynamics": with the learned quantities, and without.

    Bounds per datum, "neg_elbo" and "nll", become the evidence and the fit of all data.
    """
    n = dynamics.get("n_data") or 1
    evidence = dynamics.get("evidence") or {}
    errors = dynamics.get("held_out_mse") or {}
    histories = dynamics.get("history") or {}
    own = (dynamics.get("scale"), dynamics.get("centre"))
    conserved = [with_flow(entry, *own) for entry in dynamics.get("conserved") or ()]
    return {
        "name": "dynamics",
        "question": "What is conserved?",
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
                "history": [_record(record, n) for record in histories.get(key) or ()],
            }
            for key, title in (("learned", "with conserved quantities"), ("plain", "without"))
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


def _record(record: Mapping[str, Any], n: int) -> dict[str, Any]:
    return {**record, **_evidence(record, n)}


def with_flow(
    entry: Mapping[str, Any],
    scale: Sequence[float] | None = None,
    centre: Sequence[float] | None = None,
) -> dict[str, Any]:
    """A conserved quantity with its flow, unless it has one or is not quadratic.

    Args:
        entry: with "matrix" A and perhaps "linear" b.
        scale: how large each entry of a state is.
        centre: about which it varies, and the flow is drawn; zero by default.
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
    plane = widest(states)
    n = len(A) // 2
    names = [f"{'qp'[i // n]}{i % n + 1 if n > 1 else ''}" for i in plane]
    return {**entry, "flow": states[..., plane].tolist(), "axes": names}


def flow(
    A: Float[Tensor, "d d"], b: Float[Tensor, " d"], scale: Float[Tensor, " d"]
) -> Float[Tensor, "curves points d"]:
    """States along the flow, in units of the scale.

    From states of three sizes, over about one turn of the fastest rotation.
    """
    n = len(A) // 2
    rows = torch.cat([A[n:], -A[:n]]) * scale / scale.unsqueeze(1)  # J A in scaled units
    drift = torch.cat([b[n:], -b[:n]]) / scale
    affine = torch.zeros(2 * n + 1, 2 * n + 1, dtype=A.dtype)
    affine[:-1, :-1], affine[:-1, -1] = rows, drift
    speed = float(torch.linalg.eigvals(rows).abs().max())
    turn = 2 * torch.pi / speed if speed > 1e-6 else 1 / max(float(drift.abs().max()), 1e-12)
    grows = float(torch.linalg.eigvals(rows).real.max()) * turn
    times = torch.linspace(0, turn * min(1.0, 1.5 / max(grows, 1e-12)), POINTS, dtype=A.dtype)
    maps = torch.linalg.matrix_exp(times.view(-1, 1, 1) * affine)
    start = torch.ones(2 * n + 1, CURVES, dtype=A.dtype)
    start[:-1] = torch.linspace(0.4, 1.0, CURVES, dtype=A.dtype)
    states: Tensor = (maps @ start)[:, :-1].permute(2, 0, 1)
    return states


def widest(states: Float[Tensor, "curves points d"]) -> list[int]:
    """The two entries of a state in whose plane the curves enclose most, or move most."""
    centred, steps = states[:, :-1] - states.mean(1, keepdim=True), states.diff(dim=1)
    area = torch.einsum("cti,ctj->ij", centred, steps)
    area = (area - area.T).abs()
    if float(area.max()) > 1e-9:
        return sorted(divmod(int(area.argmax()), len(area)))
    moves = (states.amax(1) - states.amin(1)).sum(0)
    return sorted(moves.topk(2).indices.tolist())
