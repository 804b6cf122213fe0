"""Small pictures and a small network, for tests of augmentation."""

import torch
from torch import Tensor, nn


def pictures(n: int = 5, channels: int = 1, size: int = 6) -> Tensor:
    """Smooth ones, in float64."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.rand(n, channels, size, size, generator=generator, dtype=torch.float64)
    return torch.nn.functional.avg_pool2d(raw, 3, 1, 1)


def small_network(features: int, classes: int = 3) -> nn.Module:
    """Two dense layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, classes))
