"""Run folders of `symrazor fit`, for the commands that take the folder of a discovery."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from symrazor.core.likelihood import as_likelihood
from symrazor.data.transforms import NORMALISATION, normalised
from symrazor.runs.fit_run import (
    CONFIG,
    EVENTS,
    NETWORK,
    PLAIN,
    RAZOR,
    READING,
    RunRecord,
    load_run,
    plain_network,
    read_run,
)
from symrazor.symmetry.architecture import ARCHITECTURE, read_network
from symrazor.training.events import read_events

KINDS = {1: "vector", 2: "series", 3: "image", 4: "volume"}


def is_fit_run(folder: Path) -> bool:
    """Whether `symrazor fit` made this folder."""
    return (folder / CONFIG).is_file()


def is_own_file(folder: Path, file: Path) -> bool:
    """Whether a file is one of those that the run is read from."""
    own = (CONFIG, NETWORK, RAZOR, READING, f"{PLAIN}/{NETWORK}")
    return file.resolve() in {(folder / name).resolve() for name in own}


def fit_document(folder: Path) -> dict[str, Any]:
    """Return the document of a fit: one question with one candidate. Builds no network."""
    run = read_run(folder)
    if len(run.shape) not in KINDS:
        raise ValueError(f"{folder / NETWORK}: inputs of {len(run.shape)} dimensions, expected 1-4")
    by_epoch = {record["epoch"]: record for record in read_events(folder / EVENTS)}
    classifies = run.config.data.likelihood in ("categorical", "bernoulli")
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
        "classes": _classes(run),
        "candidates": [candidate],
    }
    return {
        "schema": 1,
        "kind": KINDS[len(run.shape)],
        "task": "classification" if classifies else "regression",
        "command": f"symrazor fit {folder / CONFIG}",
        "versions": dict(run.reading.versions),
        "data": {
            "path": str(run.config.data.path or run.config.data.name),
            "n": run.n_data,
            "shape": list(run.shape),
            "classes": _classes(run),
        },
        "questions": [question],
    }


def _classes(run: RunRecord) -> list[str] | None:
    """Return the numbers of the classes as text."""
    if run.config.data.likelihood != "categorical":
        return None
    return [str(label) for label in range(run.width)]


def fit_network(folder: Path, trust_code: bool = False) -> nn.Module:
    """Return the network of a fit as plain torch modules, on data as the fit took them.

    It is read from `plain/`. Without this folder it is rebuilt from `config.toml`.

    Args:
        folder: of the run.
        trust_code: see `load_run`; only for a network without a description in `plain/`.
    """
    if (folder / PLAIN / ARCHITECTURE).is_file():
        return read_network(folder / PLAIN)
    run = load_run(folder, trust_code)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, run.config.data.dtype)
    example = torch.rand(8, *run.shape, generator=generator).to(dtype)
    return plain_network(run.model, run.reading, example)


def as_trained(folder: Path, x: torch.Tensor) -> torch.Tensor:
    """Data from a file as the fit took them: of its type, official images normalised."""
    config = read_run(folder).config.data
    x = x.to(getattr(torch, config.dtype))
    return normalised(x, config.name) if config.name in NORMALISATION else x


def predicted_mean(folder: Path, f: torch.Tensor) -> torch.Tensor:
    """The mean of y at outputs of the network: probabilities, rates, or the outputs themselves."""
    return as_likelihood(read_run(folder).config.data.likelihood).mean(f)
