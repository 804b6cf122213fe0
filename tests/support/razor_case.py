"""A small network and its data, trained with the penalty of a Razor."""

import torch
from torch import Tensor, nn

import symrazor as sr

F64 = torch.float64


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator, dtype=F64)
    return x, (x @ torch.randn(3, 3, generator=generator, dtype=F64)).argmax(1)


def train(model: nn.Module, razor: sr.Razor, x: Tensor, y: Tensor, steps: int = 300) -> None:
    optimiser = torch.optim.Adam(sr.weights(model).values(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = razor.likelihood.nll(model(x), y).mean() + razor.penalty()
        loss.backward()
        optimiser.step()
