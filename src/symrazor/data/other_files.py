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
import pickle
import wave
import zipfile
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from symrazor.core.files import reader, reserve
from symrazor.data.arrays import Array, FileContents, as_inputs, as_labels
from symrazor.data.binary_files import read_npy
from symrazor.data.csv_files import BYTES_PER_FIELD, MAX_FIELD_CHARACTERS
from symrazor.data.parquet_pages import page_sizes

HDF5_SUFFIXES = (".h5", ".hdf5")
VOLUME_SUFFIXES = (".npy", ".nii", ".nii.gz")
_WAV_COPIES = 16
"""Memory of the samples while they are converted, in units of the size of the file."""
_DEFLATE, _LZF = 1, 32_000
"""Filters of HDF5 that compress."""
_LZF_MAX_RATIO = 88
_CHECKSUM_BYTES = 64
_KEYS = ("x", "y", "x_test", "y_test", "t", "kind", "names")


def optional(package: str, extra: str, path: Path) -> Any:
    """Import an optional package; if it is missing, the error names the extra to install."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Reading {path} needs {package}. Install it with: pip install symrazor[{extra}]"
        ) from error


def read_parquet(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the columns of a Parquet file as text, as those of a CSV file."""
    parquet = optional("pyarrow.parquet", "parquet", path)
    n_bytes, n_values = page_sizes(path)
    with parquet.ParquetFile(path) as file:
        metadata = file.metadata
        groups = (metadata.row_group(k) for k in range(metadata.num_row_groups))
        n_bytes = max(n_bytes, sum(group.total_byte_size for group in groups))
        names = list(file.schema_arrow.names)
        n_values = max(n_values, metadata.num_rows * len(names))
        reserve(2 * n_bytes + BYTES_PER_FIELD * n_values, path)
    # Repeated texts stay encoded until their lengths are known.
    table = parquet.read_table(path, read_dictionary=names)
    columns: dict[str, tuple[str, ...]] = {}
    for name, column in zip(names, table.columns, strict=True):
        key = name.strip().lower()
        if key in columns:
            raise ValueError(f"{path} has two columns with the name {key!r}. Rename one.")
        reserve(len(column) * _longest_text(column, name, path), path)
        columns[key] = tuple("" if v is None else str(v) for v in column.to_pylist())
    return columns


def _longest_text(column: Any, name: str, path: Path) -> int:
    """Return the largest length of a text in a column of Parquet; ValueError if it is too long."""
    compute = optional("pyarrow.compute", "parquet", path)
    types = optional("pyarrow.types", "parquet", path)
    if types.is_nested(column.type):
        raise ValueError(f"{path}, column {name!r} holds lists. Remove it, or split it.")
    longest = 0
    for chunk in column.chunks:
        texts = chunk.dictionary if types.is_dictionary(chunk.type) else chunk
        if types.is_string(texts.type) or types.is_large_string(texts.type):
            longest = max(longest, compute.max(compute.binary_length(texts)).as_py() or 0)
    if longest > MAX_FIELD_CHARACTERS:
        raise ValueError(
            f"{path}, column {name!r}: a value has more than {MAX_FIELD_CHARACTERS:,} bytes. "
            "Remove the column."
        )
    return longest


def read_hdf5(path: Path) -> dict[str, Array]:
    """Return the data sets of an HDF5 file whose names are those of .npz files.

    Raises:
        ValueError: no data set x, or one that is stored in another file.
    """
    h5py = optional("h5py", "hdf5", path)
    arrays = {}
    with h5py.File(path, "r") as file:
        for key in _KEYS:
            link = file.get(key, getlink=True)
            if link is not None and not isinstance(link, h5py.HardLink):
                raise ValueError(f"{path}: {key} is a link. Copy the data into the file.")
            if isinstance(file.get(key), h5py.Dataset):
                arrays[key] = _read_data_set(file[key], path)
        listed = sorted(islice(file, 8))
    if "x" not in arrays:
        raise ValueError(f"{path} has no data set x, only {listed}. Name the inputs x, labels y.")
    return arrays


def _read_data_set(data: Any, path: Path) -> Array:
    if data.is_virtual or data.external:
        raise ValueError(
            f"{path}: {data.name[1:]} is stored in another file. Copy the data into the file."
        )
    chunk = math.prod(data.chunks or ()) * data.dtype.itemsize
    reserve(2 * (int(data.nbytes) + chunk), path)
    if data.chunks:
        _check_chunks(data, path)
    values = np.asarray(data)
    return values.astype(str) if values.dtype.kind == "O" else values


def _check_chunks(data: Any, path: Path) -> None:
    """Raise ValueError if a chunk expands beyond its size: HDF5 itself sets no limit."""
    properties = data.id.get_create_plist()
    filters = [properties.get_filter(k)[0] for k in range(properties.get_nfilters())]
    chunk = math.prod(data.chunks) * data.id.get_type().get_size() + _CHECKSUM_BYTES
    for number in range(data.id.get_num_chunks()):
        info = data.id.get_chunk_info(number)
        if info.size > path.stat().st_size or filters.count(_DEFLATE) > 1:
            raise ValueError(
                f"{path} is damaged: {data.name[1:]} has a false chunk. Save it again."
            )
        reserve(_LZF_MAX_RATIO * info.size if _LZF in filters else 0, path)
        is_deflated = _DEFLATE in filters and not info.filter_mask >> filters.index(_DEFLATE) & 1
        if is_deflated:
            _, content = data.id.read_direct_chunk(info.chunk_offset)
            if len(zlib.decompressobj().decompress(content, chunk + 1)) > chunk:
                raise ValueError(
                    f"{path} is damaged: a chunk of {data.name[1:]} has more than {chunk:,} bytes. "
                    "Save it again."
                )


def read_pt(path: Path) -> dict[str, Array]:
    """Return the tensors of a `.pt` file: a dictionary with x and y, a pair, or x alone."""
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is damaged, or older than PyTorch 1.6. Save it with torch.save(x, path)."
        )
    with zipfile.ZipFile(path) as archive:
        reserve(2 * sum(member.file_size for member in archive.infolist()), path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its message advises to run the code in the file
        raise ValueError(
            f"{path} has more than tensors, and code in a file is not run. Save it with "
            "torch.save({'x': x, 'y': y}, path)."
        ) from error
    if isinstance(content, tuple | list) and len(content) == 2:
        content = dict(zip("xy", content, strict=True))
    if isinstance(content, torch.Tensor):
        content = {"x": content}
    tensors = content if isinstance(content, dict) else {}
    arrays = {
        key: _as_array(value, key, path)
        for key, value in tensors.items()
        if isinstance(value, torch.Tensor) and key in _KEYS
    }
    if "x" not in arrays:
        raise ValueError(
            f"{path} must hold a tensor, a pair (x, y), or a dictionary with tensors x and y."
        )
    return arrays


def _as_array(tensor: torch.Tensor, name: str, path: Path) -> Array:
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else tensor.layout
        raise ValueError(f"{path}: {name} is a {kind} tensor. Save {name}.to_dense().")
    if tensor.dtype == torch.bfloat16:
        reserve(4 * tensor.numel(), path)
        tensor = tensor.float()
    return tensor.detach().resolve_conj().resolve_neg().numpy()


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
        (VOLUME_SUFFIXES, None, read_volume),
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


@reader
def _read_wav(path: Path) -> Array:
    """Return the samples [channels, time] of a WAV file, between -1 and 1."""
    reserve(_WAV_COPIES * path.stat().st_size, path)
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, n = file.getsampwidth(), file.getnchannels(), file.getnframes()
            content = file.readframes(min(n, path.stat().st_size))
    except (wave.Error, EOFError) as error:
        problem = str(error) or "the file ends early"
        raise ValueError(f"Cannot read {path}: {problem}. Convert it to 16-bit PCM.") from error
    if width not in (1, 2, 4):
        raise ValueError(f"{path} has {8 * width} bits per sample. Convert it to 16 bits.")
    values: Array = np.frombuffer(content, {1: "u1", 2: "<i2", 4: "<i4"}[width]).astype(np.float32)
    values = (values - 128) / 128 if width == 1 else values / 2 ** (8 * width - 1)
    return values.reshape(-1, channels).T.copy()


@reader
def read_volume(path: Path) -> Array:
    """Return the numbers of an NPY or NIfTI file, with slices first."""
    if path.suffix == ".npy":
        return read_npy(path)
    nibabel = optional("nibabel", "nifti", path)
    logger = nibabel.imageglobals.logger  # it prints every repair of a header
    level = logger.level
    logger.setLevel("CRITICAL")
    try:
        image = nibabel.load(path)
    finally:
        logger.setLevel(level)
    reserve(2 * np.dtype(np.float64).itemsize * math.prod(image.shape), path)
    values = np.asarray(image.dataobj)
    return values.astype(values.dtype.newbyteorder("=")).T
