"""Valid files of every format, with the function that reads them and the ways to damage them."""

import gzip
import hashlib
import io
import json
import random
import tarfile
import wave
from collections.abc import Callable
from http.client import HTTPResponse
from pathlib import Path
from typing import cast
from unittest import mock

import numpy as np
import torch
from PIL import Image

from harness.mutation import (
    Mutate,
    mutate_bytes,
    mutate_json,
    mutate_npy,
    mutate_npz,
    mutate_png,
    mutate_pt,
    mutate_text,
)
from harness.stored import (
    checkpoints,
    discoveries,
    events,
    fits,
    manifests,
    networks,
    resumed_discoveries,
    resumes,
)
from harness.target import RUN_FILE, Target, normal
from symrazor.data import download, read
from symrazor.data.other_files import read_volume
from symrazor.dynamics.trajectories import read_trajectories
from symrazor.groups.constructors import from_file
from symrazor.runs.config import read_config


def _labels(n: int = 40) -> np.ndarray:
    return np.arange(n) % 3


def npy(folder: Path) -> Target:
    """Write two arrays."""
    np.save(folder / "x.npy", normal(40, 3))
    np.save(folder / "y.npy", _labels())
    return Target("npy", lambda f, _: read(f / "x.npy"), {"x.npy": mutate_npy, "y.npy": mutate_npy})


def npz(folder: Path) -> Target:
    """Write an archive with all keys of images."""
    arrays = {
        "x": normal(40, 1, 4, 4),
        "y": _labels(),
        "x_test": normal(30, 1, 4, 4),
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


def tensors(folder: Path) -> Target:
    """Write `.pt` files: a dictionary, and a pair of another type."""
    x, y = torch.from_numpy(normal(40, 3)), torch.from_numpy(_labels())
    torch.save({"x": x, "y": y}, folder / "d.pt")
    torch.save((x.bfloat16(), y), folder / "p.pt")
    return Target(".pt", lambda f, name: read(f / name), dict.fromkeys(("d.pt", "p.pt"), mutate_pt))


def sounds(folder: Path) -> Target:
    """Write sounds of 8, 16 and 32 bits, in two classes."""
    names = []
    for number, width in enumerate((1, 2, 4) * 8):
        names.append(f"{'ab'[number % 2]}/{number}.wav")
        (folder / names[-1]).parent.mkdir(exist_ok=True)
        with wave.open(str(folder / names[-1]), "wb") as file:
            file.setparams((2, width, 8000, 0, "NONE", ""))
            file.writeframes(bytes(range(40)) * width)
    return Target("WAV", lambda f, _: read(f), dict.fromkeys(names, mutate_bytes))


def trajectories(folder: Path) -> Target:
    """Write trajectories as an archive and as a table."""
    np.savez(folder / "t.npz", states=normal(4, 10, 2), times=np.arange(10.0))
    (folder / "t.csv").write_text(TABLES["trajectories"])

    def read_one(folder: Path, name: str) -> None:
        read_trajectories(folder / name, positions=name == "t.csv")

    return Target("trajectories", read_one, {"t.npz": mutate_npz, "t.csv": mutate_text})


def toml(folder: Path) -> Target:
    """Write a configuration."""
    (folder / "run.toml").write_text(RUN_FILE)
    return Target("TOML", lambda f, _: read_config(f / "run.toml"), {"run.toml": mutate_text})


def parquet(folder: Path) -> Target:
    """Write a table with numbers and text."""
    import pyarrow
    from pyarrow import parquet as writer

    columns = {"id": [f"r{k}" for k in range(40)], "a": normal(40), "b": [*range(20)] * 2}
    table = pyarrow.table({**columns, "label": ["red", "blue"] * 20})
    writer.write_table(table, folder / "d.parquet")
    writer.write_table(table, folder / "g.parquet", compression="gzip", row_group_size=10)
    files = ("d.parquet", "g.parquet")
    return Target("Parquet", lambda f, name: read(f / name), dict.fromkeys(files, mutate_bytes))


def hdf5(folder: Path) -> Target:
    """Write data sets in one piece, and compressed in chunks."""
    import h5py

    for name, options in (("d.h5", {}), ("c.h5", {"chunks": (10, 3), "compression": "gzip"})):
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("x", data=normal(40, 3), **options)
            file["y"] = _labels()
    files = ("d.h5", "c.h5")
    return Target("HDF5", lambda f, name: read(f / name), dict.fromkeys(files, mutate_bytes))


def nifti(folder: Path) -> Target:
    """Write a volume, plain and gzipped; changes of the content are compressed again."""
    import nibabel

    names = ("a.nii", "b.nii.gz")
    for name in names:
        image = nibabel.Nifti1Image(normal(8, 8, 8).astype(np.float32), np.eye(4))
        nibabel.save(image, folder / name)

    def mutate(rng: random.Random, data: bytes) -> bytes:
        is_gzipped = data.startswith(b"\x1f\x8b")
        if not is_gzipped or rng.random() < 0.3:
            return mutate_bytes(rng, data[:400]) + data[400:]
        plain = gzip.decompress(data)
        return gzip.compress(mutate_bytes(rng, plain[:400]) + plain[400:], 1)

    def read_one(folder: Path, name: str) -> None:
        read_volume(folder / name)

    return Target("NIfTI", read_one, dict.fromkeys(names, mutate))


def groups(folder: Path) -> Target:
    """Write a group of permutations and a group of matrices."""
    (folder / "p.json").write_text('{"name": "cycle", "permutations": [[1, 2, 3, 0]]}')
    flow = {"matrices": [[[-1, 0], [0, 1]]], "lie": [[[0.0, -1.0], [1.0, 0.0]]]}
    (folder / "m.json").write_text(json.dumps({"name": "O(2)", **flow}))
    damage: dict[str, Mutate] = {"p.json": mutate_json, "m.json": mutate_json}
    return Target("groups", lambda f, name: from_file(f / name), damage)


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
        *(npy, npz, idx, csv, cifar, images, tensors, sounds, trajectories, toml, groups, events),
        *(checkpoints, networks, discoveries, fits, resumes, resumed_discoveries, manifests, tars),
        *(parquet, hdf5, nifti),
    )
}
