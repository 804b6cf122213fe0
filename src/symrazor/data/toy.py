"""Points in the plane whose class does not depend on the angle: rings, or pieces of them."""

import math

import torch
from torch import Tensor

from symrazor.data.batches import refusal


def rings(
    n: int, degrees: float = 360.0, noise: float = 0.06, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Class 0 on a circle of radius 0.5; class 1 around the origin and on a circle of radius 1.

    Args:
        n: number of points.
        degrees: angles are uniform between -degrees / 2 and degrees / 2.
        noise: relative deviation of a point from its place.
        seed: of the points.

    Returns:
        Points [n, 2] and labels.
    """
    if n < 1 or not 0 < degrees <= 360:
        raise refusal("points, on an arc of up to 360 degrees", f"n={n}, {degrees}", "rings(120)")
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    inner = (torch.arange(n) % 4) == 3
    angle = (torch.rand(n, generator=generator) - 0.5) * math.radians(degrees)
    radius = torch.where(y == 0, 0.5, 1.0)
    radius = radius * (1 + noise * torch.randn(n, generator=generator))
    x = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    blob = 0.1 * torch.randn(n, 2, generator=generator)
    return torch.where(inner.unsqueeze(1), blob, x), y
