"""Read binary files: NumPy (.npy, .npz), IDX (the format of MNIST) and binary batches of CIFAR.

Headers are checked before memory is allocated for the elements, and nothing is unpickled. `mnist`,
`fashion_mnist` and `cifar10` read the official files from a folder, as float32 in [0, 1], not
normalised (see `symrazor.data.transforms`).
"""

import gzip
import io
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from symrazor.core.files import is_system_error, reader, reserve
from symrazor.data.arrays import NUMBER_KINDS, TEXT_KINDS, Array, as_inputs, as_labels
from symrazor.data.batches import LARGE_BYTES, Tensors, check_batch

_BLOCK_BYTES = 1 << 20
_READ_ERRORS = (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, MemoryError)
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Third byte of an IDX file -> element type. IDX is big-endian.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_MAX_DIMENSIONS = 8
_DEFLATE_MAX_RATIO = 1032  # no gzip stream expands further than this
_CIFAR_IMAGE_BYTES = 3 * 32 * 32
Split = Literal["train", "test"]
_IDX_COUNT = {"train": 60_000, "test": 10_000}
_IDX_PREFIX = {"train": "train", "test": "t10k"}
_CIFAR_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_CIFAR_BATCH = 10_000
Images = tuple[Float[Tensor, "n c h w"], Int64[Tensor, "n"]]


@reader
def read_npy(path: str | Path) -> Array:
    """Read numbers or text from an .npy file; ValueError if it is damaged, large or has objects."""
    path = Path(path)
    with path.open("rb") as file:
        try:
            return _read_array(file, path.stat().st_size, path, "the array")
        except _READ_ERRORS as error:
            if is_system_error(error):
                raise
            raise ValueError(
                f"Cannot read {path} as an .npy file with plain numbers: {error}. "
                "Save it with numpy.save(path, x)."
            ) from error


@reader
def read_archive(
    path: str | Path, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Array]:
    """Read arrays from an .npz file: all required keys, and the optional keys that exist.

    The sizes in the archive's directory bound what is unpacked, and they are subtracted from the
    memory budget first.

    Raises ValueError if the file is damaged, lacks a key, has objects, or is too large.
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
                    raise ValueError(f"it has only the keys {sorted(members)[:8]}")
                for key in (k for k in (*required, *optional) if k in members):
                    with archive.open(members[key]) as member:
                        arrays[key] = _read_array(member, members[key].file_size, path, key)
        except _READ_ERRORS as error:
            if is_system_error(error):
                raise
            raise ValueError(
                f"Cannot read {path} as an .npz file with plain numbers: "
                f"{error}. Save it with numpy.savez(path, x=x, y=y), or with states=states, "
                "times=times for trajectories."
            ) from error
    return arrays


def _read_array(file: IO[bytes] | zipfile.ZipExtFile, size: int, path: Path, name: str) -> Array:
    version = np.lib.format.read_magic(file)
    if version not in _HEADER_READERS:
        raise ValueError(f"unsupported format version {version}")
    try:
        shape, fortran_order, dtype = _HEADER_READERS[version](file)
    except (MemoryError, RecursionError):  # of Python's parser
        raise ValueError("its header is nested too deeply") from None
    if dtype.kind not in NUMBER_KINDS + TEXT_KINDS:
        hint = " (lists of unequal length? pad them with NaN)" if dtype.kind == "O" else ""
        raise ValueError(f"{name} has type {dtype}{hint}")
    if any(length < 0 for length in shape):
        raise ValueError(f"{name} has shape {list(shape)}")
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes > size:
        raise ValueError(f"{name} needs {n_bytes:,} bytes, but the file has {size:,}")
    is_plain = dtype.kind in NUMBER_KINDS and dtype.isnative and not fortran_order
    if is_plain and n_bytes >= LARGE_BYTES and not isinstance(file, zipfile.ZipExtFile):
        # Copy on write: torch needs writable memory, and the file stays as it is.
        return np.memmap(path, dtype, "c", file.tell(), shape)
    flat = _read_elements(file, dtype, n_bytes, path, name)
    array = flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)
    if is_plain or dtype.itemsize == 0:
        return array
    reserve(n_bytes, path)
    return array.astype(dtype.newbyteorder("="), order="C")


def _read_elements(
    file: IO[bytes] | io.BufferedIOBase, dtype: np.dtype[Any], n_bytes: int, path: Path, name: str
) -> Array:
    """Read elements into new memory, in small blocks, so that no second copy is made."""
    reserve(n_bytes, path)
    memory = np.empty(n_bytes, np.uint8)
    n_read = 0
    while n_read < n_bytes:
        block = file.read(min(_BLOCK_BYTES, n_bytes - n_read))
        if not block:
            raise ValueError(f"{name} ends after {n_read:,} of {n_bytes:,} bytes")
        memory[n_read : n_read + len(block)] = np.frombuffer(block, np.uint8)
        n_read += len(block)
    return memory.view(dtype) if dtype.itemsize else np.empty(0, dtype)


@reader
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


@reader
def read_idx(path: str | Path) -> Shaped[Tensor, "..."]:
    """Read an IDX file, gzipped or not.

    Layout: two zero bytes, the element type, the number of dimensions D, D big-endian uint32 sizes,
    the elements. The header is compared with the size of the file before memory is allocated for
    the elements; for a gzipped file, with the largest size it can expand to.

    Args:
        path: The file. Compression is recognised by the content, not by the name.

    Returns:
        The elements, in the shape and type of the header.

    Raises:
        ValueError: The file is not IDX, is truncated, or is longer than its header says.
    """
    path = Path(path)
    with path.open("rb") as raw:
        is_gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        max_bytes = path.stat().st_size * (_DEFLATE_MAX_RATIO if is_gzipped else 1)
        if not is_gzipped:
            return _parse_idx(raw, path, max_bytes)
        try:
            with gzip.GzipFile(fileobj=raw) as file:
                return _parse_idx(file, path, max_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path} is a damaged gzip file: {error}. Download it again."
            ) from error


def _parse_idx(file: io.BufferedIOBase, path: Path, max_bytes: int) -> Shaped[Tensor, "..."]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _IDX_TYPES:
        raise ValueError(
            f"{path} is not an IDX file: it starts with the bytes {magic.hex(' ') or '(none)'}."
        )
    dimensions = magic[3]
    if not 1 <= dimensions <= _IDX_MAX_DIMENSIONS:
        raise ValueError(
            f"{path} is a damaged IDX file: {dimensions} dimensions, not 1 to "
            f"{_IDX_MAX_DIMENSIONS}. Download it again."
        )
    header = file.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise ValueError(f"{path} is a damaged IDX file: it ends in its header.")
    shape = struct.unpack(f">{dimensions}I", header)
    dtype = np.dtype(_IDX_TYPES[magic[2]])
    n_bytes = math.prod(shape) * dtype.itemsize
    damaged = (
        f"{path} is a damaged IDX file: shape {list(shape)} needs exactly {n_bytes} bytes of "
        "elements. Download it again."
    )
    start = 4 + 4 * dimensions
    if max_bytes - start < n_bytes:
        raise ValueError(damaged)
    is_mapped = (
        dtype.itemsize == 1 and n_bytes >= LARGE_BYTES and not isinstance(file, gzip.GzipFile)
    )
    if is_mapped and path.stat().st_size == start + n_bytes:
        return torch.from_numpy(np.memmap(path, dtype, "c", start, shape))
    try:
        flat = _read_elements(file, dtype, n_bytes, path, "the array")
        is_longer = bool(file.read(1))
    except ValueError as error:
        raise ValueError(f"{damaged} ({error})") from error
    if is_longer:
        raise ValueError(damaged)
    if not dtype.isnative:
        reserve(n_bytes, path)
    return torch.from_numpy(flat.astype(dtype.newbyteorder("="), copy=False).reshape(shape))


@reader
def read_cifar(
    path: str | Path, classes: int = 10
) -> tuple[UInt8[Tensor, "n 3 32 32"], Int64[Tensor, "n"]]:
    """Read a binary batch of CIFAR-10 (`data_batch_1.bin`) or CIFAR-100 (`train.bin`).

    Layout: records of one label byte (CIFAR-100: a coarse and a fine label, of which the fine one
    is used) and 3072 bytes of pixels: all red ones, then green, then blue, row by row.

    Args:
        path: A file of the "binary version".
        classes: 10 or 100.

    Returns:
        Images and labels as they are in the file.

    Raises:
        ValueError: The file is not a whole number of records, or a label is out of range.
    """
    if classes not in (10, 100):
        raise ValueError(f"classes must be 10 or 100, got {classes}.")
    label_bytes = 1 if classes == 10 else 2
    reserve(2 * Path(path).stat().st_size, path)
    data = np.fromfile(path, np.uint8)
    if len(data) == 0 or len(data) % (label_bytes + _CIFAR_IMAGE_BYTES):
        raise ValueError(
            f"{path} has {len(data)} bytes, not a multiple of the record size {label_bytes} + "
            f"{_CIFAR_IMAGE_BYTES}. Download the binary version again."
        )
    records = torch.from_numpy(data).reshape(-1, label_bytes + _CIFAR_IMAGE_BYTES)
    labels = records[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        raise ValueError(
            f"{path} has the label {int(labels.max())}; CIFAR-{classes} has labels 0 to "
            f"{classes - 1}."
        )
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def mnist(folder: str | Path, split: Split = "train") -> Images:
    """Read MNIST: 60,000 training and 10,000 test images, grey, 28 x 28.

    Args:
        folder: Folder with `train-images-idx3-ubyte` and the three other IDX files, with or without
            `.gz`, or with a subfolder `mnist` that has them.
        split: "train" or "test".

    Returns:
        Images [n, 1, 28, 28] in [0, 1] and labels 0 to 9, in the order of the files.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged or has another shape.
    """
    return _read_idx_split(Path(folder), "mnist", split)


def fashion_mnist(folder: str | Path, split: Split = "train") -> Images:
    """Read Fashion-MNIST from a folder or its subfolder `fashion-mnist`; otherwise as `mnist`."""
    return _read_idx_split(Path(folder), "fashion-mnist", split)


def cifar10(folder: str | Path, split: Split = "train") -> Images:
    """Read CIFAR-10: 50,000 training and 10,000 test images in colour, 32 x 32.

    Args:
        folder: Folder with the six `.bin` files of the binary version, or with a subfolder
            `cifar-10-batches-bin`, `cifar-10` or `cifar-10/cifar-10-batches-bin` that has them.
        split: "train" or "test".

    Returns:
        Images [n, 3, 32, 32] in [0, 1] and labels 0 to 9, in the order of the files.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged or has another number of images.
    """
    _check_split(split)
    subfolders = ("", "cifar-10-batches-bin", "cifar-10", "cifar-10/cifar-10-batches-bin")
    images, labels = [], []
    for name in _CIFAR_FILES[split]:
        path = _first_file([Path(folder) / subfolder / name for subfolder in subfolders])
        x, y = read_cifar(path)
        if len(y) != _CIFAR_BATCH:
            raise ValueError(
                f"{path} has {len(y):,} images instead of {_CIFAR_BATCH:,}. Download it again."
            )
        images.append(x)
        labels.append(y)
    return torch.cat(images).float().div_(255), torch.cat(labels)


def _read_idx_split(folder: Path, name: str, split: Split) -> Images:
    _check_split(split)
    arrays = []
    for content in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        file = f"{_IDX_PREFIX[split]}-{content}"
        paths = [folder / name / file, folder / file]
        path = _first_file([p.with_name(p.name + end) for p in paths for end in ("", ".gz")])
        values = read_idx(path)
        shape = [_IDX_COUNT[split], 28, 28][: values.ndim]
        if values.dtype != torch.uint8 or values.ndim not in (1, 3) or list(values.shape) != shape:
            raise ValueError(
                f"{path} holds {values.dtype} of shape {list(values.shape)}; {name} ({split}) has "
                f"bytes of shape {shape}. Download it again."
            )
        arrays.append(values)
    x, y = arrays
    if x.ndim != 3 or y.ndim != 1 or int(y.max()) > 9:
        raise ValueError(
            f"The images and labels in {folder} do not match: shapes {list(x.shape)} and "
            f"{list(y.shape)}, labels up to {int(y.max())}. Check which file is which."
        )
    return x.unsqueeze(1).float().div_(255), y.long()


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")


def _first_file(paths: list[Path]) -> Path:
    for path in paths:
        if path.is_file():
            return path
    raise FileNotFoundError(f"None of these files exists: {', '.join(map(str, paths))}")
