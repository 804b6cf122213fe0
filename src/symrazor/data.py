"""Data in, as plain tensors: the embedded digits, files, an in-memory loader, one check.

Everything here ends as `Tensors`, a pair (x, y): x is float32 with the data along the first
dimension, y holds int64 class labels or float32 targets. Randomness comes from a
`torch.Generator` with its own seed, never from the global one.
"""

import gzip
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

Tensors = tuple[Tensor, Tensor]

_DIGITS_TEST = 360  # of 1,797; the other 1,437 are for training

# The third byte of an IDX file -> its element type. IDX is big-endian.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_MAX_DIMS = 8
_DEFLATE_MAX_RATIO = 1032  # no gzip stream expands further than this


def digits(
    split: Literal["train", "test", "all"] = "train",
) -> tuple[Float[Tensor, "n 1 8 8"], Int64[Tensor, "n"]]:
    """The 1,797 real 8x8 digits that come with the package (see assets/ATTRIBUTION.txt).

    The split is fixed and stratified: class c gives n_c * 360 / 1797 of its images to the test
    part, rounded by largest remainder so that the parts hold exactly 1,437 and 360 images.

    Args:
        split: Which part.

    Returns:
        Images in [0, 1] and labels 0 to 9, in the order of the source.

    Raises:
        ValueError: If `split` is none of the three.
    """
    if split not in ("train", "test", "all"):
        raise _refusal("split 'train', 'test' or 'all'", repr(split), "digits(split='train')")
    with (files("symrazor") / "assets" / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        x = torch.from_numpy(arrays["images"]).float().div(16).unsqueeze(1)
        y = torch.from_numpy(arrays["labels"]).long()
    if split == "all":
        return x, y
    in_test = _stratified_mask(y, _DIGITS_TEST, torch.Generator().manual_seed(0))
    keep = in_test if split == "test" else ~in_test
    return x[keep], y[keep]


def _stratified_mask(
    y: Int64[Tensor, "n"], n_test: int, generator: torch.Generator
) -> Bool[Tensor, "n"]:
    """A mask with exactly `n_test` True, spread over the classes by largest remainder."""
    counts = torch.bincount(y)
    quota, remainder = counts * n_test // len(y), counts * n_test % len(y)
    largest = torch.argsort(remainder, descending=True, stable=True)
    quota[largest[: n_test - int(quota.sum())]] += 1
    mask = torch.zeros(len(y), dtype=torch.bool)
    for c, n in enumerate(quota.tolist()):
        members = torch.nonzero(y == c).squeeze(1)
        mask[members[torch.randperm(len(members), generator=generator)[:n]]] = True
    return mask


def on_canvas(
    x: Float[Tensor, "n c h w"],
    y: Int64[Tensor, "n"],
    size: int = 16,
    seed: int = 0,
    task: Literal["digit", "quadrant"] = "digit",
) -> tuple[Float[Tensor, "n c {size} {size}"], Int64[Tensor, "n"]]:
    """Put each image in one of the four quadrants of an empty canvas (ELLA section 6.2).

    The quadrant q is drawn uniformly from 0 top left, 1 top right, 2 bottom left and 3 bottom
    right; the image is centred in it. The images depend on `seed` only, not on `task`: the same
    pictures ask for translation invariance in one task and forbid it in the other.

    Args:
        x: Images.
        y: Labels 0 to 9.
        size: Side of the canvas: even, and at least twice the side of an image.
        seed: Of the quadrants. Use another one for the test part.
        task: "digit" keeps the labels y (10 classes); "quadrant" gives y + 10 q (40 classes).

    Returns:
        The canvases and the labels of the task.

    Raises:
        ValueError: If the shapes, the labels, the size or the task do not fit.
    """
    if task not in ("digit", "quadrant"):
        raise _refusal("task 'digit' or 'quadrant'", repr(task), "on_canvas(x, y, task='digit')")
    if x.ndim != 4:
        raise _refusal("x of shape [n, c, h, w]", f"{list(x.shape)}", "x.unsqueeze(1) if c is 1")
    _check_lengths(x, y, "on_canvas")
    if int(y.min()) < 0 or int(y.max()) > 9:
        raise _refusal("labels 0 to 9", f"{int(y.min())} to {int(y.max())}", "renumber them")
    n, c, h, w = x.shape
    half, least = size // 2, 2 * max(h, w)
    if size % 2 or size < least:
        raise _refusal(f"an even size from {least} on", f"{size}", f"on_canvas(..., size={least})")
    q = torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed))
    top, left = (half - h) // 2, (half - w) // 2
    quadrants = x.new_zeros(n, 2, 2, c, half, half)
    quadrants[torch.arange(n), q // 2, q % 2, :, top : top + h, left : left + w] = x
    canvas = quadrants.permute(0, 3, 1, 4, 2, 5).reshape(n, c, size, size)
    return canvas, (y + 10 * q.to(y.device) if task == "quadrant" else y.clone())


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
            raise _refusal("a whole gzip file", f"{path}: {error}", "fetch it again") from error


def _parse_idx(file: io.BufferedIOBase, path: Path, most: int) -> Shaped[Tensor, "..."]:
    """Parse IDX from `file`, which holds at most `most` bytes."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _IDX_TYPES:
        got = f"{path}, which starts with the bytes {magic.hex(' ') or '(none)'}"
        raise _refusal("an IDX file (00 00, element type, dimensions)", got, "check the path")
    dims = magic[3]
    if not 1 <= dims <= _IDX_MAX_DIMS:
        raise _refusal(f"1 to {_IDX_MAX_DIMS} dimensions", f"{dims} in {path}", "fetch it again")
    header = file.read(4 * dims)
    if len(header) < 4 * dims:
        raise _refusal(f"{dims} sizes", f"{path}, which ends before them", "fetch it again")
    shape = struct.unpack(f">{dims}I", header)
    dtype = np.dtype(_IDX_TYPES[magic[2]])
    expected = math.prod(shape) * dtype.itemsize
    held = min(most - 4 - 4 * dims, expected)
    data = file.read(expected) if held == expected else b""
    if len(data) < expected or file.read(1):
        what = f"{expected} bytes of elements for shape {list(shape)}"
        raise _refusal(what, f"{path}, which holds fewer or more", "fetch it again")
    # The copy is writable, as torch wants it, and in the byte order of this machine.
    array = np.frombuffer(data, dtype).astype(dtype.newbyteorder("=")).reshape(shape)
    return torch.from_numpy(array)


def read_npz(path: str | Path) -> Tensors:
    """Read a NumPy archive with the keys x and y. Never unpickles.

    Args:
        path: The file. x: numbers, data along the first dimension; uint8 is taken for an image
            and divided by 255, every other type is taken as it is. y: integer labels or float
            targets, one for each x.

    Returns:
        x as float32; y as int64 if it holds integers, else as float32.

    Raises:
        ValueError: If a key is missing or holds anything but finite numbers, or lengths differ.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    with Path(path).open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array without a name")
            for key in ("x", "y"):
                if key not in archive:
                    raise ValueError(f"only the keys {sorted(archive)}")
                arrays[key] = archive[key]
                if arrays[key].dtype.kind not in "biuf":
                    raise ValueError(f"{key} of type {arrays[key].dtype}")
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError) as error:
            what = "an .npz file with plain numbers under the keys x and y"
            raise _refusal(what, f"{path}: {error}", "numpy.savez(path, x=x, y=y)") from error
    x = torch.from_numpy(arrays["x"].astype(np.float32))
    is_label = arrays["y"].dtype.kind in "biu"
    y = torch.from_numpy(arrays["y"].astype(np.int64 if is_label else np.float32))
    check_batch(x, y, str(path))
    return (x / 255 if arrays["x"].dtype == np.uint8 else x), y


class TensorLoader:
    """A re-iterable loader of batches from two tensors that are already in memory.

    Args:
        x: Inputs, data along the first dimension.
        y: Targets, one for each input.
        batch_size: Data per batch; the last batch may be smaller.
        shuffle: Draw a new order for every pass.
        generator: Where the order comes from; the same generator state gives the same batches.
            Without one, the loader makes its own, with seed 0.
        drop_last: Leave out a last batch that is smaller than the others.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
    ) -> None:
        _check_lengths(x, y, "TensorLoader")
        if batch_size < 1:
            raise _refusal("batch_size of 1 or more", f"{batch_size}", "batch_size=128")
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.drop_last = drop_last

    @property
    def n_data(self) -> int:
        """Number of data, those that drop_last leaves out included."""
        return len(self.x)

    def __len__(self) -> int:
        full, rest = divmod(self.n_data, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Tensors]:
        order = torch.arange(self.n_data)
        if self.shuffle:
            place = self.generator.device
            order = torch.randperm(self.n_data, generator=self.generator, device=place)
        for index in order.split(self.batch_size)[: len(self)]:
            yield (
                self.x.index_select(0, index.to(self.x.device)),
                self.y.index_select(0, index.to(self.y.device)),
            )


def check_batch(x: Tensor, y: Tensor, where: str) -> None:
    """Refuse a batch that no evidence can be computed from, and name the culprit.

    Args:
        x: Inputs, data along the first dimension.
        y: Targets, one for each input.
        where: What the message calls this batch, for example "training data, batch 3".

    Raises:
        ValueError: If the batch is empty, the lengths differ, or a value is NaN or infinite.
    """
    _check_lengths(x, y, where)
    for name, values in (("x", x), ("y", y)):
        bad = ~torch.isfinite(values)
        if bool(bad.any()):
            first = int(torch.nonzero(bad.reshape(len(values), -1).any(dim=1))[0, 0])
            n_nan = int(torch.isnan(values).sum())
            n_inf = int(bad.sum()) - n_nan
            got = f"{n_nan} NaN and {n_inf} infinite values, the first in sample {first}"
            raise _refusal(f"finite {name} in {where}", got, "remove or repair these samples")


def _check_lengths(x: Tensor, y: Tensor, where: str) -> None:
    """Refuse inputs and targets that do not pair up, or of which there are none."""
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        got = f"shapes {list(x.shape)} and {list(y.shape)}"
        raise _refusal(f"x and y of the same length in {where}", got, "pass the y of these x")
    if len(x) == 0:
        raise _refusal(f"at least one sample in {where}", "none", "check where the data come from")


def _refusal(expected: str, got: str, do: str) -> ValueError:
    """The error to raise: one form for every message."""
    return ValueError(f"expected {expected}, got {got}; do {do}")
