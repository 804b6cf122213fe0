"""Large NumPy and IDX files: constant memory, and the numbers of small files."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import symrazor as sr
from symrazor.core.files import BUDGET_VARIABLE
from symrazor.data import arrays, binary_files, shapes
from symrazor.discovery.api import fitting_memory
from symrazor.runs.predictions import predict

SIDE = 32
MEBIBYTE = 1 << 20


def write(path: Path, n: int) -> None:
    """Write n images and their labels; all bytes but those of a few images are holes of a file."""
    shape = (n, SIDE, SIDE)
    labels = (np.arange(n) % 2).astype(np.uint8)
    if path.suffix == ".npy":
        x = np.lib.format.open_memmap(path, "w+", np.dtype("u1"), shape)
        np.save(path.with_name("y.npy"), labels)
    else:
        header = bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + n * SIDE * SIDE)
        x = np.memmap(path, np.uint8, "r+", len(header), shape)
        label_file = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
        label_file.write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", n) + labels.tobytes())
    rng = np.random.default_rng(0)
    for k in range(0, n, max(1, n // 200)):
        x[k] = rng.integers(0, 100, (SIDE, SIDE))


MEASURE = """
import json, sys, threading, time, warnings
from pathlib import Path
import torch
import symrazor as sr
from symrazor.data import arrays, binary_files, shapes
from symrazor.discovery.api import fitting_memory
from symrazor.runs.predictions import predict

warnings.simplefilter("ignore")
for module in (arrays, binary_files, shapes):
    module.LARGE_BYTES = 1 << 20  # small files, so that networks are fast
what, file, run = sys.argv[1:]

def private():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(lines["RssAnon"].split()[0]) * 1024

peak = 0

def watch():
    global peak
    while True:
        peak = max(peak, private())
        time.sleep(0.0005)

def act(file):
    if what == "read":
        sr.data.read(file)
    elif what == "predict":
        predict(Path(run), Path(file))
    elif what == "fit":
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1024, 2))
        sr.fit(model, sr.data.read(file), epochs=1, batch_size=500, subset=500, refine=0)
    else:
        fitting_memory(sr.data.read(file), 0)

act(file)
before = private()
threading.Thread(target=watch, daemon=True).start()
act(file)
print(json.dumps(peak - before))
"""


def peak_bytes(what: str, file: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how much memory, without mapped files, a child process takes at most."""
    budget = 128 if what == "predict" else 4  # a document takes a multiple of its file
    monkeypatch.setenv(BUDGET_VARIABLE, str(budget * MEBIBYTE))
    command = [sys.executable, "-c", MEASURE, what, str(file), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Discover on a few vectors, for `predict`."""
    folder = tmp_path_factory.mktemp("run")
    write(folder / "x.npy", 60)
    sr.discover(folder / "x.npy", kind="vector", epochs=1, starts=1).save(folder / "run")
    return folder / "run"


@pytest.mark.parametrize("name", ["x.npy", "train-images-idx3-ubyte"])
@pytest.mark.parametrize(
    "what", ["read", *(pytest.param(w, marks=pytest.mark.slow) for w in ("predict", "fit", "part"))]
)
def test_the_memory_does_not_grow_with_the_file(
    what: str, name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = []
    for mebibytes in (8, 32):
        folder = tmp_path / str(mebibytes)
        folder.mkdir()
        write(folder / name, mebibytes * MEBIBYTE // SIDE**2)
        peaks.append(peak_bytes(what, folder / name, run, monkeypatch))
    assert peaks[1] - peaks[0] < 12 * MEBIBYTE, peaks  # bytes take 24 MiB more, float32 96 MiB


def test_large_files_give_the_numbers_of_small_ones(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x.npy", "train-images-idx3-ubyte"):
        write(tmp_path / name, 700)
    colours = np.random.default_rng(0).integers(0, 256, (40, 9, 9, 3))
    for dtype in ("u1", "i2", "i8", "f2", "f8"):
        np.savez(tmp_path / f"{dtype}.npz", x=colours.astype(dtype), y=np.arange(40) % 2)
    files = sorted(file for file in tmp_path.iterdir() if "label" not in file.name)
    files.remove(tmp_path / "y.npy")

    def results() -> list[torch.Tensor]:
        data = [sr.data.read(file) for file in files]
        stored.append({str(part.x.dtype) for part in data})
        values = [fitting_memory(part, 0).x for part in data]
        outputs = [
            predict(run, tmp_path / "x.npy"),
            predict(run, tmp_path / "train-images-idx3-ubyte"),
        ]
        return [*values, *(part.values for part in outputs)]

    stored: list[set[str]] = []
    small = results()
    for module in (arrays, binary_files, shapes):
        monkeypatch.setattr(module, "LARGE_BYTES", 1)
    large = results()
    assert {"torch.uint8", "torch.int16", "torch.int64", "torch.float16"} <= stored[1]
    assert stored[0] == {"torch.float32", "torch.float64"}
    for one, other in zip(small, large, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.is_contiguous()


def test_fit_streams_data_that_were_read(tmp_path: Path) -> None:
    write(tmp_path / "x.npy", 60)
    data = sr.data.read(tmp_path / "x.npy")

    def train(data: object) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE**2, 2))
        return float(sr.fit(model, data, epochs=2, every=1, burn_in=0).evidence.log_evidence)

    assert train(data) == pytest.approx(train(data.labelled), rel=1e-6)
