"""Files of strangers: one kind of error, one memory budget for each file."""

import os
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import symrazor as sr
from symrazor.core.errors import OtherRunError
from symrazor.core.files import BUDGET_VARIABLE, reader, reading, reserve
from symrazor.core.text import printable, table_cell
from symrazor.data import read
from symrazor.data.batches import LARGE_BYTES
from symrazor.data.binary_files import read_npy
from symrazor.dynamics.trajectories import read_trajectories


@pytest.mark.parametrize("error", [KeyError("a"), RecursionError(), MemoryError(), SyntaxError()])
def test_every_error_names_the_file(error: Exception) -> None:
    @reader
    def read_file(path: Path) -> None:
        raise error

    with pytest.raises(ValueError, match="Cannot read some.file: .") as caught:
        read_file(Path("some.file"))
    assert caught.value.__cause__ is error


def test_errors_of_the_system_stay(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_npy(tmp_path / "missing.npy")


def test_damage_that_looks_like_an_error_of_the_system_names_the_file(tmp_path: Path) -> None:
    """A wrong offset in the directory of an archive makes zipfile seek to a negative position."""
    np.savez(tmp_path / "data.npz", x=np.zeros((30, 2)), y=np.arange(30))
    content = bytearray((tmp_path / "data.npz").read_bytes())
    end = content.rfind(b"PK\x05\x06")
    content[end + 16] ^= 16  # the offset of the directory
    (tmp_path / "data.npz").write_bytes(bytes(content))
    with pytest.raises(ValueError, match="Cannot read .*data.npz"):
        read(tmp_path / "data.npz")


def test_a_part_of_an_image_that_declares_4_gib_takes_no_memory(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.new("L", (8, 8)).save(tmp_path / "a" / "0.png")
    content = (tmp_path / "a" / "0.png").read_bytes()
    end = content.index(b"IEND") - 4
    (tmp_path / "a" / "0.png").write_bytes(content[:end] + b"\x7f\xff\xff\xffIDAT" + bytes(9))
    tracemalloc.start()
    with suppress(ValueError):
        read(tmp_path, labelled=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_errors_of_another_run_stay_and_others_name_the_file() -> None:
    for error in (RuntimeError("wrong shape"), ValueError("wrong shape")):
        with pytest.raises(ValueError, match=r"^Cannot read a.file: .*wrong shape\.$"):
            with reading("a.file"):
                raise error
    with pytest.raises(OtherRunError, match="^other data$"), reading("a.file"):
        raise OtherRunError("other data")


def test_the_budget_holds_for_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two arrays fits, both together do not."""
    x = np.random.default_rng(0).normal(size=(100, 1000))
    np.savez_compressed(tmp_path / "data.npz", x=x, y=x[:, 0], x_test=x, y_test=x[:, 0])
    monkeypatch.setenv(BUDGET_VARIABLE, "1000000")
    with pytest.raises(ValueError, match=r"data.npz needs .* left for this file"):
        read(tmp_path / "data.npz")
    monkeypatch.setenv(BUDGET_VARIABLE, "2000000")
    read(tmp_path / "data.npz", task="regression")
    read(tmp_path / "data.npz", task="regression")  # a new budget
    reserve(10**18, "data in memory")  # outside of a reader there is no budget
    monkeypatch.setenv(BUDGET_VARIABLE, "much")
    with pytest.raises(ValueError, match=f"{BUDGET_VARIABLE} must be a number"):
        read(tmp_path / "data.npz")


@pytest.mark.parametrize("name", ["wide.csv", "t.npz", "c.bin", "long.csv", "integers.npz"])
def test_other_formats_have_the_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    if name == "wide.csv":
        file.write_text("1," * 10_000 + "0\n" + "1," * 10_000 + "1\n")
    elif name == "long.csv":  # 1 trajectory of 400 steps and 400 of 1 step, which are padded
        rows = [f"a,{k},1,1" for k in range(400)] + [f"t{k},0,1,1" for k in range(400)]
        file.write_text("\n".join(["trajectory,time,q,p", *rows]))
    elif name == "integers.npz":  # become float32
        np.savez_compressed(file, x=np.ones((1000, 100), np.int16) * 1000, y=np.arange(1000))
    elif name == "c.bin":
        file.write_bytes(bytes(3073 * 200))
    else:
        np.savez_compressed(file, states=np.zeros((50, 100, 20)), times=np.arange(100.0))
    monkeypatch.setenv(BUDGET_VARIABLE, "2000000" if name == "long.csv" else "500000")
    with pytest.raises(ValueError, match=r"left for this file"):
        (read_trajectories if name == "t.npz" else read)(file)


def test_images_have_the_budget_and_start_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        (tmp_path / name).mkdir()
        image.new("L", (2000, 2000)).save(tmp_path / name / "0.png")
    monkeypatch.setenv(BUDGET_VARIABLE, "4000000")
    with pytest.raises(ValueError, match="left for this file"):
        read(tmp_path)
    monkeypatch.delenv(BUDGET_VARIABLE)
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "a" / "0.png").write_bytes(page)
    with pytest.raises(ValueError, match="Cannot read the image .*cannot identify"):
        read(tmp_path)


def test_a_large_array_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no memory of the budget, and writing to it does not change the file."""
    n = LARGE_BYTES // 8000 + 1
    np.save(tmp_path / "x.npy", np.ones((n, 1000)))
    monkeypatch.setenv(BUDGET_VARIABLE, "1000")
    array = read_npy(tmp_path / "x.npy")
    assert isinstance(array, np.memmap) and array.shape == (n, 1000)
    array[0] = 2.0
    assert float(read_npy(tmp_path / "x.npy")[0, 0]) == 1.0


@pytest.mark.parametrize("name", ["x.csv", "a/0.png", "a/0.wav", "a/0.npy", "i/t-images-idx3"])
def test_a_pipe_among_the_files_does_not_wait_forever(name: str, tmp_path: Path) -> None:
    file = tmp_path / "data" / name
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    source = file if name == "x.csv" else file.parents[name.count("/") - (name[0] == "i")]
    with pytest.raises(ValueError, match=rf"{file.name} is a pipe or a device, not a file"):
        read(source)


def test_an_encrypted_archive_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((30, 2)), y=np.zeros(30))
    content = bytearray((tmp_path / "data.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "data.npz") as archive:
        assert archive.namelist()
    start = content.find(b"PK\x01\x02")
    content[start + 8] |= 1  # the flag of encryption, in the directory
    (tmp_path / "data.npz").write_bytes(bytes(content))
    with pytest.raises(ValueError, match="Cannot read .*data.npz"):
        read(tmp_path / "data.npz")


@pytest.mark.parametrize(
    "labels",
    [
        np.tile(np.array([1e19, 2e19]), 20),
        np.tile(np.array([2**63 + 1, 2**63 + 2], np.uint64), 20),
    ],
)
def test_labels_that_are_not_exact_are_refused(labels: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(40, 3)), y=labels)
    with pytest.raises(ValueError, match="2\\^53|2\\^63"):
        read(tmp_path / "d.npz", task="classification")


def test_integer_text_that_float64_rounds_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"{k},{2**53 + k % 2}\n" for k in range(40))
    (tmp_path / "d.csv").write_text("a,y\n" + rows)
    with pytest.raises(ValueError, match="lose digits"):
        read(tmp_path / "d.csv")


def test_integers_above_2_to_the_53_stay_apart(tmp_path: Path) -> None:
    labels = np.tile(np.array([2**53, 2**53 + 1]), 20)
    np.savez(tmp_path / "d.npz", x=np.arange(120.0).reshape(40, 3), y=labels)
    assert read(tmp_path / "d.npz", task="classification").names == (f"{2**53}", f"{2**53 + 1}")


def test_complex_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        sr.discover(torch.zeros(40, 3, dtype=torch.complex64), torch.arange(40) % 2, epochs=1)


def test_text_controls_neither_terminal_nor_spreadsheet() -> None:
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\n"
    assert table_cell("=1+1") == "'=1+1" and table_cell("@x") == "'@x"
    assert table_cell("-1.5") == "-1.5" and table_cell("cat") == "cat"
