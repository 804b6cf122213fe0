"""Readers of binary files: IDX (MNIST's) and CIFAR's batches."""

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

from symrazor.data.arrays import check_size
from symrazor.data.batches import refusal

# The third byte of an IDX file -> its element type. IDX is big-endian.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_MAX_DIMS = 8
_DEFLATE_MAX_RATIO = 1032  # no gzip stream expands further than this
_CIFAR_IMAGE = 3 * 32 * 32


def read_idx(path: str | Path) -> Shaped[Tensor, "..."]:
    """Read an IDX file, the format of MNIST, gzipped or not.

    Layout: two zero bytes, the element type, the number of dimensions D, D big-endian uint32
    sizes, the elements. The header is compared with the size of the file before any memory is
    taken for the elements; a gzipped file is held to deflate's largest possible expansion.

    Args:
        path: The file. Whether it is gzipped is seen from its content, not from its name.

    Returns:
        The elements, in the shape and type the header names.

    Raises:
        ValueError: If the file is not IDX, is truncated, or is longer than its header says.
    """
    path = Path(path)
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        most = path.stat().st_size * (_DEFLATE_MAX_RATIO if zipped else 1)
        if not zipped:
            return _parse_idx(raw, path, most)
        try:
            with gzip.GzipFile(fileobj=raw) as file:
                return _parse_idx(file, path, most)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise refusal("a whole gzip file", f"{path}: {error}", "fetch it again") from error


def _parse_idx(file: io.BufferedIOBase, path: Path, most: int) -> Shaped[Tensor, "..."]:
    """Parse IDX from `file`, which holds at most `most` bytes."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _IDX_TYPES:
        got = f"{path}, which starts with the bytes {magic.hex(' ') or '(none)'}"
        raise refusal("an IDX file (00 00, element type, dimensions)", got, "check the path")
    dims = magic[3]
    if not 1 <= dims <= _IDX_MAX_DIMS:
        raise refusal(f"1 to {_IDX_MAX_DIMS} dimensions", f"{dims} in {path}", "fetch it again")
    header = file.read(4 * dims)
    if len(header) < 4 * dims:
        raise refusal(f"{dims} sizes", f"{path}, which ends before them", "fetch it again")
    shape = struct.unpack(f">{dims}I", header)
    dtype = np.dtype(_IDX_TYPES[magic[2]])
    expected = math.prod(shape) * dtype.itemsize
    held = min(most - 4 - 4 * dims, expected)
    if held == expected:
        check_size(math.prod(shape), path)
    data = file.read(expected) if held == expected else b""
    if len(data) < expected or file.read(1):
        what = f"{expected} bytes of elements for shape {list(shape)}"
        raise refusal(what, f"{path}, which holds fewer or more", "fetch it again")
    # The copy is writable, as torch wants it, and in the byte order of this machine.
    array = np.frombuffer(data, dtype).astype(dtype.newbyteorder("=")).reshape(shape)
    return torch.from_numpy(array)


def read_cifar(
    path: str | Path, classes: int = 10
) -> tuple[UInt8[Tensor, "n 3 32 32"], Int64[Tensor, "n"]]:
    """Read a binary batch of CIFAR-10 (`data_batch_1.bin`) or CIFAR-100 (`train.bin`).

    Layout: records of one label byte (CIFAR-100: two, of which the second, the fine one, counts)
    and 3072 bytes of pixels, first all red ones, then green, then blue, each row by row.

    Args:
        path: The file, as it comes in the archive with the "binary version".
        classes: 10 or 100.

    Returns:
        Images and labels as they are in the file.

    Raises:
        ValueError: If the file is no whole number of records, or a label is out of range.
    """
    if classes not in (10, 100):
        raise refusal("10 or 100 classes", f"{classes}", "read_cifar(path, classes=10)")
    head = 1 if classes == 10 else 2
    data = np.fromfile(path, np.uint8)
    if len(data) == 0 or len(data) % (head + _CIFAR_IMAGE):
        what = f"whole records of {head} + {_CIFAR_IMAGE} bytes"
        raise refusal(what, f"{path} of {len(data)} bytes", "fetch the binary version again")
    records = torch.from_numpy(data).reshape(-1, head + _CIFAR_IMAGE)
    labels = records[:, head - 1].long()
    if int(labels.max()) >= classes:
        what = f"labels 0 to {classes - 1}"
        raise refusal(what, f"{int(labels.max())} in {path}", "check the path and the classes")
    return records[:, head:].reshape(-1, 3, 32, 32), labels
