"""A folder of images, one folder inside for each class: PNG, JPEG and what else Pillow reads."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from symrazor.data.arrays import check_size
from symrazor.data.batches import refusal

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_GREY = ("1", "L")
_DEEP = ("I", "F")  # and I;16...: more than a byte per pixel


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """Names of the folders with images in them -> those images, both in alphabetical order."""
    found = {
        inner.name: sorted(p for p in inner.iterdir() if p.suffix.lower() in SUFFIXES)
        for inner in sorted(folder.iterdir())
        if inner.is_dir() and not inner.name.startswith(".")
    }
    return {name: files for name, files in found.items() if files}


def read_images(
    folder: str | Path,
) -> tuple[UInt8[Tensor, "n c h w"], Int64[Tensor, "n"], tuple[str, ...]]:
    """Read a folder with one folder of images for each class.

    Returns:
        Images of one channel if all are grey, else of three; classes; names of the classes.

    Raises:
        ValueError: no images, one that cannot be read, different sizes, or too many.
        ModuleNotFoundError: Pillow is not installed.
    """
    folder = Path(folder)
    classes = class_folders(folder)
    if not classes:
        what = f"folders of images in {folder}, one for each class"
        raise refusal(what, "none", f"{folder}/CLASS/IMAGE.png")
    files = [file for inside in classes.values() for file in inside]
    x = read_files(files)
    y = [number for number, inside in enumerate(classes.values()) for _ in inside]
    return x, torch.tensor(y), tuple(classes)


def read_files(files: list[Path]) -> UInt8[Tensor, "n c h w"]:
    """Images of one size, as bytes; sizes are read from all headers before any pixel is."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected the package pillow to read images, got none; do: pip install pillow"
        ) from error
    headers = [_header(Image, file) for file in files]
    size = headers[0][0]
    for (other, _), file in zip(headers, files, strict=True):
        if other != size:
            got = f"{_times(size)} in {files[0]} and {_times(other)} in {file}"
            raise refusal("images of one size", got, "resize or crop them first")
    channels = 1 if all(mode in _GREY for _, mode in headers) else 3
    check_size(len(files) * channels * size[0] * size[1], files[0].parent.parent)
    pixels = np.empty((len(files), size[1], size[0], channels), np.uint8)
    for number, file in enumerate(files):
        try:
            with Image.open(file) as image:
                converted = image.convert("L" if channels == 1 else "RGB")
                pixels[number] = np.asarray(converted).reshape(pixels.shape[1:])
        except (OSError, ValueError, SyntaxError) as error:
            raise refusal("an image", f"{file}: {error}", "fetch it again, or remove it") from error
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _header(Image: Any, file: Path) -> tuple[tuple[int, int], str]:
    """Width and height, and mode, from the first bytes of a file."""
    try:
        with Image.open(file) as image:
            size, mode = image.size, str(image.mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise refusal("an image", f"{file}: {error}", "fetch it again, or remove it") from error
    if mode.startswith(_DEEP):
        what = "images with one byte per channel and pixel"
        raise refusal(what, f"{file} of mode {mode}", "save them as .npz instead")
    return size, mode


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
