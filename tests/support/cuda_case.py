"""A small network and the figures of an evidence, for tests on a GPU."""

import torch
from torch import Tensor, nn

import symrazor as sr


def small_net() -> nn.Module:
    """Convolutions, a norm and a dense layer, for the embedded digits."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def numbers(found: sr.Evidence) -> list[float]:
    """All of an evidence that can be compared."""
    return [*found.to_dict().values(), *found.effective_parameters.values()]


class ReadsOnHost(nn.Module):
    """A layer that reads a value on the host, which cannot be recorded as a graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().abs().sum()) >= 0 else -x
