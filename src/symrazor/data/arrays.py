"""NumPy files: header first, then a check of sizes, then memory. Nothing is unpickled."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from symrazor.data.batches import Tensors, check_batch, refusal

LIMIT = 4 << 30
"""Bytes that the data of one file may take in memory as float32."""

Array = np.ndarray[Any, np.dtype[Any]]
_NUMBERS = "biuf"
_TEXT = "US"
_ERRORS = (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, MemoryError)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def check_size(elements: int, path: str | Path) -> None:
    """Refuse more numbers than fit, before memory is taken for them.

    Raises:
        ValueError: more than `LIMIT` bytes as float32.
    """
    if 4 * elements > LIMIT:
        got = f"{path}, which declares {4 * elements / 2**30:,.1f} GiB of float32"
        raise refusal(f"at most {LIMIT / 2**30:g} GiB", got, "take a part of the data")


def read_npy(path: str | Path) -> Array:
    """One array of numbers or text from an .npy file.

    Raises:
        ValueError: another file, a truncated one, objects, or more than `LIMIT`.
    """
    path = Path(path)
    with path.open("rb") as file:
        try:
            return _array(file, path.stat().st_size, path, "an array")
        except _ERRORS as error:
            if isinstance(error, OSError) and error.errno:
                raise
            what = "an .npy file with plain numbers"
            raise refusal(what, f"{path}: {error}", "numpy.save(path, x)") from error


def read_archive(
    path: str | Path, needed: tuple[str, ...], others: tuple[str, ...] = ()
) -> dict[str, Array]:
    """The arrays of an .npz file that are needed, and others if they are there.

    The sizes that the archive declares bound what is unpacked: a reader never gets more bytes than
    its directory says, and what it says is compared with `LIMIT` first.

    Raises:
        ValueError: another file, a truncated one, a key that is not there, objects, or more than
            `LIMIT`.
    """
    path = Path(path)
    found: dict[str, Array] = {}
    with path.open("rb") as file:
        try:
            if file.read(6) == b"\x93NUMPY":
                raise ValueError("one array without a name")
            with zipfile.ZipFile(file) as archive:
                inside = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                if not set(needed) <= set(inside):
                    raise ValueError(f"only the keys {sorted(inside)}")
                for key in (k for k in (*needed, *others) if k in inside):
                    with archive.open(inside[key]) as member:
                        found[key] = _array(member, inside[key].file_size, path, key)
        except _ERRORS as error:
            if isinstance(error, OSError) and error.errno:
                raise
            what = "an .npz file with plain numbers under the keys x and y"
            do = "numpy.savez(path, x=x, y=y), or states=states, times=times for trajectories"
            raise refusal(what, f"{path}: {error}", do) from error
    return found


def _array(file: IO[bytes] | zipfile.ZipExtFile, size: int, path: Path, name: str) -> Array:
    """Header, then checks, then the elements."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format")
    shape, fortran, dtype = _HEADERS[version](file)
    if dtype.kind not in _NUMBERS + _TEXT:
        ragged = ", as of lists of unequal length (pad them with NaN)" if dtype.kind == "O" else ""
        raise ValueError(f"{name} of type {dtype}{ragged}")
    if any(part < 0 for part in shape):
        raise ValueError(f"{name} of shape {list(shape)}")
    elements = math.prod(shape)
    check_size(elements if dtype.kind in _NUMBERS else elements * dtype.itemsize, path)
    expected = elements * dtype.itemsize
    if expected > size:
        raise ValueError(f"{size:,} bytes for an array of {expected:,}")
    data = file.read(expected)
    if len(data) < expected:
        raise ValueError(f"{len(data):,} of {expected:,} bytes of an array")
    flat = np.frombuffer(data, dtype)
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    return array.astype(dtype.newbyteorder("="), order="C")


def as_labels(values: Array, source: str | Path) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as a tensor, and their names: text becomes classes in alphabetical order."""
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind == "U":
        names, index = np.unique(values, return_inverse=True)
        return torch.from_numpy(index.reshape(values.shape).astype(np.int64)), tuple(names.tolist())
    if values.dtype.kind not in _NUMBERS:
        raise refusal(f"numbers or text as y in {source}", str(values.dtype), "convert them")
    kind = np.int64 if values.dtype.kind in "biu" else np.float64
    return torch.from_numpy(values.astype(kind)), ()


def as_both_labels(
    values: Array, test: Array, source: str | Path
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Labels of training and of test data, numbered together where they are text."""
    if values.dtype.kind not in _TEXT and test.dtype.kind not in _TEXT:
        y, names = as_labels(values, source)
        return y, as_labels(test, source)[0], names
    if (values.dtype.kind in _TEXT) != (test.dtype.kind in _TEXT):
        got = f"{values.dtype} and {test.dtype}"
        raise refusal(f"labels of one type in {source}", got, "convert those of the test data")
    both, names = as_labels(np.concatenate([values.reshape(-1), test.reshape(-1)]), source)
    return both[: values.size], both[values.size :], names


def as_inputs(values: Array, source: str | Path) -> Tensor:
    """Return inputs as a tensor: bytes stay bytes, other numbers become float32 or float64.

    The type is float32 where that holds every value of the array's type exactly, so that nothing
    is rounded before the data are centred.
    """
    if values.dtype.kind not in _NUMBERS:
        raise refusal(f"numbers as x in {source}", str(values.dtype), "convert them to numbers")
    exact = np.can_cast(values.dtype, np.float32)
    wanted = values.dtype if values.dtype == np.uint8 else np.float32 if exact else np.float64
    return torch.from_numpy(np.require(values, wanted, ["C", "W"]))


def read_npz(path: str | Path) -> Tensors:
    """Read a NumPy archive with the keys x and y. Never unpickles.

    Args:
        path: The file. x: numbers, data along the first dimension; uint8 is taken for an image
            and divided by 255, every other type is taken as it is. y: integer labels or float
            targets, one for each x.

    Returns:
        x as float32, or as float64 where float32 would round; y as int64 if it holds integers,
        else as float64.

    Raises:
        ValueError: If a key is missing or holds anything but finite numbers, or lengths differ.
    """
    arrays = read_archive(path, ("x", "y"))
    if arrays["y"].dtype.kind not in _NUMBERS:
        got = f"{path}: y of type {arrays['y'].dtype}"
        what = "an .npz file with plain numbers under the keys x and y"
        raise refusal(what, got, "numpy.savez(path, x=x, y=y), or symrazor.data.read(path)")
    x, (y, _) = as_inputs(arrays["x"], path), as_labels(arrays["y"], path)
    check_batch(x, y, str(path))
    return (x.float() / 255 if x.dtype == torch.uint8 else x), y
