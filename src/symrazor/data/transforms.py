r"""The transformations that make the papers' data sets (ELLA section 6, LILA, Table 3).

One draw per image and seed; the same seed gives the same draws on every device. `rotated`,
`translated` and `scaled` read the image at $A(q - m) + m + t$ for the pixel at q, m the middle,
bilinearly, with zeros outside.

| data set | made by |
|---|---|
| rotated MNIST, CIFAR-10 | `rotated(x, 180)` (or 90) |
| translated MNIST, CIFAR-10 | `translated(x, TRANSLATION["mnist"])` |
| scaled MNIST, CIFAR-10 | `scaled(x, 2.0)` |
| digit and (digit, quadrant) MNIST | `quadrants(x, y, task)` |

All before `normalised`, which puts black at a negative value. Where we differ from the reference,
on purpose: its images are cut down to whole numbers after the transformation, ours stay float32;
the random numbers are others; it draws with seed 1 for training and 0 for test data, here the
caller says. Its translation by "8" pixels is one of 8/14 of half an image, which is 7.71 pixels on
MNIST and 9.14 on CIFAR-10 (`TRANSLATION`).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.core.resampling import resample
from symrazor.data.batches import refusal
from symrazor.data.embedded import on_canvas

NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar-10": (
        (125.3 / 255, 123.0 / 255, 113.9 / 255),
        (63.0 / 255, 62.1 / 255, 66.7 / 255),
    ),
}
"""Data set -> mean and deviation of each channel; the reference's for MNIST and CIFAR-10."""

TRANSLATION = {"mnist": 8 / 14 * 27 / 2, "fashion-mnist": 8 / 14 * 27 / 2, "cifar-10": 8 / 14 * 16}
"""Data set -> largest shift of its translated version, in pixels."""

_CHUNK = 10_000  # images that are resampled at a time, to bound the memory of the grid


def rotated(x: Float[Tensor, "n c h w"], degrees: float, seed: int = 0) -> Float[Tensor, "n c h w"]:
    """Turn each image by an angle uniform on [-degrees, degrees]."""
    angle = _uniform(x, 1, seed)[:, 0] * math.radians(degrees)
    cos, sin = angle.cos(), angle.sin()
    return _resampled(x, torch.stack([cos, -sin, sin, cos], 1).reshape(-1, 2, 2))


def translated(
    x: Float[Tensor, "n c h w"], pixels: float, seed: int = 0
) -> Float[Tensor, "n c h w"]:
    """Move each image by a shift uniform on [-pixels, pixels] in both directions."""
    return _resampled(x, torch.eye(2, device=x.device), _uniform(x, 2, seed) * pixels)


def scaled(
    x: Float[Tensor, "n c h w"], factor: float = 2.0, seed: int = 0
) -> Float[Tensor, "n c h w"]:
    """Shrink or magnify each image by exp(u), u uniform on [-log factor, log factor]."""
    if not factor >= 1:
        raise refusal("a factor of at least 1", f"{factor}", "scaled(x, 2.0)")
    zoom = (_uniform(x, 1, seed) * math.log(factor)).exp()
    return _resampled(x, zoom.unsqueeze(2) * torch.eye(2, device=x.device))


def resized(x: Float[Tensor, "n c h w"], size: int) -> Float[Tensor, "n c {size} {size}"]:
    """Bilinear, without a filter against aliasing, as in the reference."""
    return F.interpolate(x, (size, size), mode="bilinear", align_corners=False, antialias=False)


def normalised(x: Float[Tensor, "n c h w"], name: str) -> Float[Tensor, "n c h w"]:
    """(x - mean) / deviation, channel by channel, with the figures of a data set.

    Args:
        x: Images in [0, 1].
        name: Key of `NORMALISATION`.

    Raises:
        ValueError: If the data set is unknown or has another number of channels.
    """
    if name not in NORMALISATION:
        raise refusal(f"a data set in {sorted(NORMALISATION)}", repr(name), "use one of these")
    mean, deviation = (x.new_tensor(part).reshape(-1, 1, 1) for part in NORMALISATION[name])
    if x.ndim != 4 or x.shape[1] != len(mean):
        raise refusal(f"x of shape [n, {len(mean)}, h, w]", f"{list(x.shape)}", "check the data")
    return (x - mean) / deviation


def quadrants(
    x: Float[Tensor, "n 1 h w"],
    y: Int64[Tensor, "n"],
    task: Literal["digit", "quadrant"],
    seed: int = 0,
    size: int = 32,
) -> tuple[Float[Tensor, "n 1 {size} {size}"], Int64[Tensor, "n"]]:
    """Digit or (digit, quadrant) MNIST: a digit in a quarter of a canvas of 56 x 56, made smaller.

    The images depend on `seed` only, not on `task` (see `on_canvas`).

    Args:
        x: MNIST in [0, 1].
        y: Its labels.
        task: "digit" keeps the 10 labels, "quadrant" gives 40.
        seed: Of the quadrants; use another one for the test part.
        size: Of the result.

    Returns:
        Normalised images and labels.
    """
    images, labels = on_canvas(x, y, 2 * x.shape[-1], seed, task)
    return normalised(resized(images, size), "mnist"), labels


def _uniform(x: Tensor, columns: int, seed: int) -> Float[Tensor, "n {columns}"]:
    """Numbers uniform on [-1, 1), drawn on the CPU so that they are the same everywhere."""
    draws = torch.rand(len(x), columns, generator=torch.Generator().manual_seed(seed))
    return (2 * draws - 1).to(x.device)


def _resampled(
    x: Float[Tensor, "n c h w"],
    matrix: Float[Tensor, "*n 2 2"],
    shift: Float[Tensor, "n 2"] | None = None,
) -> Float[Tensor, "n c h w"]:
    """Read x at matrix (q - middle) + middle + shift for each pixel q, in (column, row) order."""
    if x.ndim != 4 or not x.is_floating_point():
        got = f"{list(x.shape)} of {x.dtype}"
        raise refusal("float x of shape [n, c, h, w]", got, "x.float() / 255 if x holds bytes")
    half_width = x.shape[3] / 2  # the unit in which `resample` takes shifts
    maps = torch.eye(3, dtype=x.dtype, device=x.device).repeat(len(x), 1, 1)
    maps[:, :2, :2] = matrix
    if shift is not None:
        maps[:, :2, 2] = shift / half_width
    parts = [
        resample(images.unsqueeze(1), image_maps.unsqueeze(1)).flatten(0, 2)
        for images, image_maps in zip(x.split(_CHUNK), maps.split(_CHUNK), strict=True)
    ]
    return torch.cat(parts)
