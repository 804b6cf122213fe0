r"""Pictures turned until those of a class agree: how far handwriting leans by itself.

Congealing, without any network: each picture is turned by the angle at which it correlates best
with the mean of its class, the mean is taken again, and so on. The angles are the poses that the
pictures had, up to one angle for each class, and measure how far pictures differ in pose before
anybody turns them.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

REACH, STEP = 45.0, 1.5
"""Degrees: angles that are tried."""
ROUNDS = 12


def congealed(
    x: Float[Tensor, "n c h w"], y: Int64[Tensor, " n"]
) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, " n"]]:
    """Pictures in the pose of their class, and the degrees each of them was turned by.

    Args:
        x: pictures on a black ground.
        y: classes.
    """
    aligned, degrees = x.clone(), x.new_zeros(len(x))
    for label in y.unique():
        own = (y == label).nonzero()[:, 0]
        aligned[own], degrees[own] = _agreed(x[own])
    return aligned, degrees


def _agreed(x: Float[Tensor, "n c h w"]) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, " n"]]:
    """One class."""
    angles = torch.arange(-REACH, REACH + STEP / 2, STEP, device=x.device)
    poses = torch.stack([_turned(x, float(angle)) for angle in angles], 1)
    flat = F.normalize(poses.flatten(2), dim=2)
    every = torch.arange(len(x), device=x.device)
    middle = len(angles) // 2
    chosen = torch.full((len(x),), middle, device=x.device)
    for _ in range(ROUNDS):
        chosen = (flat @ flat[every, chosen].mean(0)).argmax(1)
        offset = (chosen.float().mean() - middle).round().long()
        chosen = (chosen - offset).clamp(0, len(angles) - 1)
    return poses[every, chosen], angles[chosen]


def _turned(x: Float[Tensor, "n c h w"], degrees: float) -> Float[Tensor, "n c h w"]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = x.new_tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(x), 2, 3)
    grid = F.affine_grid(turn, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def spread(degrees: Float[Tensor, " n"], y: Int64[Tensor, " n"]) -> float:
    r"""Standard deviation of the angles about the mean of their class.

    Uniform angles on $\pm v$ have $v / \sqrt 3$.
    """
    left = [degrees[y == label] - degrees[y == label].mean() for label in y.unique()]
    return float(torch.cat(left).square().mean().sqrt())
