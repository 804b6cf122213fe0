"""Predict with the network of a run folder, and write the predictions to files."""

import csv
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.files import reading, write_atomically
from symrazor.core.likelihood import as_likelihood
from symrazor.core.text import printable, table_cell
from symrazor.data.sources import read_inputs
from symrazor.data.transforms import NORMALISATION, normalised
from symrazor.runs.folder import (
    input_dtype,
    load_network,
    question_of,
    read_document,
)
from symrazor.runs.records import is_fit_run, read_run

BATCH_SIZE = 500


@dataclass(frozen=True)
class Predictions:
    """Predictions of a network.

    Args:
        values: probabilities of the classes, or means of the targets.
        classes: names of the classes; empty for regression.
        targets: names of the targets, if they are known; empty for classification.
    """

    values: Float[Tensor, "n k"]
    classes: tuple[str, ...]
    targets: tuple[str, ...] = ()

    @property
    def labels(self) -> list[str]:
        """The most probable class of each sample."""
        return [self.classes[k] for k in self.values.argmax(1).tolist()] if self.classes else []

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists for JSON."""
        return {
            "classes": list(self.classes),
            "values": self.values.tolist(),
            "labels": self.labels,
        }


@torch.no_grad()
def predict(
    run: Path, data: Path, question: str | None = None, trust_code: bool = False
) -> Predictions:
    """Read inputs and predict with the network of a run folder.

    Args:
        run: the run folder.
        data: file or folder of inputs.
        question: name of the question, if the run has several.
        trust_code: see `symrazor.runs.records.load_run`.

    Raises:
        ValueError: no such run, inputs of another kind or shape, or code without `trust_code`.
    """
    document = read_document(run)
    entry = question_of(document, question)
    classes, targets = (tuple(entry.get(key) or ()) for key in ("classes", "targets"))
    network = load_network(run, question, trust_code)
    x = read_inputs(data, document["kind"], document["data"]["shape"])
    if not is_fit_run(run):
        f = _batched(network, x.to(input_dtype(document)), run)
        return Predictions(f.softmax(-1) if classes else f, classes, targets)
    config = read_run(run).config.data
    x = x.to(getattr(torch, config.dtype))
    if config.name in NORMALISATION:
        x = normalised(x, config.name)
    return Predictions(as_likelihood(config.likelihood).mean(_batched(network, x, run)), classes)


def _batched(network: torch.nn.Module, x: Tensor, run: Path) -> Tensor:
    """Return outputs; a network of a stranger may fail in any way."""
    with reading(run):
        f = torch.cat([network(part) for part in x.split(BATCH_SIZE)])
        if f.ndim != 2 or len(f) != len(x):
            raise ValueError(f"the network returns {list(f.shape)} for {len(x)} inputs")
    return f


def write_predictions(predictions: Predictions, out: Path | None) -> None:
    """Write predictions as .npz or .csv; as CSV to standard output if `out` is None."""
    if out is not None and out.suffix not in (".npz", ".csv"):
        raise ValueError(f"Predictions are written as .csv or .npz, got {out}.")
    if out is not None and out.suffix == ".npz":
        write_atomically(out, _as_npz(predictions))
        return
    text = _as_csv(predictions)
    if out is None:
        sys.stdout.write(text)
    else:
        write_atomically(out, text.encode())


def _as_npz(predictions: Predictions) -> bytes:
    arrays = {"probabilities" if predictions.classes else "mean": predictions.values.numpy()}
    if predictions.classes:
        arrays |= {"label": np.array(predictions.labels)}
        arrays |= {"classes": np.array(predictions.classes)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _as_csv(predictions: Predictions) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if predictions.classes:
        table.writerow(["label", *(f"p({printable(name)})" for name in predictions.classes)])
    else:
        numbered = [f"target {k}" for k in range(1, predictions.values.shape[1] + 1)]
        table.writerow([table_cell(name) for name in predictions.targets] or numbered)
    labels = [[table_cell(label)] for label in predictions.labels] or [
        [] for _ in predictions.values
    ]
    for label, row in zip(labels, predictions.values.tolist(), strict=True):
        # Targets may be small differences of large numbers: all digits of float64 are written.
        values = [f"{value:.6g}" if predictions.classes else repr(value) for value in row]
        table.writerow([*label, *values])
    return text.getvalue()
