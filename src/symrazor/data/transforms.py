r"""Transform images as in the papers (ELLA section 6, LILA, Table 3), and augment batches.

| data set | made by |
|---|---|
| rotated MNIST, CIFAR-10 | `rotated(x, 180)` (or 90) |
| translated MNIST, CIFAR-10 | `translated(x, MAX_SHIFT_PIXELS["mnist"])` |
| scaled MNIST, CIFAR-10 | `scaled(x, 2.0)` |
| digit and (digit, quadrant) MNIST | `quadrants(x, y, task)` |

`rotated`, `translated` and `scaled` draw once per image. They read the image at
$A(q - m) + m + t$ for the pixel at q, with m the centre, bilinearly and with zeros outside. The
same seed gives the same draws on every device. Apply them before `normalised`, which moves black to
a negative value.

Differences from the reference implementation, on purpose: images stay float32 after a
transformation, where the reference rounds them to integers; the random numbers differ. Its
translation by "8" pixels is 8/14 of half an image, 7.71 pixels on MNIST and 9.14 on CIFAR-10
(`MAX_SHIFT_PIXELS`).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.data.embedded import on_canvas
from symrazor.groups.lie import sample_grid

NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar-10": (
        (125.3 / 255, 123.0 / 255, 113.9 / 255),
        (63.0 / 255, 62.1 / 255, 66.7 / 255),
    ),
}
"""Data set -> mean and standard deviation of each channel."""

MAX_SHIFT_PIXELS = {
    "mnist": 8 / 14 * 27 / 2,
    "fashion-mnist": 8 / 14 * 27 / 2,
    "cifar-10": 8 / 14 * 16,
}
"""Data set -> largest shift of its translated version, in pixels."""

_IMAGES_PER_CHUNK = 10_000  # resampled at a time, to bound the memory of the grid
CROP_MARGIN_PIXELS = 4
"""Zero padding around an image before it is cropped."""


def rotated(x: Float[Tensor, "n c h w"], degrees: float, seed: int = 0) -> Float[Tensor, "n c h w"]:
    """Rotate each image by an angle uniform on [-degrees, degrees]."""
    angle = _uniform(x, 1, seed)[:, 0] * math.radians(degrees)
    cos, sin = angle.cos(), angle.sin()
    return _resampled(x, torch.stack([cos, -sin, sin, cos], 1).reshape(-1, 2, 2))


def translated(
    x: Float[Tensor, "n c h w"], pixels: float, seed: int = 0
) -> Float[Tensor, "n c h w"]:
    """Shift each image by an offset uniform on [-pixels, pixels] in both directions."""
    return _resampled(x, torch.eye(2, device=x.device), _uniform(x, 2, seed) * pixels)


def scaled(
    x: Float[Tensor, "n c h w"], factor: float = 2.0, seed: int = 0
) -> Float[Tensor, "n c h w"]:
    """Scale each image by exp(u), u uniform on [-log factor, log factor]."""
    if not factor >= 1:
        raise ValueError(f"factor must be at least 1, got {factor}.")
    zoom = (_uniform(x, 1, seed) * math.log(factor)).exp()
    return _resampled(x, zoom.unsqueeze(2) * torch.eye(2, device=x.device))


def resized(x: Float[Tensor, "n c h w"], size: int) -> Float[Tensor, "n c {size} {size}"]:
    """Resize images bilinearly, without antialiasing, as the reference does."""
    return F.interpolate(x, (size, size), mode="bilinear", align_corners=False, antialias=False)


def normalised(x: Float[Tensor, "n c h w"], name: str) -> Float[Tensor, "n c h w"]:
    """Standardise each channel with the mean and standard deviation of a data set.

    Args:
        x: Images in [0, 1].
        name: Key of `NORMALISATION`.

    Raises:
        ValueError: The data set is unknown or has another number of channels.
    """
    if name not in NORMALISATION:
        raise ValueError(f"Unknown data set {name!r}. Choose one of: {sorted(NORMALISATION)}.")
    mean, deviation = (x.new_tensor(part).reshape(-1, 1, 1) for part in NORMALISATION[name])
    if x.ndim != 4 or x.shape[1] != len(mean):
        raise ValueError(f"x must have shape [n, {len(mean)}, h, w], got {list(x.shape)}.")
    return (x - mean) / deviation


def quadrants(
    x: Float[Tensor, "n 1 h w"],
    y: Int64[Tensor, "n"],
    task: Literal["digit", "quadrant"],
    seed: int = 0,
    size: int = 32,
) -> tuple[Float[Tensor, "n 1 {size} {size}"], Int64[Tensor, "n"]]:
    """Place MNIST digits in a quadrant of a canvas, resize and normalise (ELLA section 6.2).

    The images depend on `seed` only, not on `task` (see `on_canvas`).

    Args:
        x: MNIST in [0, 1].
        y: Labels.
        task: "digit" keeps the 10 labels, "quadrant" gives 40.
        seed: Seed of the quadrants. Use another one for the test data.
        size: Side of the resulting images in pixels.

    Returns:
        Normalised images and labels.
    """
    images, labels = on_canvas(x, y, 2 * x.shape[-1], seed, task)
    return normalised(resized(images, size), "mnist"), labels


def _uniform(x: Tensor, columns: int, seed: int) -> Float[Tensor, "n {columns}"]:
    """Draw numbers uniform on [-1, 1), on the CPU so that they are the same for every device."""
    draws = torch.rand(len(x), columns, generator=torch.Generator().manual_seed(seed))
    return (2 * draws - 1).to(x.device)


def _resampled(
    x: Float[Tensor, "n c h w"],
    matrix: Float[Tensor, "*n 2 2"],
    shift: Float[Tensor, "n 2"] | None = None,
) -> Float[Tensor, "n c h w"]:
    """Read x at matrix (q - centre) + centre + shift for each pixel q, in (column, row) order."""
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(
            f"x must be floating point of shape [n, c, h, w], got {x.dtype} of shape "
            f"{list(x.shape)}. For bytes use x.float() / 255."
        )
    maps = x.new_zeros(len(x), 1, 2, 3)
    maps[..., :2] = matrix.unsqueeze(-3)
    if shift is not None:
        maps[:, 0, :, 2] = shift / (x.shape[-1] / 2)
    chunks = zip(x.split(_IMAGES_PER_CHUNK), maps.split(_IMAGES_PER_CHUNK), strict=True)
    return torch.cat([sample_grid(images, chunk).squeeze(2) for images, chunk in chunks])


def flip_and_crop(
    x: Float[Tensor, "n c h w"], generator: torch.Generator
) -> Float[Tensor, "n c h w"]:
    r"""Flip each image horizontally with probability 1/2, then shift it by up to 4 pixels.

    $y[n, c, i, j] = \bar x[n, c, i + t_n, j' + l_n]$, where $\bar x$ is x padded by 4 zeros, $t_n$
    and $l_n$ are uniform on 0 to 8, and j' is j or w - 1 - j. Each image has its own draw. Nothing
    is copied from the device to the host.

    Args:
        x: Images.
        generator: Source of the draws, ideally on the device of x.
    """
    n, c, h, w = x.shape
    device = generator.device
    max_offset = 2 * CROP_MARGIN_PIXELS
    offsets = torch.randint(0, max_offset + 1, (2, n, 1), generator=generator, device=device)
    flips = torch.randint(0, 2, (n, 1), generator=generator, device=device)
    top, left = offsets.to(x.device, non_blocking=True)
    flip = flips.to(x.device, non_blocking=True)
    columns = torch.arange(w, device=x.device)
    rows = torch.arange(h, device=x.device) + top
    columns = torch.where(flip == 1, w - 1 - columns, columns) + left
    padded = F.pad(x, (CROP_MARGIN_PIXELS,) * 4)
    sample = torch.arange(n, device=x.device).reshape(n, 1, 1, 1)
    channel = torch.arange(c, device=x.device).reshape(c, 1, 1)
    return padded[sample, channel, rows.reshape(n, 1, h, 1), columns.reshape(n, 1, 1, w)]
