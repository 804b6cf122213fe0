"""Valid files of every format, with the function that reads them and the ways to damage them."""

import gzip
import hashlib
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from PIL import Image

import symrazor as sr
from harness.mutation import (
    Mutate,
    mutate_bytes,
    mutate_json,
    mutate_npy,
    mutate_npz,
    mutate_png,
    mutate_safetensors,
    mutate_text,
)
from symrazor.data import download, read
from symrazor.discovery.result import Discovery
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.trajectories import read_trajectories
from symrazor.groups.constructors import from_file
from symrazor.runs import load_run, run
from symrazor.runs.config import read_config
from symrazor.runs.folder import read_document, write_report
from symrazor.runs.predictions import predict
from symrazor.runs.writing import MANIFEST, read_manifest
from symrazor.symmetry.architecture import read_network
from symrazor.training.checkpoint import Checkpoints
from symrazor.training.events import read_events

RUN_FILE = """
[data]
name = "digits"
limit = 40

[model]
width = 2
groups = ["translation"]

[fit]
epochs = 1
every = 1
burn_in = 0
batch_size = 20

[razor]
estimator = "mc"
"""


@dataclass(frozen=True)
class Target:
    """A reader under attack.

    Args:
        name: name in the table.
        read: reads the files in a folder, of which one was changed.
        damage: file in the folder -> function that changes its content.
        sealed: whether a changed file is given its new sum in `run.json`, as a stranger would.
        spoil: called with the folder after a file was changed.
    """

    name: str
    read: Callable[[Path, str], object]
    damage: dict[str, Mutate]
    sealed: bool = False
    spoil: Callable[[random.Random, Path], None] | None = None


def _x(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def _labels(n: int = 40) -> np.ndarray:
    return np.arange(n) % 3


def npy(folder: Path) -> Target:
    """Write two arrays."""
    np.save(folder / "x.npy", _x(40, 3))
    np.save(folder / "y.npy", _labels())
    return Target("npy", lambda f, _: read(f / "x.npy"), {"x.npy": mutate_npy, "y.npy": mutate_npy})


def npz(folder: Path) -> Target:
    """Write an archive with all keys of images."""
    arrays = {
        "x": _x(40, 1, 4, 4),
        "y": _labels(),
        "x_test": _x(30, 1, 4, 4),
        "y_test": _labels(30),
    }
    np.savez(folder / "data.npz", names=np.array(["a", "b", "c"]), kind=np.array("image"), **arrays)
    return Target("npz", lambda f, _: read(f / "data.npz"), {"data.npz": mutate_npz})


def idx(folder: Path) -> Target:
    """Write images, and gzipped labels."""
    pixels = (np.arange(40 * 16) % 256).astype(np.uint8).tobytes()
    shape = b"".join(n.to_bytes(4, "big") for n in (40, 4, 4))
    (folder / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + shape + pixels)
    labels = b"\0\0\x08\x01" + (40).to_bytes(4, "big") + bytes(k % 3 for k in range(40))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz")

    def spoil(rng: random.Random, folder: Path) -> None:
        if rng.random() < 0.3:
            (folder / files[1]).write_bytes(gzip.compress(mutate_bytes(rng, labels)))

    return Target("IDX", lambda f, _: read(f), dict.fromkeys(files, mutate_bytes), spoil=spoil)


TABLES = {
    "vectors": "a,b,y\n" + "".join(f"{k}.5,{k * k},{k % 3}\n" for k in range(30)),
    "series": "series,time,value,label\n"
    + "".join(f"s{k // 9},{k % 9},{k}.25,{k // 9 % 2}\n" for k in range(180)),
    "sets": "set;u;v;label\n" + "".join(f"{k // 4};{k};{-k};{k // 4 % 2}\n" for k in range(88)),
    "trajectories": "trajectory,time,q1,p1\n"
    + "".join(f"{k // 6},{k % 6},{k}.5,{-k}\n" for k in range(36)),
}


def csv(folder: Path) -> Target:
    """Write a table of each kind."""
    for name, text in TABLES.items():
        (folder / f"{name}.csv").write_text(text)
    names = [f"{name}.csv" for name in TABLES]
    return Target("CSV", lambda f, name: read(f / name), dict.fromkeys(names, mutate_text))


def cifar(folder: Path) -> Target:
    """Write a batch of 20 images."""
    record = b"\1" + bytes(3072) + b"\2" + b"\7" * 3072
    (folder / "data_batch_1.bin").write_bytes(record * 10)
    return Target("CIFAR", lambda f, _: read(f), {"data_batch_1.bin": mutate_bytes})


def images(folder: Path) -> Target:
    """Write images in every format, in two classes."""
    pixels = (np.arange(192).reshape(8, 8, 3) % 256).astype(np.uint8)
    names = []
    for number in range(4):
        for end in ("png", "jpg", "gif", "bmp", "tif", "webp"):
            names.append(f"{'ab'[number % 2]}/{number}.{end}")
            (folder / names[-1]).parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(folder / names[-1])
    return Target("images", lambda f, _: read(f), dict.fromkeys(names, mutate_png))


def trajectories(folder: Path) -> Target:
    """Write trajectories as an archive and as a table."""
    np.savez(folder / "t.npz", states=_x(4, 10, 2), times=np.arange(10.0))
    (folder / "t.csv").write_text(TABLES["trajectories"])

    def read_one(folder: Path, name: str) -> None:
        read_trajectories(folder / name, positions=name == "t.csv")

    return Target("trajectories", read_one, {"t.npz": mutate_npz, "t.csv": mutate_text})


def toml(folder: Path) -> Target:
    """Write a configuration."""
    (folder / "run.toml").write_text(RUN_FILE)
    return Target("TOML", lambda f, _: read_config(f / "run.toml"), {"run.toml": mutate_text})


def groups(folder: Path) -> Target:
    """Write a group of permutations and a group of matrices."""
    (folder / "p.json").write_text('{"name": "cycle", "permutations": [[1, 2, 3, 0]]}')
    flow = {"matrices": [[[-1, 0], [0, 1]]], "lie": [[[0.0, -1.0], [1.0, 0.0]]]}
    (folder / "m.json").write_text(json.dumps({"name": "O(2)", **flow}))
    damage: dict[str, Mutate] = {"p.json": mutate_json, "m.json": mutate_json}
    return Target("groups", lambda f, name: from_file(f / name), damage)


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
    x = torch.from_numpy(_x(40, 3)).float()
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
    np.savez(folder / "new.npz", x=_x(5, 3).astype(np.float32))

    def use(folder: Path, _: str) -> None:
        try:
            write_report(folder / "run", read_document(folder / "run"))
        finally:
            predict(folder / "run", folder / "new.npz")

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
    np.savez(folder / "new.npz", x=_x(5, 1, 8, 8).astype(np.float32))
    names = ("config.toml", "events.jsonl", "reading.json", "network.safetensors")

    def use(folder: Path, _: str) -> None:
        try:
            write_report(folder / "run", read_document(folder / "run"))
        finally:
            predict(folder / "run", folder / "new.npz")
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
    x = torch.from_numpy(_x(20, 3)).float()
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
    x = torch.from_numpy(_x(40, 3)).float()
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


def tars(folder: Path) -> Target:
    """Write the archive of a data set; a faked server sends it."""
    content = bytes(range(256)) * 40
    file = download.PublishedFile("a.bin", len(content), hashlib.sha256(content).hexdigest())
    publisher = download.Publisher("https://server/", (file,), "all.tar.gz")
    member = tarfile.TarInfo("folder/a.bin")
    member.size = len(content)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
        archive.addfile(tarfile.TarInfo("../../outside"), io.BytesIO())
    (folder / "all.tar").write_bytes(buffer.getvalue())

    def fetch(folder: Path, _: str) -> None:
        sent = (folder / "all.tar").read_bytes()
        sent = gzip.compress(sent, 1) if not sent.startswith(b"\x1f\x8b") else sent

        def answer(address: str) -> HTTPResponse:
            return cast(HTTPResponse, io.BytesIO(sent))

        with mock.patch.object(download, "_open_url", answer):
            (folder / "data" / "a.bin").unlink(missing_ok=True)
            download.download(publisher, folder / "data")

    def mutate_tar(rng: random.Random, data: bytes) -> bytes:
        if rng.random() < 0.2:
            return mutate_bytes(rng, gzip.compress(data, 1))
        return mutate_bytes(rng, data[:1024]) + data[1024:]

    return Target("tar", fetch, {"all.tar": mutate_tar})


TARGETS: dict[str, Callable[[Path], Target]] = {
    make.__name__: make
    for make in (
        *(npy, npz, idx, csv, cifar, images, trajectories, toml, groups, events, checkpoints),
        *(networks, discoveries, fits, resumes, resumed_discoveries, manifests, tars),
    )
}


def reseal(folder: Path) -> None:
    """Store the sums of all parts in `run.json`; written here to be fast and independent."""
    document: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    for name in document["files"]:
        if (folder / name).is_file():
            document["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(document))
