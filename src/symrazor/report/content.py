"""What of a document the page embeds: checked, cleaned, and columns in place of records."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from symrazor.core.json_values import json_ready
from symrazor.report import pictures
from symrazor.report.dynamics import question_of

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
