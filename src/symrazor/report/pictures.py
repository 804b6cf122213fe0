"""Arrays as small PNG pictures in data addresses, without an image library."""

import base64
import re
import struct
import zlib
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

POSITIVE = (22, 138, 130)
NEGATIVE = (205, 88, 62)
"""Colours of signed values; their strength is opacity, so that zero is any page's background."""

_ADDRESS = re.compile(r"(data:image/(png|jpeg|gif|webp);base64,)?[A-Za-z0-9+/\s]+={0,2}\s*")
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


def address(pixels: UInt8[np.ndarray, "h w *channels"]) -> str:
    """A picture as a data address."""
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def shrink(image: Float[np.ndarray, "h w *channels"], largest: int) -> Any:
    """Average over blocks until neither side is longer than `largest` pixels."""
    step = -(-max(image.shape[:2]) // largest)
    if step <= 1:
        return image
    height, width = (-(-size // step) for size in image.shape[:2])
    around = [(0, height * step - image.shape[0]), (0, width * step - image.shape[1])]
    full = np.pad(image, [*around, *[(0, 0)] * (image.ndim - 2)], mode="edge")
    return full.reshape(height, step, width, step, *image.shape[2:]).mean((1, 3))


def signed(values: Float[np.ndarray, "h w"], scale: float) -> str:
    """Signed values as a data address: two colours, opacity |value| / scale."""
    strength = np.clip(np.abs(values) / (scale or 1.0), 0, 1)
    colours = np.where((values >= 0)[..., None], POSITIVE, NEGATIVE)
    pixels = np.concatenate([colours, np.round(255 * strength)[..., None]], -1)
    return address(pixels.astype(np.uint8))


def as_array(values: Any) -> Any:
    """Examples as an array.

    Raises:
        ValueError: examples of several sizes, without any values, or of something else.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"expected examples of one size, got others: {error}") from error
    if array.dtype.kind not in "buif" or 0 in array.shape:
        raise ValueError(f"expected examples of numbers, got {array.dtype} {list(array.shape)}")
    return array


def as_images(array: Any) -> Any:
    """Pictures as [n, h, w] or [n, h, w, 3], from [n, c, h, w] too.

    Raises:
        ValueError: other shapes.
    """
    if array.ndim == 4 and array.shape[-1] != 3:
        if array.shape[1] not in (1, 2, 3, 4):
            array = array[:, :1]
        array = array[:, 0] if array.shape[1] in (1, 2) else np.moveaxis(array[:, :3], 1, -1)
    if array.ndim not in (3, 4):
        raise ValueError(
            f"expected pictures [n, h, w], [n, c, h, w] or [n, h, w, 3], got {list(array.shape)}"
        )
    return array


def grey_levels(images: Any, limits: tuple[float, float] | None = None) -> Any:
    """Values as 0 to 255: bytes as they are, others from the smallest to the largest."""
    if images.dtype == np.uint8:
        return images.astype(float)
    finite = np.nan_to_num(images.astype(float), posinf=0.0, neginf=0.0)
    low, high = limits or (float(finite.min()), float(finite.max()))
    return np.clip(255 * (finite - low) / ((high - low) or 1.0), 0, 255)


def picture(values: Any, largest: int) -> str:
    """One picture of levels 0 to 255 as a data address."""
    return address(np.round(shrink(values, largest)).astype(np.uint8))


def encoded(text: str, longest: int = 200_000) -> str:
    """A picture that is encoded already, in base64 with or without "data:image/png;base64,".

    Raises:
        ValueError: anything else: a page takes no other addresses.
    """
    if len(text) > longest or not _ADDRESS.fullmatch(text):
        raise ValueError(
            f"expected a picture in base64 of at most {longest:,} characters, got {text[:40]!r}"
        )
    body = text.rpartition(",")[2]
    start = base64.b64decode("".join(body.split())[:16] + "==", validate=False)
    kind = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
    if kind is None:
        raise ValueError(f"expected a PNG, JPEG, GIF or WebP picture, got {text[:40]!r}")
    return f"data:image/{kind};base64,{''.join(body.split())}"
