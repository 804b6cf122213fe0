"""How far a group convolution is from commuting with its group."""

import torch
from torch import Tensor

from symrazor.layers import Path


@torch.no_grad()
def largest_error(path: Path, x: Tensor) -> float:
    """Over all elements, relative to the largest output."""
    y = path(x)
    errors = [(path(before(x)) - after(y)).abs().max() for before, after in path.transformations()]
    return float(torch.stack(errors).max() / y.abs().max())
