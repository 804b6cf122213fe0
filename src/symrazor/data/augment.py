"""Random transformations of training batches, on the device, one draw per image."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

MARGIN = 4
"""Pixels of zero padding around an image before it is cropped."""


def flip_and_crop(
    x: Float[Tensor, "n c h w"], generator: torch.Generator
) -> Float[Tensor, "n c h w"]:
    r"""Mirror each image left to right with probability 1/2, then move it by up to 4 pixels.

    $y[n, c, i, j] = \bar x[n, c, i + t_n, j' + l_n]$, where $\bar x$ is x in a frame of 4 zeros,
    $t_n, l_n$ are uniform on 0 to 8, and j' is j or w - 1 - j. Zero is the mean colour if x is
    normalised. The reference draws one flip and one crop for a whole batch; here every image has
    its own. Nothing is read back from the device.

    Args:
        x: Images.
        generator: Of the draws; on the device of x nothing is copied either.

    Returns:
        As many images of the same shape.
    """
    n, c, h, w = x.shape
    place = generator.device
    shifts = torch.randint(0, 2 * MARGIN + 1, (2, n, 1), generator=generator, device=place)
    flips = torch.randint(0, 2, (n, 1), generator=generator, device=place)
    top, left = shifts.to(x.device, non_blocking=True)
    flip = flips.to(x.device, non_blocking=True)
    columns = torch.arange(w, device=x.device)
    rows = torch.arange(h, device=x.device) + top
    columns = torch.where(flip == 1, w - 1 - columns, columns) + left
    framed = F.pad(x, (MARGIN,) * 4)
    sample = torch.arange(n, device=x.device).reshape(n, 1, 1, 1)
    channel = torch.arange(c, device=x.device).reshape(c, 1, 1)
    return framed[sample, channel, rows.reshape(n, 1, h, 1), columns.reshape(n, 1, 1, w)]
