"""Random group convolutions, and how far they are from commuting with their group."""

import torch
from torch import Tensor

from symrazor.layers import Path


@torch.no_grad()
def largest_error(path: Path, x: Tensor) -> float:
    """Over all elements, relative to the largest output."""
    y = path(x)
    errors = [(path(before(x)) - after(y)).abs().max() for before, after in path.transformations()]
    return float(torch.stack(errors).max() / y.abs().max())


def random_case(path: Path, n: int = 2) -> tuple[Path, Tensor]:
    """Return the path with random weights in float64, and `n` random inputs."""
    path = path.double()
    with torch.no_grad():
        for parameter in path.parameters():
            parameter.normal_()
    return path, torch.randn(n, path.in_channels, *path.in_shape, dtype=torch.float64)
