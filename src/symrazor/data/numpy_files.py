"""Read NumPy files without unpickling: header first, then a check of sizes, then the elements."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import torch

from symrazor.data.arrays import NUMBER_KINDS, TEXT_KINDS, Array, as_inputs, as_labels
from symrazor.data.batches import Tensors, check_batch

MAX_BYTES = 4 << 30
"""Memory that the data of one file may take, in bytes, as float32."""

_READ_ERRORS = (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, MemoryError)
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def check_size(elements: int, path: str | Path) -> None:
    """Check that an array fits into memory before any memory is allocated for it.

    Raises:
        ValueError: The elements take more than `MAX_BYTES` as float32.
    """
    if 4 * elements > MAX_BYTES:
        raise ValueError(
            f"{path} declares {4 * elements / 2**30:,.1f} GiB of float32, more than the limit of "
            f"{MAX_BYTES / 2**30:g} GiB. Use a part of the data."
        )


def read_npy(path: str | Path) -> Array:
    """Read one array of numbers or text from an .npy file.

    Raises:
        ValueError: The file is damaged, contains objects, or is larger than `MAX_BYTES`.
    """
    path = Path(path)
    with path.open("rb") as file:
        try:
            return _read_array(file, path.stat().st_size, path, "the array")
        except _READ_ERRORS as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise ValueError(
                f"Cannot read {path} as an .npy file with plain numbers: {error}. "
                "Save it with numpy.save(path, x)."
            ) from error


def read_archive(
    path: str | Path, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Array]:
    """Read arrays from an .npz file: all required keys, and the optional keys that exist.

    The sizes in the archive's directory bound what is unpacked, and they are compared with
    `MAX_BYTES` first.

    Raises:
        ValueError: The file is damaged, lacks a key, contains objects, or is too large.
    """
    path = Path(path)
    arrays: dict[str, Array] = {}
    with path.open("rb") as file:
        try:
            if file.read(6) == b"\x93NUMPY":
                raise ValueError("it holds one array without a name")
            with zipfile.ZipFile(file) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                if not set(required) <= set(members):
                    raise ValueError(f"it has only the keys {sorted(members)}")
                for key in (k for k in (*required, *optional) if k in members):
                    with archive.open(members[key]) as member:
                        arrays[key] = _read_array(member, members[key].file_size, path, key)
        except _READ_ERRORS as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise ValueError(
                f"Cannot read {path} as an .npz file with plain numbers under the keys x and y: "
                f"{error}. Save it with numpy.savez(path, x=x, y=y), or with states=states, "
                "times=times for trajectories."
            ) from error
    return arrays


def _read_array(file: IO[bytes] | zipfile.ZipExtFile, size: int, path: Path, name: str) -> Array:
    version = np.lib.format.read_magic(file)
    if version not in _HEADER_READERS:
        raise ValueError(f"unsupported format version {version}")
    shape, fortran_order, dtype = _HEADER_READERS[version](file)
    if dtype.kind not in NUMBER_KINDS + TEXT_KINDS:
        hint = " (lists of unequal length? pad them with NaN)" if dtype.kind == "O" else ""
        raise ValueError(f"{name} has type {dtype}{hint}")
    if any(length < 0 for length in shape):
        raise ValueError(f"{name} has shape {list(shape)}")
    elements = math.prod(shape)
    check_size(elements if dtype.kind in NUMBER_KINDS else elements * dtype.itemsize, path)
    n_bytes = elements * dtype.itemsize
    if n_bytes > size:
        raise ValueError(f"{name} needs {n_bytes:,} bytes, but the file has {size:,}")
    data = file.read(n_bytes)
    if len(data) < n_bytes:
        raise ValueError(f"{name} ends after {len(data):,} of {n_bytes:,} bytes")
    flat = np.frombuffer(data, dtype)
    array = flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)
    return array.astype(dtype.newbyteorder("="), order="C")


def read_npz(path: str | Path) -> Tensors:
    """Read x and y from a NumPy archive, without unpickling.

    Args:
        path: The file. x holds numbers with the samples along the first dimension; uint8 is taken
            as an image and divided by 255. y holds integer labels or float targets.

    Returns:
        x as float32 if that is exact, otherwise as float64; y as int64 or float64.

    Raises:
        ValueError: A key is missing, a value is not a finite number, or the lengths differ.
    """
    arrays = read_archive(path, ("x", "y"))
    if arrays["y"].dtype.kind not in NUMBER_KINDS:
        raise ValueError(
            f"y in {path} must be plain numbers, got type {arrays['y'].dtype}. Save it with "
            "numpy.savez(path, x=x, y=y), or read it with symrazor.data.read(path)."
        )
    x, (y, _) = as_inputs(arrays["x"], path), as_labels(arrays["y"], path)
    check_batch(x, y, str(path))
    return (x.float() / 255 if x.dtype == torch.uint8 else x), y
