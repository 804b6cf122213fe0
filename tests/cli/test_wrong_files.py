"""Pass wrong files to the command: one line, exit code 2, no memory for false headers."""

import io
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from symrazor.cli import app as cli

Case = Callable[[Path], Path]
MEMORY = 6 << 30  # address space of the command: a header that is believed would not fit


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process with limited memory."""
    return subprocess.run(
        [sys.executable, "-m", "symrazor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )


def _saved(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def _x(n: int = 40) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, 1, 8, 8)).astype(np.float32)


def _truncated(folder: Path) -> Path:
    path = _saved(folder, x=_x(), y=np.arange(40) % 2)
    path.write_bytes(path.read_bytes()[:-200])
    return path


def _npy_header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _huge_header(folder: Path) -> Path:
    (folder / "x.npy").write_bytes(_npy_header("(2684354560,)") + b"\0" * 100)
    return folder / "x.npy"


def _zip_bomb(folder: Path) -> Path:
    """Write a small file that declares 8 GiB and unpacks to many zeros."""
    with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", _npy_header("(2147483648,)") + b"\0" * (1 << 26))
        archive.writestr("y.npy", _npy_header("(16,)") + b"\0" * 64)
    assert (folder / "data.npz").stat().st_size < 1 << 17
    return folder / "data.npz"


def _lying_archive(folder: Path) -> Path:
    """Write an archive member of a few bytes whose header declares 1 GiB."""
    with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", _npy_header("(268435456,)") + b"\0" * 1000)
    return folder / "data.npz"


def _huge_idx(folder: Path) -> Path:
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 100_000, 320, 320) + b"\0" * 1000)
    return path


def _csv(text: str) -> Case:
    def write(folder: Path) -> Path:
        (folder / "data.csv").write_text(text)
        return folder / "data.csv"

    return write


def _mixed_sizes(folder: Path) -> Path:
    for name, size in (("cat", 8), ("dog", 9)):
        (folder / name).mkdir()
        for number in range(12):
            Image.new("L", (size, size)).save(folder / name / f"{number}.png")
    return folder


def _broken_image(folder: Path) -> Path:
    (folder / "cat").mkdir()
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "png")
    (folder / "cat" / "a.png").write_bytes(buffer.getvalue()[:20])
    return folder


def _nan(folder: Path) -> Path:
    x = _x()
    x[7, 0, 0, 0] = np.nan
    return _saved(folder, x=x, y=np.arange(40) % 2)


def _hub(folder: Path) -> Path:
    (folder / "dataset_info.json").write_text("{}")
    return folder


def _ragged_series(folder: Path) -> Path:
    rows = ["series,time,value,label"]
    rows += [f"{s},{t},0.5,{s % 2}" for s in range(30) for t in range(9 if s == 4 else 10)]
    (folder / "data.csv").write_text("\n".join(rows))
    return folder / "data.csv"


def _huge_labels(folder: Path) -> Path:
    np.save(folder / "x.npy", _x())
    np.save(folder / "y.npy", np.zeros((2, 0)))
    content = (folder / "y.npy").read_bytes()
    shape = b"(9007199254740993, 0), }"
    start = content.index(b"(2, 0), }")
    padding = content[start : content.index(b"\n", start)]
    header = content[:start] + shape.ljust(len(padding)) + b"\n"
    (folder / "y.npy").write_bytes(header)
    return folder


CASES: dict[str, tuple[Case, str]] = {
    "missing": (lambda f: f / "no.npz", "symrazor: No such file or folder: "),
    "truncated": (_truncated, "as an .npz file"),
    "wrong magic": (_csv("GIF89a\0\0;;;\n\x01\x02\n"), "data.csv, row 2"),
    "no format": (lambda f: _write(f / "data.xyz", b"PK\x05\x06"), "first bytes 50 4b"),
    "10 GB header": (_huge_header, "needs 10,737,418,240 bytes, but the file has"),
    "huge idx header": (_huge_idx, "shape [100000, 320, 320] needs exactly"),
    "zip bomb": (_zip_bomb, "bytes, but the file has"),
    "lying archive": (_lying_archive, "needs 1,073,741,824 bytes"),
    "ragged": (
        _csv("a,b,y\n1,2,0\n1,2\n"),
        "row 3: 2 fields, but the first row has 3",
    ),
    "text among numbers": (
        _csv("a,b,y\n1,two,0\n" * 1),
        "column 'b', data row 1: not a number ('two')",
    ),
    "empty field": (
        _csv("a,b,y\n1,2,0\n1,,0\n"),
        "column 'b', data row 2: not a finite number ('')",
    ),
    "infinite field": (
        _csv("set,b,y\n0,1,0\n0,inf,0\n"),
        "column 'b', data row 2: not a finite number ('inf')",
    ),
    "one row": (_csv("a,b,y\n1,2,0\n"), "has 1 sample; at least 20 are needed"),
    "ragged series": (_ragged_series, "series '0' has 10 rows and series '4' has 9"),
    "NaN": (_nan, "1 NaN and 0 infinite values, the first in sample 7"),
    "one class": (lambda f: _saved(f, x=_x(), y=np.zeros(40, int)), "has only the class 0"),
    "3 samples": (
        lambda f: _saved(f, x=_x(3), y=np.arange(3)),
        "has 3 samples; at least 20 are needed",
    ),
    "mixed sizes": (_mixed_sizes, "Images must have one size"),
    "broken image": (_broken_image, "Cannot read the image"),
    "no labels": (lambda f: _saved(f, x=_x()), "has no labels"),
    "pickle": (
        lambda f: _saved(f, x=np.array([{}, {}], object), y=np.zeros(2)),
        "x has type object",
    ),
    "other lengths": (
        lambda f: _saved(f, x=_x(), y=np.zeros(39)),
        "must have the same number of samples",
    ),
    "huge empty labels": (_huge_labels, "must have the same number of samples"),
    "empty folder": (lambda f: f, "the folder is empty"),
    "hugging face": (_hub, "datasets"),
}


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", CASES)
def test_wrong_files_give_one_line_and_exit_code_2(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make, message = CASES[name]
    folder = tmp_path / "data"
    folder.mkdir()
    path = make(folder)
    arguments = ["symrazor", "discover", str(path), "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as left:
        cli.main()
    text = capsys.readouterr().err
    assert left.value.code == 2
    assert message in text
    assert text.startswith("symrazor: ")
    assert text.count("\n") == 1, text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["zip bomb", "10 GB header"])
def test_no_memory_is_allocated_for_a_false_header(name: str, tmp_path: Path) -> None:
    path = CASES[name][0](tmp_path)
    process = limited("discover", str(path), "--out", str(tmp_path / "run"))
    assert process.returncode == 2, process.stdout + process.stderr
    assert "bytes, but the file has" in process.stderr
    assert process.stderr.count("\n") == 1
