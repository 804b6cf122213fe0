"""Test Parquet, HDF5, .pt, WAV and NIfTI files, and the choice of columns."""

import sys
import tracemalloc
import wave
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from symrazor.core.files import BUDGET_VARIABLE
from symrazor.data import read
from symrazor.data.csv_files import read_csv
from symrazor.data.other_files import optional
from symrazor.data.parquet_pages import page_sizes

X = np.random.default_rng(0).normal(size=(40, 3))
Y = (X[:, 0] > 0).astype(np.int64)


@pytest.mark.parametrize(
    "content",
    [
        {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)},
        (torch.from_numpy(X), torch.from_numpy(Y)),
    ],
)
def test_pt_files(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "data.pt")
    data = read(tmp_path / "data.pt")
    assert np.array_equal(data.x.numpy(), X) and np.array_equal(data.y, Y)


def test_pt_files_run_no_code(tmp_path: Path) -> None:
    torch.save({"x": Path("a module of a stranger")}, tmp_path / "data.pt")
    with pytest.raises(ValueError, match=r"data\.pt has more than tensors, and code in a file"):
        read(tmp_path / "data.pt")


def test_hdf5_files(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = X, Y
    data = read(tmp_path / "data.h5")
    assert np.array_equal(data.x.numpy(), X) and np.array_equal(data.y, Y)
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        file["inputs"] = X
    with pytest.raises(ValueError, match=r"no data set x, only \['inputs'\]"):
        read(tmp_path / "bad.h5")


def test_parquet_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"id": [f"r{k}" for k in range(40)], "a": X[:, 0], "b": X[:, 1], "label": Y}
    parquet.write_table(pyarrow.table(columns), tmp_path / "data.parquet")
    data = read(tmp_path / "data.parquet")
    assert np.array_equal(data.x.numpy(), X[:, :2])  # no digit is lost
    assert np.array_equal(data.y, Y) and data.ids[:2] == ("r0", "r1")
    only = read(tmp_path / "data.parquet", columns=["b"])
    assert np.array_equal(only.x.numpy(), X[:, 1:2])


def test_hdf5_files_are_read_alone(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = X
    (tmp_path / "raw").write_bytes(X.tobytes())
    layout = h5py.VirtualLayout(shape=X.shape, dtype="f8")
    layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", shape=X.shape)
    for number in range(4):
        path = tmp_path / f"data-{number}.h5"
        with h5py.File(path, "w") as file:
            if number == 0:
                file["x"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/x")
            elif number == 1:
                file["x"] = h5py.SoftLink("/x")
            elif number == 2:
                raw = [(str(tmp_path / "raw"), 0, X.nbytes)]
                file.create_dataset("x", X.shape, "f8", external=raw)
            else:
                file.create_virtual_dataset("x", layout)
        with pytest.raises(ValueError, match=rf"{path.name}: x is .*Copy the data into the file"):
            read(path)


def _varint(value: int, length: int = 0) -> bytes:
    """Return a positive integer of Thrift's compact protocol, padded to a length."""
    value, content = 2 * value, bytearray()
    while value >= 128 or len(content) < length - 1:
        content.append(value & 127 | 128)
        value >>= 7
    return bytes([*content, value])


def test_pages_that_are_larger_than_the_metadata_say_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    n, file = 4_000_000, tmp_path / "data.parquet"
    one_page = {
        "data_page_size": 1 << 30,
        "max_rows_per_page": n,
        "write_batch_size": n,
        "compression": "zstd",
    }
    parquet.write_table(
        pyarrow.table({"a": np.zeros(n)}), file, n, use_dictionary=False, **one_page
    )
    metadata = parquet.read_metadata(file)
    n_bytes, n_values = page_sizes(file)
    assert n_bytes >= 8 * n and n_values == n
    content = bytearray(file.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for number in (metadata.row_group(0).total_byte_size, n):
        true = _varint(number)
        assert true in content[footer:]
        small = _varint(400, len(true))
        content[footer:] = content[footer:].replace(true, small)
    file.write_bytes(content)
    assert parquet.read_metadata(file).num_rows == 400
    monkeypatch.setenv(BUDGET_VARIABLE, "10000000")
    with pytest.raises(ValueError, match="left for this file"):
        read(file, labelled=False)


def test_a_chunk_that_expands_beyond_its_size_is_refused(tmp_path: Path) -> None:
    """HDF5 would allocate all of it."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        data = file.create_dataset("x", X.shape, "f8", chunks=X.shape, compression="gzip")
        data.id.write_direct_chunk((0, 0), zlib.compress(bytes(64 << 20)))
        file["y"] = Y
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"data.h5 is damaged: a chunk of x has more than 1,024"):
        read(tmp_path / "data.h5")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    with h5py.File(tmp_path / "data.h5", "w") as file:  # checksums, shuffled bytes, another filter
        options = {"chunks": (7, 2), "shuffle": True, "fletcher32": True}
        file.create_dataset("x", data=X, compression="gzip", **options)
        file.create_dataset("y", data=Y, compression="lzf", chunks=(9,))
    assert np.array_equal(read(tmp_path / "data.h5").x.numpy(), X)


def test_memory_of_compressed_files_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUDGET_VARIABLE, str(1 << 20))
    torch.save({"x": torch.zeros(1 << 20)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored:
        with zipfile.ZipFile(tmp_path / "data.pt", "w", zipfile.ZIP_DEFLATED) as packed:
            for name in stored.namelist():
                packed.writestr(name, stored.read(name))
    torch.save({"x": torch.zeros(1).expand(1 << 40)}, tmp_path / "strides.pt")
    files = ["data.pt", "strides.pt"]
    with suppress(ModuleNotFoundError):
        import h5py

        files += ["values.h5", "chunk.h5"]
        with h5py.File(tmp_path / "values.h5", "w") as file:
            file.create_dataset("x", (1 << 30,), "f8", chunks=(1 << 10,), compression="gzip")
        with h5py.File(tmp_path / "chunk.h5", "w") as file:
            shape = {"shape": (2, 2), "maxshape": (None, None), "chunks": (1 << 10, 1 << 10)}
            file.create_dataset("x", dtype="f8", compression="gzip", **shape)[:] = 1
    with suppress(ModuleNotFoundError):
        import pyarrow
        from pyarrow import parquet

        files += ["rows.parquet", "text.parquet"]
        columns = {"a": np.zeros(1 << 18), "y": np.zeros(1 << 18)}
        parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
        columns = {"a": ["A" * 4000] * 1000, "y": ["B"] * 1000}
        parquet.write_table(pyarrow.table(columns), tmp_path / "text.parquet")
    for name in files:
        assert (tmp_path / name).stat().st_size < 1 << 20
        with pytest.raises(ValueError, match=rf"{name} needs .* of memory"):
            read(tmp_path / name)


def test_unusual_tensors_are_read_or_named(tmp_path: Path) -> None:
    x = torch.from_numpy(X).bfloat16().requires_grad_()
    torch.save({"x": x, "y": torch.from_numpy(Y)}, tmp_path / "data.pt")
    assert torch.equal(read(tmp_path / "data.pt").x, x.detach().float())
    torch.save({"x": x.detach().float().to_sparse()}, tmp_path / "data.pt")
    with pytest.raises(ValueError, match=r"x is a torch.sparse_coo tensor. Save x.to_dense"):
        read(tmp_path / "data.pt")
    torch.save({"x": x}, tmp_path / "data.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"data.pt is damaged, or older"):
        read(tmp_path / "data.pt")


def test_damaged_files_in_folders_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"a/1\.wav: the file ends early. Convert it to 16-bit"):
        read(tmp_path)


def test_volumes_keep_all_digits(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    for number in range(24):
        folder = tmp_path / f"{number % 2}"
        folder.mkdir(exist_ok=True)
        volume = np.arange(27.0).reshape(3, 3, 3) + (1e9 + number)
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), folder / f"{number:02}.nii.gz")
    assert np.array_equal(read(tmp_path).x[-1].numpy(), volume.T)


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install symrazor\[parquet\]"):
        read(tmp_path / "data.parquet")
    with pytest.raises(ModuleNotFoundError, match=r"pip install symrazor\[none\]"):
        optional("no_such_package", "none", tmp_path)


@pytest.mark.parametrize(("width", "dtype"), [(1, "u1"), (2, "<i2"), (4, "<i4")])
def test_folders_of_wav_files(tmp_path: Path, width: int, dtype: str) -> None:
    draws = np.random.default_rng(0)
    signals = {}
    for number in range(24):
        folder = tmp_path / ("high" if number % 2 else "low")
        folder.mkdir(exist_ok=True)
        signal = draws.uniform(-0.9, 0.9, (2, 50))
        scaled = np.round(signal * 2 ** (8 * width - 1)) + (128 if width == 1 else 0)
        with wave.open(str(folder / f"{number:02}.wav"), "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(width)
            file.setframerate(8000)
            file.writeframes(scaled.T.astype(dtype).tobytes())
        signals[f"{folder.name}/{number:02}.wav"] = signal
    data = read(tmp_path)
    assert data.kind == "series" and data.names == ("high", "low")
    expected = np.stack([signals[name] for name in data.ids])
    np.testing.assert_allclose(data.x.numpy(), expected, atol=2 ** (1.0 - 8 * width))


def test_folders_of_volumes(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / f"class {number % 2}"
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{number:02}.npy", draws.random((9, 8, 8)).astype(np.float32))
    data = read(tmp_path)
    assert data.kind == "volume" and list(data.x.shape) == [20, 1, 9, 8, 8]
    np.save(tmp_path / "class 0" / "zz.npy", np.zeros((9, 8, 7), np.float32))
    with pytest.raises(ValueError, match=r"must have one shape: .*00.npy has \[9, 8, 8\]"):
        read(tmp_path)


def test_nifti_files(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    draws = np.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / f"class {number % 2}"
        folder.mkdir(exist_ok=True)
        values = draws.random((8, 8, 9)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / f"{number:02}.nii")
    data = read(tmp_path)
    assert data.kind == "volume" and list(data.x.shape) == [20, 1, 9, 8, 8]


TABLE = "\n".join(
    ["patient,age,height,label", *(f"p{k // 4},{k},{k * k},{k % 2}" for k in range(24))]
)


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    data = read(tmp_path / "a.csv", columns=["Height"], together="patient")
    assert data.columns == ("height",) and data.x[:, 0].tolist() == [k * k for k in range(24)]
    assert data.together is not None
    assert [len(data.together[data.together == k]) for k in data.together.unique()] == [4] * 6
    with pytest.raises(ValueError, match="has no column 'weight'. Columns: patient, age"):
        read(tmp_path / "a.csv", columns=["weight"])


def test_the_column_of_groups_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    contents = read_csv(tmp_path / "a.csv", together="patient")
    assert contents.columns == ("age", "height")


def test_columns_of_other_files_cannot_be_chosen(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    with pytest.raises(ValueError, match="is not a table"):
        read(tmp_path / "a.npz", columns=["a"])
