"""Read the folder of a finished fit: its configuration, network and reading."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from symrazor.core.files import parse_json, reader
from symrazor.core.likelihood import as_likelihood
from symrazor.data import TensorLoader, Tensors
from symrazor.groups.constructors import is_group_file
from symrazor.inference.posterior import How, Prediction
from symrazor.inference.razor import Razor
from symrazor.report.content import SCHEMA
from symrazor.runs.building import make_data, make_model
from symrazor.runs.config import RunConfig, read_config, refuse_code
from symrazor.runs.writing import MANIFEST, Manifest, digest, inside, read_manifest
from symrazor.symmetry.reading import Reading
from symrazor.training.events import read_events
from symrazor.training.evidence_training import outputs

CONFIG, CHECKPOINTS, EVENTS = "config.toml", "checkpoints", "events.jsonl"
NETWORK, RAZOR, READING = "network.safetensors", "razor.safetensors", "reading.json"
MAX_NUMBERS = 2**26
"""Largest size of one input or output that a file may declare; memory is allocated for it."""
KINDS_BY_DIMS = {1: "vector", 2: "series", 3: "image", 4: "volume"}


def verify(folder: Path, *names: str) -> Manifest:
    """Return the manifest of a finished run after checking that the named parts belong to it.

    Raises:
        ValueError: no run, an unfinished run, or a part that is missing or belongs to another run.
    """
    if not folder.is_dir():
        raise ValueError(f"No such run folder: {folder}.")
    manifest = read_manifest(folder)
    if manifest is None:
        raise ValueError(
            f"{folder} is not the folder of a finished run: it has no {MANIFEST}. Run symrazor "
            "discover or symrazor fit again; folders of earlier versions are not read."
        )
    if manifest.files is None:
        action = "Run the same command again"
        if manifest.owner.command == "fit":
            action = f"Run symrazor fit --out {quote(str(folder))} --resume"
        raise ValueError(f"The run in {folder} is not finished. {action} to resume it.")
    for name in names:
        path = inside(folder, name)
        if name not in manifest.files:
            raise ValueError(f"{path} is not part of the run in {folder}. Run it again.")
        if not path.is_file():
            raise ValueError(f"No such file: {path}. It is part of the run. Run it again.")
        if digest(path) != manifest.files[name]:
            raise ValueError(
                f"{path} does not belong to the run in {folder}: it was changed, damaged or written"
                " by another run (wrong SHA-256 sum). Restore it, or run again."
            )
    return manifest


@dataclass(frozen=True)
class RunRecord:
    """A finished fit without its network.

    Args:
        folder: the run folder.
        config: its configuration.
        reading: what was learned.
        shape: shape of one input.
        outputs: classes, or columns of the targets.
        width: outputs of the network.
        n_data: training samples.
    """

    folder: Path
    config: RunConfig
    reading: Reading
    shape: tuple[int, ...]
    outputs: int
    width: int
    n_data: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the inputs and weights."""
        dtype: torch.dtype = getattr(torch, self.config.data.dtype)
        return dtype


@dataclass(frozen=True)
class Run(RunRecord):
    """A finished fit with its network.

    Args:
        model: the trained network, in eval mode, on the CPU.
        razor: the learned prior and likelihood.
    """

    model: nn.Module
    razor: Razor

    def data(self) -> tuple[Tensors, Tensors | None]:
        """Read training and test data from their files."""
        return make_data(self.config.data)

    def predict(self, x: Tensor, how: How | None = None) -> Prediction:
        """Return the predictive mean at x.

        Args:
            x: inputs.
            how: None to predict with the trained weights; otherwise see `Posterior.predict`. The
                posterior is not stored, and is computed again from the training data.
        """
        if how is None:
            return Prediction(self.razor.likelihood.mean(outputs(self.model, x)))
        return self.razor.posterior(TensorLoader(*self.data()[0], 500)).predict(x, how)


def is_fit_run(folder: Path) -> bool:
    """Return whether a folder belongs to `symrazor fit`; ValueError if its mark is damaged."""
    manifest = read_manifest(folder)
    return manifest is not None and manifest.owner.command == "fit"


@reader
def read_run(folder: str | Path) -> RunRecord:
    """Read the record of a finished fit; imports nothing and builds no network.

    Raises ValueError for a folder that is not a run, an unfinished run, and damaged files.
    """
    run = Path(folder)
    if not is_fit_run(run):
        raise ValueError(f"{run} is not the folder of a fit.")
    verify(run, CONFIG, NETWORK, READING)
    config = read_config(run / CONFIG)
    try:
        with safe_open(run / NETWORK, "pt") as file:
            record = {k: json.loads(v) for k, v in (file.metadata() or {}).items()}
        reading = Reading.from_dict(parse_json(run / READING))
        shape, n_outputs = tuple(map(int, record["input"])), int(record["outputs"])
        width, n_data = int(record.get("width", n_outputs)), int(record["n_data"])
        if not (0 < prod(shape) <= MAX_NUMBERS and 0 < max(n_outputs, width) <= MAX_NUMBERS):
            raise ValueError(f"inputs {list(shape)} and {width} outputs in {NETWORK}")
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"Damaged files in {run}: {error}") from error
    return RunRecord(run, config, reading, shape, n_outputs, width, n_data)


@reader
def load_run(folder: str | Path, trust_code: bool = False) -> Run:
    """Read a finished fit and rebuild its network from `config.toml`.

    Args:
        folder: the run folder.
        trust_code: import the function that `config.toml` names as the network. That runs code;
            use it only for a run that you trust.

    Raises:
        ValueError: not a run, an unfinished run, files that do not belong together, or code in
            `config.toml` without `trust_code`.
    """
    record = read_run(folder)
    verify(record.folder, RAZOR, *_group_files(record.config, record.folder))
    run, config = record.folder, record.config
    if not trust_code:
        refuse_code(run / CONFIG, {k: v for k, v in config.code().items() if k == "model.name"})
    try:
        weights, learned = load_file(run / NETWORK), load_file(run / RAZOR)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"Damaged files in {run}: {error}") from error
    model = make_model(config.model, record.shape, record.outputs, record.dtype)
    likelihood = as_likelihood(config.data.likelihood)
    try:
        model.load_state_dict(weights)
        razor = Razor(model.eval(), likelihood, record.n_data, config.fit.razor)
        for name, part in {"prior": razor.prior, "likelihood": likelihood}.items():
            prefix = f"{name}/"
            part.load_state_dict(
                {k.removeprefix(prefix): v for k, v in learned.items() if k.startswith(prefix)}
            )
    except RuntimeError as error:
        raise ValueError(
            f"{run / NETWORK} does not hold the network of {CONFIG}: {error}"
        ) from error
    return Run(**vars(record), model=model, razor=razor)


def _group_files(config: RunConfig, folder: Path) -> list[str]:
    """Return the names of the group files in a run folder that a configuration uses."""
    files = [Path(group) for group in config.model.groups if is_group_file(group)]
    return [file.name for file in files if file.parent == folder.absolute()]


@reader
def fit_document(folder: Path) -> dict[str, Any]:
    """Return the document of a fit: one question with one candidate; builds no network."""
    run = read_run(folder)
    verify(folder, EVENTS)
    if len(run.shape) not in KINDS_BY_DIMS:
        raise ValueError(
            f"{folder / NETWORK}: inputs must have 1 to 4 dimensions, got {len(run.shape)}."
        )
    by_epoch = {record["epoch"]: record for record in read_events(folder / EVENTS)}
    likelihood = run.config.data.likelihood
    is_classifier = likelihood in ("categorical", "bernoulli")
    classes = [str(k) for k in range(run.width)] if likelihood == "categorical" else None
    candidate = {
        "name": run.config.model.name,
        "reading": run.reading.to_dict(),
        "history": [by_epoch[epoch] for epoch in sorted(by_epoch)],  # a resumed run repeats some
    }
    question = {
        "name": folder.name,
        "question": "What did the network learn?",
        "verdict": run.reading.verdict,
        "margin": None,
        "classes": classes,
        "candidates": [candidate],
    }
    return {
        "schema": SCHEMA,
        "kind": KINDS_BY_DIMS[len(run.shape)],
        "task": "classification" if is_classifier else "regression",
        "command": f"symrazor fit {folder / CONFIG}",
        "versions": dict(run.reading.versions),
        "data": {
            "path": str(run.config.data.path or run.config.data.name),
            "n": run.n_data,
            "shape": list(run.shape),
            "classes": classes,
        },
        "questions": [question],
    }
