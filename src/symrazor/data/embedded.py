"""The digits that come with the package, and a canvas to put images on."""

from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from symrazor.data.batches import check_lengths, refusal

_DIGITS_TEST = 360  # of 1,797; the other 1,437 are for training


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
        raise refusal("split 'train', 'test' or 'all'", repr(split), "digits(split='train')")
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
        raise refusal("task 'digit' or 'quadrant'", repr(task), "on_canvas(x, y, task='digit')")
    if x.ndim != 4:
        raise refusal("x of shape [n, c, h, w]", f"{list(x.shape)}", "x.unsqueeze(1) if c is 1")
    check_lengths(x, y, "on_canvas")
    if int(y.min()) < 0 or int(y.max()) > 9:
        raise refusal("labels 0 to 9", f"{int(y.min())} to {int(y.max())}", "renumber them")
    n, c, h, w = x.shape
    half, least = size // 2, 2 * max(h, w)
    if size % 2 or size < least:
        raise refusal(f"an even size from {least} on", f"{size}", f"on_canvas(..., size={least})")
    q = torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed))
    top, left = (half - h) // 2, (half - w) // 2
    quadrants = x.new_zeros(n, 2, 2, c, half, half)
    quadrants[torch.arange(n), q // 2, q % 2, :, top : top + h, left : left + w] = x
    canvas = quadrants.permute(0, 3, 1, 4, 2, 5).reshape(n, c, size, size)
    return canvas, (y + 10 * q.to(y.device) if task == "quadrant" else y.clone())
