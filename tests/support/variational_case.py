"""A small classifier and its data, for tests of variational networks."""

import torch
from torch import Tensor, nn

F64 = torch.float64


def mlp(hidden: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=generator, dtype=F64)
    return x, torch.arange(n) % 2
