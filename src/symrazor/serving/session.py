"""Hold the network of a run and the samples that its page shows, and predict them."""

import base64
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.core.files import reading
from symrazor.core.text import printable
from symrazor.core.validation import json_ready
from symrazor.data.folders import SUFFIXES
from symrazor.data.shapes import as_numbers
from symrazor.data.sources import read_inputs
from symrazor.report.content import as_images, image_data_urls
from symrazor.runs.folder import input_dtype, load_network, question_of, read_document
from symrazor.runs.predictions import Predictions, predict_tensor
from symrazor.serving.moves import Control, controls, moved

MAX_SAMPLES = 200
"""Samples of a file that the page shows."""
MAX_SIDE_PIXELS = 256
SWEEP_VALUES = 25
CURVES = 3
"""Classes whose probability is drawn."""
MAX_POINTS = 400


class Session:
    """A run and the samples of its page.

    Args:
        run: the run folder.
        question: name of the question, if the run has several.
    """

    def __init__(self, run: Path, question: str | None = None) -> None:
        self.run, self.question = run, question
        document = read_document(run)
        self.entry = question_of(document, question)
        self.kind, self.data = str(document["kind"]), document["data"]
        self.shape = tuple(self.data["shape"])
        self.network = load_network(run, question)
        columns = self.data.get("columns") or ()
        self.controls = {c.name: c for c in controls(self.kind, self.shape, columns)}
        self._lock = threading.Lock()
        with reading(run):  # an untrusted document may have anything as examples
            self.samples, self.names = self._examples(input_dtype(document))

    def describe(self) -> dict[str, Any]:
        """Return what the page needs at the start."""
        return {
            "run": str(self.run),
            "kind": self.kind,
            "shape": list(self.shape),
            "headline": self.entry.get("headline") or "",
            "question": self.entry["question"],
            "classes": self.entry.get("classes"),
            "columns": self.data.get("columns"),
            "controls": [control.to_dict() for control in self.controls.values()],
            "samples": self.names,
        }

    def open(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        """Replace the samples by those of dropped files: one data file, or several images.

        Raises:
            ValueError: files that cannot be read, or samples of another shape.
        """
        if not files:
            raise ValueError("No file was dropped.")
        with tempfile.TemporaryDirectory(prefix="symrazor-") as folder:
            for name, content in files.items():
                (Path(folder) / _file_name(name)).write_bytes(content)
            names = [_file_name(name) for name in files]
            is_folder = all(Path(name).suffix.lower() in SUFFIXES for name in names)
            if not is_folder and len(files) > 1:
                raise ValueError("Drop one data file, or several images.")
            path = Path(folder) if is_folder else Path(folder) / names[0]
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    data = read_inputs(path, self.kind, self.shape, self.data.get("columns") or ())
            except (ValueError, OSError) as error:
                raise ValueError(_without(folder, str(error))) from error
        ids = data.ids or tuple(f"sample {k}" for k in range(1, len(data.x[:MAX_SAMPLES]) + 1))
        with self._lock:
            self.samples, self.names = (
                as_numbers(data.x[:MAX_SAMPLES], self.kind).clone(),
                list(ids[:MAX_SAMPLES]),
            )
            table = self._as_table(self._predict(self.samples))
            notes = [_without(folder, str(warning.message)) for warning in caught]
            return {
                "total": len(data.x),
                "samples": self.names,
                "predictions": table,
                "notes": notes,
            }

    def predict(self, sample: int, move: Mapping[str, Any]) -> dict[str, Any]:
        """Return a moved sample as a picture, its predictions, and those along each control.

        Raises:
            ValueError: no such sample or control, or a value outside of its range.
        """
        with self._lock:
            if not 0 <= sample < len(self.samples):
                raise ValueError(f"No sample {sample}. Drop a file first.")
            x, move = self.samples[sample], self._checked(move)
            current = moved(x, self.kind, move, self._scale)
            predictions = self._predict(torch.stack([x, current]))
            return {
                "pictures": [self._picture(x), self._picture(current)],
                "predictions": self._as_table(predictions),
                "change": float((predictions.values[1] - predictions.values[0]).abs().max()),
            }

    def sweep(self, sample: int, move: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the predictions of a sample for values of one control, the others unchanged."""
        with self._lock:
            if not 0 <= sample < len(self.samples):
                raise ValueError(f"No sample {sample}. Drop a file first.")
            move, control = self._checked(move), self._control(name)
            at = control.values(SWEEP_VALUES)
            x, scale = self.samples[sample], self._scale
            copies = [moved(x, self.kind, {**move, name: value}, scale) for value in at]
            predictions = self._predict(torch.stack(copies))
            values, spread = predictions.values, predictions.std
            spread = predictions.epistemic if spread is None else spread
            chosen = list(range(values.shape[1]))
            if predictions.classes:
                current = values[[at.index(control.start), _nearest(at, move.get(name, at[0]))]]
                order = [*current.argmax(1).tolist(), *values.mean(0).argsort(descending=True)]
                chosen = list(dict.fromkeys(map(int, order)))[:CURVES]
            names = predictions.classes or predictions.targets
            curves = [
                {
                    "name": names[k] if names else f"target {k + 1}",
                    "values": values[:, k].tolist(),
                    "spread": None if spread is None else spread[:, k].tolist(),
                }
                for k in chosen
            ]
        out: dict[str, Any] = json_ready({"at": at, "curves": curves})
        return out

    @property
    def _scale(self) -> Tensor:
        """Standard deviation of each column of the samples; 1 where it is 0 or unknown."""
        has_no_spread = len(self.samples) < 2
        scale = torch.ones(self.shape) if has_no_spread else self.samples.double().std(0)
        return torch.where(scale > 0, scale, 1.0)

    def _control(self, name: str) -> Control:
        if name not in self.controls:
            raise ValueError(f"Unknown move {name!r}. Moves: {', '.join(self.controls)}.")
        return self.controls[name]

    def _checked(self, move: Mapping[str, Any]) -> dict[str, float]:
        """Return the values of a move as numbers inside their ranges."""
        checked = {}
        for name, value in move.items():
            control = self._control(name)
            if not isinstance(value, int | float) or not control.low <= value <= control.high:
                raise ValueError(f"{name} must be from {control.low:g} to {control.high:g}.")
            checked[name] = float(value)
        return checked

    def _predict(self, x: Tensor) -> Predictions:
        return predict_tensor(self.run, self.network, x, self.question)

    def _as_table(self, predictions: Predictions) -> list[dict[str, Any]]:
        """Return for each sample the label, and name, value and spread of each output."""
        names = predictions.classes or predictions.targets
        count = predictions.values.shape[1]
        names = names or tuple(f"target {k}" for k in range(1, count + 1))
        spread = predictions.epistemic if predictions.std is None else predictions.std
        rows = []
        for number, values in enumerate(predictions.values.tolist()):
            deviations = [None] * count if spread is None else spread[number].tolist()
            parts = zip(names, values, deviations, strict=True)
            outputs = [{"name": n, "value": v, "spread": u} for n, v, u in parts]
            label = predictions.labels[number] if predictions.classes else None
            rows.append({"label": label, "outputs": outputs})
        ready: list[dict[str, Any]] = json_ready(rows)
        return ready

    def _picture(self, x: Tensor) -> dict[str, Any]:
        """Return an image as a data URL, and other samples as lines or points."""
        if self.kind in ("image", "volume"):
            array = (x if x.ndim == 3 else x[:, x.shape[1] // 2]).float().numpy()
            pixels = np.round(255 * np.clip(array, 0, 1)).astype(np.uint8)
            if float(array.min()) < 0 or float(array.max()) > 1:  # not scaled from bytes
                pixels = array
            return {"image": image_data_urls(as_images(pixels[None]), MAX_SIDE_PIXELS)[0]}
        if self.kind == "series":
            thinned = x[:6, :: max(1, x.shape[1] // MAX_POINTS)]
            return {"lines": thinned.tolist()}
        if self.kind == "set":
            return {"points": x[:MAX_POINTS, :2].tolist()}
        return {"numbers": x.tolist()}

    def _examples(self, dtype: torch.dtype) -> tuple[Tensor, list[str]]:
        """Return samples to start with: those of the report, else the first of the data file."""
        examples = []
        for example in (self.entry.get("moved") or {}).get("examples") or ():
            inputs = example.get("inputs") or []
            if inputs:
                name = example.get("label")
                label = f"label {name}" if name is not None else "example"
                examples.append((label, inputs[len(inputs) // 2]))
        worst = self.entry.get("worst") or {}
        for label, values in zip(
            worst.get("labels") or (), worst.get("inputs") or (), strict=False
        ):
            examples.append((f"label {label}", values))
        samples = []
        for label, values in examples:
            x = torch.tensor(values, dtype=dtype)
            x = x.unsqueeze(0) if x.ndim == len(self.shape) - 1 else x
            if tuple(x.shape) == self.shape:
                samples.append((printable(label), x))
        if samples:
            return torch.stack([x for _, x in samples]), [name for name, _ in samples]
        return self._first_of_file()

    def _first_of_file(self) -> tuple[Tensor, list[str]]:
        path = Path(str(self.data.get("path") or ""))
        try:
            data = read_inputs(path, self.kind, self.shape, self.data.get("columns") or ())
        except (ValueError, OSError):  # moved, changed, or no file at all: files can be dropped
            return torch.zeros(0, *self.shape), []
        names = data.ids or tuple(f"sample {k}" for k in range(1, len(data.x[:MAX_SAMPLES]) + 1))
        return as_numbers(data.x[:MAX_SAMPLES], self.kind).clone(), list(names[:MAX_SAMPLES])


def _without(folder: str, text: str) -> str:
    """Return a message without the temporary folder of the dropped files."""
    return text.replace(f"{folder}/", "").replace(folder, "the dropped files")


def _nearest(values: list[float], value: float) -> int:
    return min(range(len(values)), key=lambda k: abs(values[k] - value))


def _file_name(name: str) -> str:
    """Return the last part of the name of a dropped file."""
    plain = Path(name.replace("\\", "/")).name
    if plain in ("", ".", ".."):
        raise ValueError(f"Not the name of a file: {name[:80]!r}.")
    return plain


def decoded_files(files: Any) -> dict[str, bytes]:
    """Return the names and contents of files that the page sends in base64."""
    if not isinstance(files, list):
        raise ValueError("files must be a list.")
    return {str(file["name"]): base64.b64decode(file["content"], validate=True) for file in files}
