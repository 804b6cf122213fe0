"""Run folders and their parts, as targets; see `harness.samples` for files of data."""

import hashlib
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import symrazor as sr
from harness.mutation import (
    Mutate,
    mutate_json,
    mutate_safetensors,
    mutate_text,
)
from harness.target import RUN_FILE, Target, normal
from symrazor.discovery.result import Discovery
from symrazor.dynamics.journal import Journal
from symrazor.runs import load_run, run
from symrazor.runs.config import read_config
from symrazor.runs.folder import read_document, write_report
from symrazor.runs.predictions import predict, write_predictions
from symrazor.runs.writing import MANIFEST, read_manifest
from symrazor.symmetry.architecture import read_network
from symrazor.training.checkpoint import Checkpoints
from symrazor.training.events import read_events


def events(folder: Path) -> Target:
    """Write the records of a training."""
    lines = [json.dumps({"epoch": k, "nll": 1.0 / (k + 1)}) for k in range(5)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return Target(
        "events", lambda f, _: read_events(f / "events.jsonl"), {"events.jsonl": mutate_text}
    )


def checkpoints(folder: Path) -> Target:
    """Write a checkpoint and a journal; sums of a changed state are corrected."""
    training = {"belongs_to": {"a": torch.ones(3)}, "state": {"seconds": 1.0}}
    state = {"trainings": [training], "decisions": {}}
    place = Checkpoints(folder).save(state, 3, 1).relative_to(folder)

    def load(folder: Path, _: str) -> None:
        Checkpoints(folder).load()
        _ = Journal(folder).seconds

    damage: dict[str, Mutate] = {
        f"{place}/state.json": mutate_json,
        f"{place}/tensors.safetensors": mutate_safetensors,
    }
    return Target("checkpoints", load, damage, spoil=partial(_correct_sums, str(place)))


def _correct_sums(place: str, rng: random.Random, folder: Path) -> None:
    """Give a changed checkpoint the sums of its parts, as a stranger would."""
    try:
        document = json.loads((folder / place / "state.json").read_bytes())
        text = json.dumps(document["state"], sort_keys=True).encode()
        document["state_blake2b"] = hashlib.blake2b(text, digest_size=16).hexdigest()
        tensors = (folder / place / "tensors.safetensors").read_bytes()
        document["tensors_blake2b"] = hashlib.blake2b(tensors).hexdigest()
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    (folder / place / "state.json").write_text(json.dumps(document))


def _discovery() -> Discovery:
    x = torch.from_numpy(normal(40, 3)).float()
    return sr.discover(x, x[:, 0] > 0, epochs=1)


def networks(folder: Path) -> Target:
    """Write a network as architecture.json and weights."""
    _discovery().save(folder / "run")
    for name in ("architecture.json", "network.safetensors"):
        (folder / name).write_bytes((folder / "run" / name).read_bytes())
    damage: dict[str, Mutate] = {
        "architecture.json": mutate_json,
        "network.safetensors": mutate_safetensors,
    }
    return Target("architecture.json", lambda f, _: read_network(f), damage)


def discoveries(folder: Path) -> Target:
    """Write the run folder of a discovery, and inputs for its network."""
    _discovery().save(folder / "run")
    np.savez(folder / "new.npz", x=normal(5, 3).astype(np.float32))

    def use(folder: Path, _: str) -> None:
        try:
            write_report(folder / "run", read_document(folder / "run"))
        finally:
            write_predictions(predict(folder / "run", folder / "new.npz"), folder / "p.csv")

    damage: dict[str, Mutate] = {
        "run/discover.json": mutate_json,
        "run/architecture.json": mutate_json,
        "run/network.safetensors": mutate_safetensors,
        "run/uncertainty.safetensors": mutate_safetensors,
    }
    return Target("run of discover", use, damage, sealed=True)


def fits(folder: Path) -> Target:
    """Write the run folder of a fit."""
    (folder / "run.toml").write_text(RUN_FILE)
    run(read_config(folder / "run.toml"), folder / "run")
    np.savez(folder / "new.npz", x=normal(5, 1, 8, 8).astype(np.float32))
    names = ("config.toml", "events.jsonl", "reading.json", "network.safetensors")

    def use(folder: Path, _: str) -> None:
        try:
            write_report(folder / "run", read_document(folder / "run"))
        finally:
            write_predictions(predict(folder / "run", folder / "new.npz"), folder / "p.npz")
            load_run(folder / "run")

    kinds = (mutate_text, mutate_text, mutate_json, mutate_safetensors)
    damage = {f"run/{name}": kind for name, kind in zip(names, kinds, strict=True)}
    damage |= {"run/razor.safetensors": mutate_safetensors}
    damage |= {"run/plain/network.safetensors": mutate_safetensors}
    damage |= {"run/plain/architecture.json": mutate_json}
    damage |= {"run/plain/uncertainty.safetensors": mutate_safetensors}
    return Target("run of fit", use, damage, sealed=True)


def resumes(folder: Path) -> Target:
    """Write the checkpoint of a finished training, from which a hostile one is continued."""
    x = torch.from_numpy(normal(20, 3)).float()
    y = (x[:, 0] > 0).long()

    def resume(folder: Path, _: str = "") -> None:
        for other in (folder / "checkpoints").glob("*"):  # of the last input
            if other != place:
                shutil.rmtree(other)
        torch.manual_seed(0)
        sr.fit(torch.nn.Linear(3, 2), (x, y), epochs=1, resume=folder / "checkpoints")

    place = Path()
    resume(folder)
    place = Checkpoints(folder / "checkpoints").paths()[-1]
    name = str(place.relative_to(folder))
    damage: dict[str, Mutate] = {
        f"{name}/state.json": mutate_json,
        f"{name}/tensors.safetensors": mutate_safetensors,
    }
    return Target("resumed fit", resume, damage, spoil=partial(_correct_sums, name))


def resumed_discoveries(folder: Path) -> Target:
    """Write the folder of a discovery that was killed near its end, from which it is resumed."""
    x = torch.from_numpy(normal(40, 3)).float()
    y = (x[:, 0] > 0).long()
    sr.discover(x, y, epochs=1, out=folder / "killed")
    (started,) = (folder / "killed" / "unfinished").iterdir()
    state = sorted(started.glob("two*/step*"))[-1]
    place = state.relative_to(folder)

    def copy(rng: random.Random, folder: Path) -> None:
        _correct_sums(str(place), rng, folder)
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "killed", folder / "run")

    def resume(folder: Path, _: str) -> None:
        sr.discover(x, y, epochs=1, out=folder / "run")

    damage: dict[str, Mutate] = {
        str(file.relative_to(folder)): mutate_json for file in sorted(started.glob("*.json"))
    }
    damage |= {f"{place}/state.json": mutate_json}
    damage |= {f"{place}/tensors.safetensors": mutate_safetensors}
    return Target("resumed discovery", resume, damage, spoil=copy)


def manifests(folder: Path) -> Target:
    """Write the run folder of a discovery; its manifest is changed."""
    _discovery().save(folder / "run")

    def use(folder: Path, _: str) -> None:
        read_manifest(folder / "run")
        read_document(folder / "run")

    return Target("run.json", use, {f"run/{MANIFEST}": mutate_json})


def reseal(folder: Path) -> None:
    """Store the sums of all parts in `run.json`; written here to be fast and independent."""
    document: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    for name in document["files"]:
        if (folder / name).is_file():
            document["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(document))
