"""Predictions of a network from its run folder, as numbers and as files."""

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

from symrazor.core.files import write_atomically
from symrazor.data.sources import read_inputs
from symrazor.discovery.folder import input_dtype, load_network, question_of, read_document
from symrazor.runs.fit_folder import as_trained, is_fit_run, predicted_mean

BATCH = 500


@dataclass(frozen=True)
class Predictions:
    """What a network says about some data.

    Args:
        values: probabilities of the classes, or means of the targets.
        classes: their names; empty for regression.
    """

    values: Float[Tensor, "n k"]
    classes: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        """The most probable class of each datum."""
        return [self.classes[k] for k in self.values.argmax(1).tolist()] if self.classes else []

    def to_dict(self) -> dict[str, Any]:
        """Plain lists for JSON."""
        return {
            "classes": list(self.classes),
            "values": self.values.tolist(),
            "labels": self.labels,
        }


@torch.no_grad()
def predict(
    run: Path, data: Path, question: str | None = None, trust_code: bool = False
) -> Predictions:
    """Read data and run the network of a run folder on them.

    Args:
        run: folder of the run.
        data: file or folder of inputs.
        question: which network, if the run answered several questions.
        trust_code: see `symrazor.runs.fit_run.load_run`.

    Raises:
        ValueError: no such run, data of another kind or shape, or code without `trust_code`.
    """
    document = read_document(run)
    classes = tuple(question_of(document, question).get("classes") or ())
    network = load_network(run, question, trust_code)
    found = read_inputs(data, document["kind"], document["data"]["shape"])
    if is_fit_run(run):
        x = as_trained(run, found)
    else:
        x = found.to(input_dtype(document))
    f = torch.cat([network(part) for part in x.split(BATCH)])
    if is_fit_run(run):
        return Predictions(predicted_mean(run, f), classes)
    return Predictions(f.softmax(-1) if classes else f, classes)


def write_predictions(found: Predictions, out: Path | None) -> None:
    """As .npz or .csv, or to standard output.

    Raises:
        ValueError: a file of another type.
    """
    if out is not None and out.suffix not in (".npz", ".csv"):
        raise ValueError(f"expected a .csv or .npz file, got {out}; do: --out predictions.csv")
    if out is not None and out.suffix == ".npz":
        buffer = io.BytesIO()
        key = "probabilities" if found.classes else "mean"
        arrays = {key: found.values.numpy()}
        if found.classes:
            arrays |= {"label": np.array(found.labels), "classes": np.array(found.classes)}
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_atomically(out, buffer.getvalue())
        return
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if found.classes:
        table.writerow(["label", *(f"p({name})" for name in found.classes)])
    else:
        table.writerow([f"target {number}" for number in range(1, found.values.shape[1] + 1)])
    labels = [[label] for label in found.labels] or [[] for _ in found.values]
    for label, row in zip(labels, found.values.tolist(), strict=True):
        # Targets may be small differences of large numbers: all digits of float64 are written.
        values = [f"{value:.6g}" if found.classes else repr(value) for value in row]
        table.writerow([*label, *values])
    if out is None:
        sys.stdout.write(text.getvalue())
    else:
        write_atomically(out, text.getvalue().encode())
