"""Provide the data that come with the package, and small synthetic data."""

import math
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from symrazor.data.batches import check_lengths

_N_TEST_DIGITS = 360  # of 1,797; the other 1,437 are for training


def digits(
    split: Literal["train", "test", "all"] = "train",
) -> tuple[Float[Tensor, "n 1 8 8"], Int64[Tensor, "n"]]:
    """Return the 1,797 handwritten 8 x 8 digits of the package (see assets/ATTRIBUTION.txt).

    The split is fixed and stratified: class c has n_c * 360 / 1797 of its images in the test set,
    rounded by largest remainder so that the parts have exactly 1,437 and 360 images.

    Returns:
        Images in [0, 1] and labels 0 to 9, in the order of the source.
    """
    if split not in ("train", "test", "all"):
        raise ValueError(f"split must be 'train', 'test' or 'all', got {split!r}.")
    with (files("symrazor") / "assets" / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        x = torch.from_numpy(arrays["images"]).float().div(16).unsqueeze(1)
        y = torch.from_numpy(arrays["labels"]).long()
    if split == "all":
        return x, y
    in_test = _stratified_mask(y, _N_TEST_DIGITS, torch.Generator().manual_seed(0))
    mask = in_test if split == "test" else ~in_test
    return x[mask], y[mask]


def _stratified_mask(
    y: Int64[Tensor, "n"], n_test: int, generator: torch.Generator
) -> Bool[Tensor, "n"]:
    """Return a mask with exactly `n_test` True values, stratified by largest remainder."""
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
    """Place each image in a random quadrant of an empty canvas (ELLA section 6.2).

    The quadrant q is uniform over 0 (top left), 1 (top right), 2 (bottom left) and 3 (bottom
    right); the image is centred in it. The images depend on `seed` only, not on `task`: the same
    images need translation invariance in one task and position in the other.

    Args:
        x: Images.
        y: Labels 0 to 9.
        size: Side of the canvas in pixels: even, and at least twice the side of an image.
        seed: Seed of the quadrants. Use another one for the test data.
        task: "digit" keeps the labels y (10 classes); "quadrant" gives y + 10 q (40 classes).

    Returns:
        The canvases and the labels of the task.

    Raises:
        ValueError: A shape, a label, the size or the task is not valid.
    """
    if task not in ("digit", "quadrant"):
        raise ValueError(f"task must be 'digit' or 'quadrant', got {task!r}.")
    if x.ndim != 4:
        raise ValueError(f"x must have shape [n, c, h, w], got {list(x.shape)}.")
    check_lengths(x, y, "on_canvas")
    if int(y.min()) < 0 or int(y.max()) > 9:
        raise ValueError(f"Labels must be 0 to 9, got {int(y.min())} to {int(y.max())}.")
    n, c, h, w = x.shape
    half, min_size = size // 2, 2 * max(h, w)
    if size % 2 or size < min_size:
        raise ValueError(f"size must be even and at least {min_size}, got {size}.")
    q = torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed))
    top, left = (half - h) // 2, (half - w) // 2
    quadrants = x.new_zeros(n, 2, 2, c, half, half)
    quadrants[torch.arange(n), q // 2, q % 2, :, top : top + h, left : left + w] = x
    canvas = quadrants.permute(0, 3, 1, 4, 2, 5).reshape(n, c, size, size)
    return canvas, (y + 10 * q.to(y.device) if task == "quadrant" else y.clone())


def rings(
    n: int, degrees: float = 360.0, noise: float = 0.06, seed: int = 0
) -> tuple[Float[Tensor, "n 2"], Int64[Tensor, "n"]]:
    """Return points in the plane whose class does not depend on the angle.

    Class 0 lies on a circle of radius 0.5; class 1 around the origin and on a circle of radius 1.

    Args:
        n: Number of points.
        degrees: Angles are uniform between -degrees / 2 and degrees / 2.
        noise: Standard deviation of the radius, relative to the radius.
        seed: Seed of the points.
    """
    if n < 1 or not 0 < degrees <= 360:
        raise ValueError(f"rings needs n >= 1 and 0 < degrees <= 360, got {n} and {degrees}.")
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    inner = (torch.arange(n) % 4) == 3
    angle = (torch.rand(n, generator=generator) - 0.5) * math.radians(degrees)
    radius = torch.where(y == 0, 0.5, 1.0)
    radius = radius * (1 + noise * torch.randn(n, generator=generator))
    x = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    blob = 0.1 * torch.randn(n, 2, generator=generator)
    return torch.where(inner.unsqueeze(1), blob, x), y
