"""Read IDX files (the format of MNIST) and binary batches of CIFAR."""

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from symrazor.data.numpy_files import check_size

# Third byte of an IDX file -> element type. IDX is big-endian.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_MAX_DIMENSIONS = 8
_DEFLATE_MAX_RATIO = 1032  # no gzip stream expands further than this
_CIFAR_IMAGE_BYTES = 3 * 32 * 32


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
    can_hold = max_bytes - 4 - 4 * dimensions >= n_bytes
    if can_hold:
        check_size(math.prod(shape), path)
    data = file.read(n_bytes) if can_hold else b""
    if len(data) < n_bytes or file.read(1):
        raise ValueError(
            f"{path} is a damaged IDX file: shape {list(shape)} needs exactly {n_bytes} bytes of "
            "elements. Download it again."
        )
    # The copy is writable, as torch requires, and in the byte order of this machine.
    array = np.frombuffer(data, dtype).astype(dtype.newbyteorder("=")).reshape(shape)
    return torch.from_numpy(array)


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
