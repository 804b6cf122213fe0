"""Read folders of images, one subfolder per class, and folders that Hugging Face `datasets` saved.

The latter need the package `datasets`.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from symrazor.core.files import is_system_error, reader, refuse_pipe, reserve
from symrazor.data.arrays import FileContents, split_contents

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
"""Formats of Pillow that are read. Others start programs: EPS runs Ghostscript."""
_DECODED_BYTES = 8
"""Memory for a pixel of the one image that is decoded at a time."""
_GREY_MODES = ("1", "L")
_WIDE_MODES = ("I", "F")  # also I;16 and the like: more than one byte per pixel
_MARKER_FILES = ("dataset_info.json", "dataset_dict.json")
_TEST_SPLITS = ("test", "validation", "valid")


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """Return the image files of each subfolder that has any, sorted by name."""
    files_of = {
        inner.name: sorted(p for p in inner.iterdir() if p.suffix.lower() in SUFFIXES)
        for inner in sorted(folder.iterdir())
        if inner.is_dir() and not inner.name.startswith(".")
    }
    return {name: files for name, files in files_of.items() if files}


@reader
def read_images(folder: str | Path) -> FileContents:
    """Read a folder with one subfolder of images for each class.

    Images have one channel if all are grey, otherwise three.

    Raises:
        ValueError: There are no images, an image is damaged, or the sizes differ.
        ModuleNotFoundError: Pillow is not installed.
    """
    folder = Path(folder)
    files_of = class_folders(folder)
    if not files_of:
        raise ValueError(
            f"No folders of images in {folder}. Arrange the images as {folder}/CLASS/IMAGE.png."
        )
    files = [file for files in files_of.values() for file in files]
    y = [label for label, group in enumerate(files_of.values()) for _ in group]
    ids = tuple(file.relative_to(folder).as_posix() for file in files)
    names = tuple(files_of)
    x = read_files(files)
    return FileContents(x, torch.tensor(y), names, "image", ids=ids, id_name="file")


def read_files(files: list[Path]) -> UInt8[Tensor, "n c h w"]:
    """Read images of one size as bytes. All headers are checked before any pixel is decoded."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Reading images needs Pillow: pip install pillow") from error
    headers = [_read_header(Image, file) for file in files]
    (width, height), _ = headers[0]
    for (size, _), file in zip(headers, files, strict=True):
        if size != (width, height):
            raise ValueError(
                f"Images must have one size: {files[0]} is {width} x {height}, {file} is "
                f"{size[0]} x {size[1]}. Resize or crop them."
            )
    channels = 1 if all(mode in _GREY_MODES for _, mode in headers) else 3
    memory = (2 * len(files) * channels + _DECODED_BYTES) * width * height  # twice: see the return
    reserve(memory, files[0].parent.parent)
    pixels = np.empty((len(files), height, width, channels), np.uint8)
    for number, file in enumerate(files):
        with _opened(Image, file) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
            pixels[number] = np.asarray(converted).reshape(pixels.shape[1:])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _read_header(Image: Any, file: Path) -> tuple[tuple[int, int], str]:
    """Return (width, height) and the colour mode without decoding the pixels."""
    with _opened(Image, file) as image:
        size, mode = image.size, str(image.mode)
    if mode.startswith(_WIDE_MODES):
        raise ValueError(
            f"{file} has more than one byte per pixel and channel (mode {mode}). Save such images "
            "as .npz."
        )
    return size, mode


class _BoundedFile(io.FileIO):
    """A file of which no more is read than there is.

    A part of an image can declare 4 GiB, and `read` allocates memory before it finds the end.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left)) or b""


@contextmanager
def _opened(Image: Any, file: Path) -> Iterator[Any]:
    """Open an image; turn all errors of Pillow, which have no common class, into a ValueError."""
    refuse_pipe(file)
    try:
        with _BoundedFile(file) as content, Image.open(content, formats=_FORMATS) as image:
            yield image
    except Exception as error:
        if is_system_error(error):
            raise
        is_unknown = type(error).__name__ == "UnidentifiedImageError"
        problem = f"Pillow cannot identify it as {', '.join(_FORMATS)}" if is_unknown else error
        raise ValueError(
            f"Cannot read the image {file}: {problem}. Replace or remove it."
        ) from error


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `datasets.save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in _MARKER_FILES)


@reader
def read_saved_dataset(folder: Path) -> FileContents:
    """Return inputs, labels, class names and test data of a saved data set.

    The split "train" is used for training and "test" or "validation" for testing. The inputs are
    the image column, the only other column, or all other columns if they are numbers.

    Raises:
        ModuleNotFoundError: `datasets` is not installed.
        ValueError: The folder is damaged, or no column can be read.
    """
    train, test = _load_splits(folder)
    return split_contents(train, folder, test)


def _load_splits(folder: Path) -> tuple[Any, Any]:
    """Return the training split and the test split, or None."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Reading {folder} needs the package datasets: pip install datasets. Or save the data "
            "as .npz."
        ) from error
    try:
        loaded: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # its readers of JSON and Arrow raise many types
        raise ValueError(
            f"datasets {datasets.__version__} cannot read {folder}: {type(error).__name__}: "
            f"{error}. Save it again."
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        train, test = loaded, None
    else:
        train = loaded["train" if "train" in loaded else next(iter(loaded))]
        test = next((loaded[name] for name in _TEST_SPLITS if name in loaded), None)
    if len(train) == 0:
        raise ValueError(f"The training split in {folder} is empty.")
    return train, None if test is train or test is None or len(test) == 0 else test
