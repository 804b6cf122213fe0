"""Select and clean the parts of a document that the page embeds.

Records of a training history become columns, and arrays become small PNG images in data URLs,
without an image library.
"""

import base64
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from symrazor.core.validation import json_ready
from symrazor.report.conserved import dynamics_question

SCHEMA = 1
"""Version of the document."""

POSITIVE = (22, 138, 130)
NEGATIVE = (205, 88, 62)
"""Colours of signed values. Opacity is the magnitude, so zero shows the page background."""

Content = dict[str, Any]
_READING_KEYS = (
    *("verdict", "evidence", "train", "test", "layers", "equivariance_error"),
    *("config", "versions", "invariances", "conserved"),
)
_QUESTION_KEYS = (
    *("name", "question", "verdict", "margin", "network", "chosen", "symmetric"),
    *("calibration", "anchors", "collapse", "costs", "rollouts", "equations", "group"),
    *("headline", "summary", "claims", "predictions", "classes", "targets"),
    *("not_tested", "confusion", "scatter", "shown_on", "code"),
)
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)
_BASE64_IMAGE = re.compile(r"(data:image/(png|jpeg|gif|webp);base64,)?[A-Za-z0-9+/\s]+={0,2}\s*")
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_COLUMNS_BY_NAME = ("precisions", "effective_parameters")
_SCALAR_COLUMNS = (
    *("nll", "log_evidence", "log_likelihood", "complexity", "per_datum"),
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
    text = str(value).encode("utf-8", "replace").decode()
    visible = _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", text)
    return visible if len(visible) <= max_length else f"{visible[:max_length]}..."


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
    """Return the parts of a document that the page embeds; ValueError if they are malformed."""
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
    for key in ("moved", "worst"):
        if question.get(key):
            entry[key] = _pictured(question[key], detail)
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
    reading_entries = {
        key: clean(reading[key]) for key in _READING_KEYS if reading.get(key) is not None
    }
    quantities = reading_entries.get("conserved")
    for quantity in quantities if isinstance(quantities, list) else ():
        flow = quantity.get("flow") if isinstance(quantity, dict) else None
        if isinstance(flow, list) and len(flow) > 4 * detail.points:
            quantity["flow"] = flow[:: -(-len(flow) // (4 * detail.points))]
    paths = [place for layer in reading_entries.get("layers", []) for place in path_names(layer)]
    history = candidate.get("history") or []
    entry: Content = {
        "name": visible_text(candidate.get("name", "network"), 200),
        "reading": reading_entries,
    }
    optional_keys = ("log_evidence", "spread", "left_out")
    entry |= {key: clean(candidate[key]) for key in optional_keys if candidate.get(key) is not None}
    if history:
        entry["series"] = history_columns(history, paths, detail.points)
    return entry


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
    records = [record for record in history if id(record) in chosen]
    clock = "epoch" if all("epoch" in record for record in records) else "step"
    columns: Content = {"clock": clock}
    columns["epoch"] = [record.get(clock, i) for i, record in enumerate(records, 1)]
    for key in _SCALAR_COLUMNS:
        if any(key in record for record in records):
            columns[key] = [record.get(key) for record in records]
    precisions: dict[str, dict[str, list[Any]]] = {}
    names = {
        name for record in records for key in _COLUMNS_BY_NAME for name in record.get(key) or ()
    }
    # The owner of a tensor or prior group is the longest path name that it belongs to.
    owner = {
        name: max(
            (p for p in paths if not p or f"{name}.".startswith(f"{p}.")), key=len, default=name
        )
        for name in names
    }
    effective: dict[str, list[Any]] = {}
    for row, record in enumerate(records):
        for name, value in (record.get("precisions") or {}).items():
            by_group = precisions.setdefault(owner[name], {})
            by_group.setdefault(name, [None] * len(records))[row] = value
        for name, value in (record.get("effective_parameters") or {}).items():
            column = effective.setdefault(owner[name], [None] * len(records))
            column[row] = None if value is None else (column[row] or 0.0) + value
    cleaned: Content = clean(
        {**columns, "precisions": precisions, "effective_parameters": effective}
    )
    return cleaned


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
        entry["images"] = [checked_data_url(text) for text in values[: detail.images]]
        return entry
    array = as_array(values[: detail.images])
    if array.ndim == 2:
        step = -(-array.shape[1] // 200)
        entry["lines"] = clean(array[:, ::step].tolist())
        return entry
    images = as_images(array)
    entry["images"] = image_data_urls(images, detail.pixels)
    if examples.get("transformed") is not None:
        orbits = as_array(examples["transformed"])
        orbits = orbits[None] if orbits.ndim == array.ndim else orbits
        if orbits.ndim != array.ndim + 1:
            raise ValueError(
                f"Transformed images must have shape [example, draw, ...] for images of shape "
                f"{list(array.shape)}, got {list(orbits.shape)}."
            )
        limits = None if images.dtype == np.uint8 else (float(images.min()), float(images.max()))
        entry["transformed"] = [
            image_data_urls(as_images(orbit), detail.pixels, limits)
            for orbit in orbits[: max(2, detail.images // 4), : detail.images // 2]
        ]
    return entry


def _pictured(part: Mapping[str, Any], detail: Detail) -> Content:
    """Replace "inputs" of a part, or of its examples, by "images" or "lines"."""
    entry: Content = {key: clean(v) for key, v in part.items() if key not in ("inputs", "examples")}
    if "examples" in part:
        entry["examples"] = [_pictured(example, detail) for example in part["examples"]]
    if part.get("inputs"):
        array = as_array(part["inputs"])
        if array.ndim == 2:
            thinned = array[:, :: max(1, array.shape[1] // detail.points)]
            entry["lines"] = clean(thinned.tolist())
        else:
            entry["images"] = image_data_urls(as_images(array), detail.pixels)
    return entry


def _filters(values: Any, count: int) -> list[str]:
    """Return filters [..., h, w] as data URLs."""
    array = np.asarray(values, dtype=float)
    if array.ndim < 2 or 0 in array.shape:
        raise ValueError(f"Filters must have shape [..., h, w], got {list(array.shape)}.")
    flat = np.nan_to_num(array.reshape(-1, *array.shape[-2:])[:count])
    scale = float(np.abs(flat).max())
    return [signed_data_url(downsample(image, 64), scale) for image in flat]


def data_url(pixels: UInt8[np.ndarray, "h w *channels"]) -> str:
    """Return an image as a data URL: grey [h, w], colour [h, w, 3], or with opacity [h, w, 4]."""
    kind = {(): 0, (3,): 2, (4,): 6}[pixels.shape[2:]]
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )
    content = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def downsample(image: Float[np.ndarray, "h w *channels"], largest: int) -> Any:
    """Average over blocks until neither side is longer than `largest` pixels."""
    step = -(-max(image.shape[:2]) // largest)
    if step <= 1:
        return image
    height, width = (-(-size // step) for size in image.shape[:2])
    around = [(0, height * step - image.shape[0]), (0, width * step - image.shape[1])]
    full = np.pad(image, [*around, *[(0, 0)] * (image.ndim - 2)], mode="edge")
    return full.reshape(height, step, width, step, *image.shape[2:]).mean((1, 3))


def signed_data_url(values: Float[np.ndarray, "h w"], scale: float) -> str:
    """Return signed values as a data URL: one colour per sign, with opacity |value| / scale."""
    strength = np.clip(np.abs(values) / (scale or 1.0), 0, 1)
    colours = np.where((values >= 0)[..., None], POSITIVE, NEGATIVE)
    pixels = np.concatenate([colours, np.round(255 * strength)[..., None]], -1)
    return data_url(pixels.astype(np.uint8))


def as_array(values: Any) -> Any:
    """Return examples as an array; ValueError if they differ in size or are not numbers."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"The examples differ in size: {error}") from error
    if array.dtype.kind not in "buif" or 0 in array.shape:
        raise ValueError(
            f"The examples must be numbers, got {array.dtype} of shape {list(array.shape)}."
        )
    return array


def as_images(array: Any) -> Any:
    """Convert images [n, h, w], [n, c, h, w] or [n, h, w, 3] to [n, h, w] or [n, h, w, 3]."""
    if array.ndim == 4 and array.shape[-1] != 3:
        if array.shape[1] not in (1, 2, 3, 4):
            array = array[:, :1]
        array = array[:, 0] if array.shape[1] in (1, 2) else np.moveaxis(array[:, :3], 1, -1)
    if array.ndim not in (3, 4):
        raise ValueError(
            f"Images must have shape [n, h, w], [n, c, h, w] or [n, h, w, 3], got "
            f"{list(array.shape)}."
        )
    return array


def image_data_urls(
    images: Any, largest: int, limits: tuple[float, float] | None = None
) -> list[str]:
    """Return images [n, h, w] or [n, h, w, 3] as data URLs of at most `largest` pixels per side.

    Bytes are unchanged. Other values are scaled: the limits, by default the minimum and the
    maximum, become 0 and 255.
    """
    levels = images.astype(float)
    if images.dtype != np.uint8:
        levels = np.nan_to_num(levels, posinf=0.0, neginf=0.0)
        low, high = limits or (float(levels.min()), float(levels.max()))
        levels = np.clip(255 * (levels - low) / ((high - low) or 1.0), 0, 255)
    return [data_url(np.round(downsample(image, largest)).astype(np.uint8)) for image in levels]


def checked_data_url(text: str, max_length: int = 200_000) -> str:
    """Check an image that is encoded in base64, with or without "data:image/png;base64,".

    Raises ValueError for anything else: a page accepts no other URLs.
    """
    if len(text) > max_length or not _BASE64_IMAGE.fullmatch(text):
        raise ValueError(
            f"An image must be base64 of at most {max_length:,} characters, got {text[:40]!r}."
        )
    body = text.rpartition(",")[2]
    start = base64.b64decode("".join(body.split())[:16] + "==", validate=False)
    kind = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
    if kind is None:
        raise ValueError(f"An image must be PNG, JPEG, GIF or WebP, got {text[:40]!r}.")
    return f"data:image/{kind};base64,{''.join(body.split())}"
