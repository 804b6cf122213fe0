"""Predict with the network of a run folder, and write the predictions to files.

| task | columns |
|---|---|
| classes | label, `p(CLASS)` of each class, `epistemic` (standard deviation of the largest `p`) |
| targets | each target, then `TARGET std`, noise included, and `TARGET epistemic`, without noise |

The epistemic part comes from the weights of the last layer (`symrazor.inference.last_layer`); more
training data reduce it. A column with the names of the samples comes first, if the data have them.
"""

import csv
import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.files import reading, write_atomically
from symrazor.core.likelihood import as_likelihood
from symrazor.core.text import printable, table_cell
from symrazor.data.shapes import as_numbers
from symrazor.data.sources import read_inputs
from symrazor.data.transforms import NORMALISATION, normalised
from symrazor.inference.last_layer import LastLayer, features_of
from symrazor.inference.posterior import Prediction
from symrazor.runs.folder import (
    input_dtype,
    load_network,
    load_posterior,
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
        std: standard deviation of the targets, noise included; None for classes, or if unknown.
        epistemic: standard deviation of `values` over the posterior; None if unknown.
        ids: names of the samples; empty if they have none.
        id_name: what these names are, such as "file".
    """

    values: Float[Tensor, "n k"]
    classes: tuple[str, ...]
    targets: tuple[str, ...] = ()
    std: Float[Tensor, "n k"] | None = None
    epistemic: Float[Tensor, "n k"] | None = None
    ids: tuple[str, ...] = ()
    id_name: str = "id"

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
            "std": None if self.std is None else self.std.tolist(),
            "epistemic": None if self.epistemic is None else self.epistemic.tolist(),
            self.id_name: list(self.ids),
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
    network = load_network(run, question, trust_code)
    described = document["data"]
    inputs = read_inputs(data, document["kind"], described["shape"], described.get("columns") or ())
    predictions = predict_tensor(run, network, inputs.x, question)
    return replace(predictions, ids=inputs.ids, id_name=inputs.id_name or "id")


@torch.no_grad()
def predict_tensor(
    run: Path, network: nn.Module, x: Tensor, question: str | None = None
) -> Predictions:
    """Predict with the network of a run folder, which is already loaded (`load_network`)."""
    document = read_document(run)
    entry = question_of(document, question)
    classes, targets = (tuple(entry.get(key) or ()) for key in ("classes", "targets"))
    posterior = load_posterior(run, network, question)
    config = read_run(run).config.data if is_fit_run(run) else None
    likelihood = config.likelihood if config else "categorical" if classes else "gaussian"
    dtype = getattr(torch, config.dtype) if config else input_dtype(document)

    def predict_batch(x: Tensor) -> Prediction:
        batch = as_numbers(x, document["kind"]).to(dtype)
        if config is not None and config.name in NORMALISATION:
            batch = normalised(batch, config.name)
        f, phi = _outputs(network, batch, posterior, run)
        if classes and f.shape[1] != len(classes):
            raise ValueError(
                f"{run} has {len(classes)} classes, but its network {f.shape[1]} outputs."
            )
        if posterior is None or phi is None:
            return Prediction(as_likelihood(likelihood).mean(f))
        return posterior.predict(f, phi)

    # Batches of large files are written into one tensor: small ones would fragment the memory.
    columns: dict[str, Tensor] = {}
    for start in range(0, max(1, len(x)), BATCH_SIZE):
        prediction = predict_batch(x[start : start + BATCH_SIZE])
        std = None if prediction.variance is None else prediction.std
        parts = {"values": prediction.mean, "std": std, "epistemic": prediction.epistemic}
        for name, part in parts.items():
            if part is not None:
                column = columns.setdefault(name, part.new_empty(len(x), *part.shape[1:]))
                column[start : start + BATCH_SIZE] = part
    std, epistemic = columns.get("std"), columns.get("epistemic")
    return Predictions(columns["values"], classes, targets, std, epistemic)


def _outputs(
    network: nn.Module, x: Tensor, posterior: LastLayer | None, run: Path
) -> tuple[Tensor, Tensor | None]:
    """Return outputs and inputs of the last layer; an untrusted network may raise any error."""
    with reading(run):
        phi = None
        if posterior is None:
            f = network(x)
        else:
            f, phi = features_of(network, posterior.head, x)
        if f.ndim != 2 or len(f) != len(x):
            raise ValueError(f"the network returns {list(f.shape)} for {len(x)} inputs")
        if posterior is not None and phi is not None:
            n_features, n_outputs = posterior.weights.shape
            if phi.shape != (len(x), n_features - 1) or f.shape[1] != n_outputs:
                raise ValueError("the posterior does not fit the network")
    return f, phi


def check_suffix(out: Path | None) -> None:
    """Raise ValueError if predictions cannot be written to a file of this name."""
    if out is not None and out.suffix not in (".npz", ".csv"):
        raise ValueError(f"Predictions are written as .csv or .npz, got {out}.")


def write_predictions(predictions: Predictions, out: Path | None) -> None:
    """Write predictions as .npz or .csv; as CSV to standard output if `out` is None."""
    check_suffix(out)
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
    for name in ("std", "epistemic"):
        values = getattr(predictions, name)
        arrays |= {} if values is None else {name: values.numpy()}
    if predictions.ids:
        arrays |= {predictions.id_name: np.array(predictions.ids)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _as_csv(predictions: Predictions) -> str:
    columns = {predictions.id_name: [table_cell(name) for name in predictions.ids]}
    columns = columns if predictions.ids else {}
    columns |= _class_columns(predictions) if predictions.classes else _target_columns(predictions)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def _class_columns(predictions: Predictions) -> dict[str, list[str]]:
    columns = {"label": [table_cell(label) for label in predictions.labels]}
    for name, values in zip(predictions.classes, predictions.values.T.tolist(), strict=True):
        columns[f"p({printable(name)})"] = [f"{value:.6g}" for value in values]
    if predictions.epistemic is not None:
        best = predictions.values.argmax(1, keepdim=True)
        spread = predictions.epistemic.gather(1, best)[:, 0].tolist()
        columns["epistemic"] = [f"{value:.3g}" for value in spread]
    return columns


def _target_columns(predictions: Predictions) -> dict[str, list[str]]:
    count = predictions.values.shape[1]
    names = [table_cell(name) for name in predictions.targets]
    names = names if len(names) == count else [f"target {k}" for k in range(1, count + 1)]
    # Targets may be small differences of large numbers: all digits of float64 are written.
    columns = {
        name: [repr(value) for value in values]
        for name, values in zip(names, predictions.values.T.tolist(), strict=True)
    }
    for part in ("std", "epistemic"):
        spread = getattr(predictions, part)
        if spread is not None:
            for name, values in zip(names, spread.T.tolist(), strict=True):
                columns[f"{name} {part}"] = [f"{value:.6g}" for value in values]
    return columns
