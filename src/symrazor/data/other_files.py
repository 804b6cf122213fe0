"""Read Parquet, HDF5, `.pt`, WAV and NIfTI files. Each reader names the package that it needs.

| path | read as | extra |
|---|---|---|
| FILE.parquet | a table, as CSV | parquet |
| FILE.h5, FILE.hdf5 | data sets `x` and `y`, as .npz | hdf5 |
| FILE.pt | a dictionary with tensors `x` and `y`, or a tensor; never code (`weights_only`) | |
| a folder of folders of .wav files | series, one class per folder | |
| a folder of folders of .npy, .nii or .nii.gz files | volumes, images or series | nifti |
"""

import importlib
import math
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from symrazor.core.files import reserve
from symrazor.data.arrays import Array, FileContents, as_inputs, as_labels
from symrazor.data.binary_files import read_npy

HDF5_SUFFIXES = (".h5", ".hdf5")
VOLUME_SUFFIXES = (".npy", ".nii", ".nii.gz")
_KEYS = ("x", "y", "x_test", "y_test", "t", "kind", "names")


def optional(package: str, extra: str, path: Path) -> Any:
    """Import an optional package; ModuleNotFoundError that names the extra."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Reading {path} needs {package}. Install it with: pip install symrazor[{extra}]"
        ) from error


def read_parquet(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the columns of a Parquet file as text, as those of a CSV file."""
    parquet = optional("pyarrow.parquet", "parquet", path)
    reserve(16 * parquet.read_metadata(path).num_rows * _columns(parquet, path), path)
    table = parquet.read_table(path)
    return {
        name.strip().lower(): tuple("" if v is None else str(v) for v in column.to_pylist())
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _columns(parquet: Any, path: Path) -> int:
    return int(parquet.read_metadata(path).num_columns)


def read_hdf5(path: Path) -> dict[str, Array]:
    """Return the data sets of an HDF5 file whose names are those of .npz files."""
    h5py = optional("h5py", "hdf5", path)
    arrays = {}
    with h5py.File(path, "r") as file:
        for key in _KEYS:
            if isinstance(file.get(key), h5py.Dataset):
                reserve(2 * int(file[key].nbytes), path)
                values = np.asarray(file[key])
                arrays[key] = values.astype(str) if values.dtype.kind == "O" else values
        listed = sorted(file)[:8]
    if "x" not in arrays:
        raise ValueError(f"{path} has no data set x, only {listed}. Name the inputs x, labels y.")
    return arrays


def read_pt(path: Path) -> dict[str, Array]:
    """Return the tensors of a `.pt` file: a dictionary with x and y, a pair, or x alone."""
    reserve(2 * path.stat().st_size, path)
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, tuple | list) and len(content) == 2:
        content = dict(zip("xy", content, strict=True))
    if isinstance(content, torch.Tensor):
        content = {"x": content}
    tensors = content if isinstance(content, dict) else {}
    arrays = {
        k: v.numpy() for k, v in tensors.items() if isinstance(v, torch.Tensor) and k in _KEYS
    }
    if "x" not in arrays:
        raise ValueError(
            f"{path} must hold a tensor, a pair (x, y), or a dictionary with tensors x and y."
        )
    return arrays


def class_files(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """Return the files with these suffixes of each subfolder that has any, sorted by name."""
    files_of = {
        inner.name: sorted(p for p in inner.iterdir() if p.name.lower().endswith(suffixes))
        for inner in sorted(folder.iterdir())
        if inner.is_dir() and not inner.name.startswith(".")
    }
    return {name: files for name, files in files_of.items() if files}


def read_class_files(folder: Path) -> FileContents | None:
    """Return WAV files, or NPY and NIfTI files, of a folder with one subfolder per class, or None.

    Raises:
        ValueError: the samples differ in shape.
    """
    readers: list[tuple[tuple[str, ...], str | None, Callable[[Path], Array]]] = [
        ((".wav",), "series", _read_wav),
        (VOLUME_SUFFIXES, None, _read_volume),
    ]
    for suffixes, kind, read in readers:
        files_of = class_files(folder, suffixes)
        files = [file for files in files_of.values() for file in files]
        if files:
            first = read(files[0])
            reserve(2 * len(files) * first.nbytes, folder)
            samples = [first, *map(read, files[1:])]
            for sample, file in zip(samples, files, strict=True):
                if sample.shape != first.shape:
                    raise ValueError(
                        f"Samples must have one shape: {files[0]} has {list(first.shape)}, {file} "
                        f"{list(sample.shape)}. Cut or pad them."
                    )
            labels = np.repeat(list(files_of), [len(group) for group in files_of.values()])
            y, names = as_labels(labels, folder)
            ids = tuple(file.relative_to(folder).as_posix() for file in files)
            x = as_inputs(np.stack(samples), folder)
            return FileContents(x, y, names, kind, ids=ids, id_name="file")
    return None


def _read_wav(path: Path) -> Array:
    """Return the samples [channels, time] of a WAV file, between -1 and 1."""
    reserve(4 * path.stat().st_size, path)
    with wave.open(str(path), "rb") as file:
        width, channels, n = file.getsampwidth(), file.getnchannels(), file.getnframes()
        content = file.readframes(min(n, path.stat().st_size))
    if width not in (1, 2, 4):
        raise ValueError(f"{path} has {8 * width} bits per sample. Convert it to 16 bits.")
    values: Array = np.frombuffer(content, {1: "u1", 2: "<i2", 4: "<i4"}[width]).astype(np.float32)
    values = (values - 128) / 128 if width == 1 else values / 2 ** (8 * width - 1)
    return values.reshape(-1, channels).T.copy()


def _read_volume(path: Path) -> Array:
    """Return the numbers of an NPY or NIfTI file, with slices first."""
    if path.suffix == ".npy":
        return read_npy(path)
    nibabel = optional("nibabel", "nifti", path)
    image = nibabel.load(path)
    reserve(8 * math.prod(image.shape), path)
    return np.asarray(image.dataobj, dtype=np.float32).T
