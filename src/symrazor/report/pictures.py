"""Encode arrays as small PNG images in data URLs, without an image library."""

import base64
import re
import struct
import zlib
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

POSITIVE = (22, 138, 130)
NEGATIVE = (205, 88, 62)
"""Colours of signed values. Opacity is the magnitude, so zero shows the page background."""

_BASE64_IMAGE = re.compile(r"(data:image/(png|jpeg|gif|webp);base64,)?[A-Za-z0-9+/\s]+={0,2}\s*")
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def png(pixels: UInt8[np.ndarray, "h w *channels"]) -> bytes:
    """Encode grey [h, w], colour [h, w, 3] or colour with opacity [h, w, 4]."""
    kind = {(): 0, (3,): 2, (4,): 6}[pixels.shape[2:]]
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_url(pixels: UInt8[np.ndarray, "h w *channels"]) -> str:
    """Return an image as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def downsample(image: Float[np.ndarray, "h w *channels"], largest: int) -> Any:
    """Average over blocks until neither side is longer than `largest` pixels."""
    step = -(-max(image.shape[:2]) // largest)
    if step <= 1:
        return image
    height, width = (-(-size // step) for size in image.shape[:2])
    around = [(0, height * step - image.shape[0]), (0, width * step - image.shape[1])]
    full = np.pad(image, [*around, *[(0, 0)] * (image.ndim - 2)], mode="edge")
    return full.reshape(height, step, width, step, *image.shape[2:]).mean((1, 3))


def signed_data_url(values: Float[np.ndarray, "h w"], scale: float) -> str:
    """Return signed values as a data URL: one colour per sign, with opacity |value| / scale."""
    strength = np.clip(np.abs(values) / (scale or 1.0), 0, 1)
    colours = np.where((values >= 0)[..., None], POSITIVE, NEGATIVE)
    pixels = np.concatenate([colours, np.round(255 * strength)[..., None]], -1)
    return data_url(pixels.astype(np.uint8))


def as_array(values: Any) -> Any:
    """Convert examples to an array.

    Raises:
        ValueError: if the examples differ in size, are empty, or are not numbers.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"The examples differ in size: {error}") from error
    if array.dtype.kind not in "buif" or 0 in array.shape:
        raise ValueError(
            f"The examples must be numbers, got {array.dtype} of shape {list(array.shape)}."
        )
    return array


def as_images(array: Any) -> Any:
    """Convert images [n, h, w], [n, c, h, w] or [n, h, w, 3] to [n, h, w] or [n, h, w, 3].

    Raises:
        ValueError: for other shapes.
    """
    if array.ndim == 4 and array.shape[-1] != 3:
        if array.shape[1] not in (1, 2, 3, 4):
            array = array[:, :1]
        array = array[:, 0] if array.shape[1] in (1, 2) else np.moveaxis(array[:, :3], 1, -1)
    if array.ndim not in (3, 4):
        raise ValueError(
            f"Images must have shape [n, h, w], [n, c, h, w] or [n, h, w, 3], got "
            f"{list(array.shape)}."
        )
    return array


def grey_levels(images: Any, limits: tuple[float, float] | None = None) -> Any:
    """Map values to 0 to 255: bytes unchanged, others from their minimum to their maximum."""
    if images.dtype == np.uint8:
        return images.astype(float)
    finite = np.nan_to_num(images.astype(float), posinf=0.0, neginf=0.0)
    low, high = limits or (float(finite.min()), float(finite.max()))
    return np.clip(255 * (finite - low) / ((high - low) or 1.0), 0, 255)


def image_data_url(values: Any, largest: int) -> str:
    """Return one image of levels 0 to 255 as a data URL."""
    return data_url(np.round(downsample(values, largest)).astype(np.uint8))


def checked_data_url(text: str, max_length: int = 200_000) -> str:
    """Check an image that is encoded in base64, with or without "data:image/png;base64,".

    Raises:
        ValueError: for anything else; a page accepts no other URLs.
    """
    if len(text) > max_length or not _BASE64_IMAGE.fullmatch(text):
        raise ValueError(
            f"An image must be base64 of at most {max_length:,} characters, got {text[:40]!r}."
        )
    body = text.rpartition(",")[2]
    start = base64.b64decode("".join(body.split())[:16] + "==", validate=False)
    kind = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
    if kind is None:
        raise ValueError(f"An image must be PNG, JPEG, GIF or WebP, got {text[:40]!r}.")
    return f"data:image/{kind};base64,{''.join(body.split())}"
