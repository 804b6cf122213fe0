"""Resample images and other grids under affine maps; spread points evenly over a grid."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Outside = Literal["zeros", "border", "reflection"]
"""Values beyond the border: 0, the nearest pixel, or the mirror image."""


def sample_grid(
    x: Float[Tensor, "n c *s"], maps: Float[Tensor, "m k d e"], outside: Outside = "zeros"
) -> Float[Tensor, "n c k *s"]:
    r"""Return $x(T q)$ at every pixel q for every map T, by linear interpolation.

    The origin is the middle of the grid. The unit is half the last axis, in every direction, so
    that rotations do not distort images that are not square.

    Args:
        x: grids of d = 1 to 3 dimensions.
        maps: k matrices [d, d + 1] for each grid, or for all together (m = 1): coordinates are in
            the order (x, y, z), where x is the last axis, and the last column is a shift. Positions
            are computed in the precision of the maps.
        outside: values beyond the border.
    """
    shape = tuple(x.shape[2:])
    (n, c), (m, k, dims, _) = x.shape[:2], maps.shape
    affine = maps.reshape(m * k, dims, dims + 1)
    if len(set(shape)) > 1:  # torch's unit is half of each axis
        units = [size / shape[-1] for size in reversed(shape)]
        scale = [[column / row for column in (*units, 1)] for row in units]
        affine = affine * affine.new_tensor(scale)
    if dims == 1:  # torch interpolates in 2 and 3 dimensions: use an image of one row
        affine = F.pad(affine[:, :, [0, 0, 1]] * affine.new_tensor([1, 0, 1]), (0, 0, 0, 1))
        shape = (1, *shape)
    places = F.affine_grid(affine, [m * k, 1, *shape], align_corners=False).to(x)
    places = places.reshape(m, k * shape[0], *shape[1:], -1)
    places = places.expand(n, *places.shape[1:])
    rows = x.reshape(n, c, *shape)
    read = F.grid_sample(rows, places, padding_mode=outside, align_corners=False)
    return read.reshape(n, c, k, *x.shape[2:])


def recurrence_steps(dims: int) -> Float[Tensor, " dims"]:
    r"""Return the steps $\phi^{-1}, \dots, \phi^{-d}$ of an additive recurrence in the unit cube.

    $\phi$ solves $\phi^{d+1} = \phi + 1$. The fractional parts of the multiples of the steps are
    deterministic points that, unlike random points, leave no clusters and holes.
    """
    phi = 2.0
    for _ in range(40):  # fixed-point iteration
        phi = (1 + phi) ** (1 / (dims + 1))
    return torch.tensor([phi ** -(i + 1) for i in range(dims)], dtype=torch.float64)
