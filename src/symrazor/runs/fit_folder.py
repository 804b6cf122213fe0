"""Run folders of `symrazor fit`, for the commands that take the folder of a discovery."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from symrazor.data.transforms import NORMALISATION, normalised
from symrazor.layers.relaxed import spatial_layers
from symrazor.runs.fit_run import CONFIG, EVENTS, NETWORK, RAZOR, READING, Run, load_run
from symrazor.symmetry.collapse import collapse
from symrazor.training.events import read_events

KINDS = {1: "vector", 2: "series", 3: "image", 4: "volume"}


def is_fit_run(folder: Path) -> bool:
    """Whether `symrazor fit` made this folder."""
    return (folder / CONFIG).is_file()


def is_own_file(folder: Path, file: Path) -> bool:
    """Whether a file is one of those that the run is read from."""
    own = (CONFIG, NETWORK, RAZOR, READING)
    return file.resolve() in {(folder / name).resolve() for name in own}


def fit_document(folder: Path) -> dict[str, Any]:
    """The document of a fit: one question with one candidate."""
    run = load_run(folder)
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
            "n": run.razor.n_data,
            "shape": list(run.shape),
            "classes": _classes(run),
        },
        "questions": [question],
    }


def _classes(run: Run) -> list[str] | None:
    """Numbers of the classes."""
    if run.config.data.likelihood != "categorical":
        return None
    return [str(label) for label in range(fit_network(run.folder)(_example(run)).shape[1])]


def _example(run: Run) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, run.config.data.dtype)
    return torch.rand(8, *run.shape, generator=generator).to(dtype)


def fit_network(folder: Path) -> nn.Module:
    """The network of a fit as plain torch modules, on data as the fit took them."""
    run = load_run(folder)
    if not spatial_layers(run.model):
        return run.model.eval()
    return collapse(run.model, _example(run), shares=run.reading)


def as_trained(folder: Path, x: torch.Tensor) -> torch.Tensor:
    """Data from a file as the fit took them: of its type, official images normalised."""
    config = load_run(folder).config.data
    x = x.to(getattr(torch, config.dtype))
    return normalised(x, config.name) if config.name in NORMALISATION else x


def predicted_mean(folder: Path, f: torch.Tensor) -> torch.Tensor:
    """The mean of y at outputs of the network: probabilities, rates, or the outputs themselves."""
    return load_run(folder).razor.likelihood.mean(f)
