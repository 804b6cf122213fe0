"""Read folders of images, with one subfolder for each class."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from symrazor.data.numpy_files import check_size

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_GREY_MODES = ("1", "L")
_WIDE_MODES = ("I", "F")  # also I;16 and the like: more than one byte per pixel


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """Return the image files of each subfolder that has any, sorted by name."""
    files_of = {
        inner.name: sorted(p for p in inner.iterdir() if p.suffix.lower() in SUFFIXES)
        for inner in sorted(folder.iterdir())
        if inner.is_dir() and not inner.name.startswith(".")
    }
    return {name: files for name, files in files_of.items() if files}


def read_images(
    folder: str | Path,
) -> tuple[UInt8[Tensor, "n c h w"], Int64[Tensor, "n"], tuple[str, ...]]:
    """Read a folder with one subfolder of images for each class.

    Returns:
        Images with one channel if all are grey, otherwise with three; labels; class names.

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
    x = read_files([file for files in files_of.values() for file in files])
    y = [label for label, files in enumerate(files_of.values()) for _ in files]
    return x, torch.tensor(y), tuple(files_of)


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
    check_size(len(files) * channels * width * height, files[0].parent.parent)
    pixels = np.empty((len(files), height, width, channels), np.uint8)
    for number, file in enumerate(files):
        try:
            with Image.open(file) as image:
                converted = image.convert("L" if channels == 1 else "RGB")
                pixels[number] = np.asarray(converted).reshape(pixels.shape[1:])
        except (OSError, ValueError, SyntaxError) as error:
            raise _unreadable(file, error) from error
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _read_header(Image: Any, file: Path) -> tuple[tuple[int, int], str]:
    """Return (width, height) and the colour mode without decoding the pixels."""
    try:
        with Image.open(file) as image:
            size, mode = image.size, str(image.mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(file, error) from error
    if mode.startswith(_WIDE_MODES):
        raise ValueError(
            f"{file} has more than one byte per pixel and channel (mode {mode}). Save such images "
            "as .npz."
        )
    return size, mode


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"Cannot read the image {file}: {error}. Replace or remove it.")
