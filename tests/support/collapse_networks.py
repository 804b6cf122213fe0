"""Networks of relaxed layers that are collapsed in tests."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.layers import FC, FFC, SFC, Conv, Relaxed, SConv, Subsample


def shake(model: nn.Module) -> nn.Module:
    """Every parameter away from zero, biases included."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def zoo() -> nn.Module:
    """Every kind of path, with every kind of subsampling."""
    torch.manual_seed(0)
    return nn.Sequential(
        Relaxed([Conv(1, 3, (8, 8))]),
        nn.ReLU(),
        Relaxed([FFC(3, 4, (8, 8), 2, bias=True), Conv(3, 4, (8, 8), 2)], mean=True),
        nn.ReLU(),
        Relaxed([Conv(4, 4, (4, 4), 2, reduction="max"), FFC(4, 4, (4, 4), 2)]),
        nn.ReLU(),
        Relaxed([FC(4, 4, (2, 2)), Conv(4, 4, (2, 2))]),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def line() -> nn.Module:
    torch.manual_seed(0)
    layers = [Relaxed([Conv(2, 4, (9,), 3), FFC(2, 4, (9,), 3)]), nn.GELU(), FC(4, 4, (3,))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 5))


def _volume() -> nn.Module:
    torch.manual_seed(0)
    layers = [Relaxed([Conv(1, 3, (4, 2, 4), 2), FFC(1, 3, (4, 2, 4), 2)]), nn.ReLU()]
    return nn.Sequential(*layers, Conv(3, 3, (2, 1, 2)), nn.Flatten(), nn.Linear(12, 5))


class Residual(nn.Module):
    """A network of a class of its own: nested, with a sum, one layer used twice, a Hyper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = Conv(1, 4, (8, 8))
        both = Relaxed([Conv(4, 4, (8, 8)), Conv(4, 4, (8, 8), kernel=5), FFC(4, 4, (8, 8))])
        self.block = nn.ModuleDict({"main": nn.Sequential(both, nn.ReLU()), "again": both})
        self.shrink = Subsample(4, "max", elements=2)
        self.gain = sr.Hyper(0.7)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        h = h + self.gain.value * self.block["main"](h) + 0.1 * self.block["again"](h)
        return self.head(self.shrink(h).flatten(1))


def _relaxed() -> nn.Module:
    """An ordinary network that was relaxed, with strides and padding of its own."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 4, 3)]
    ordinary = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))
    return sr.relax(ordinary, torch.zeros(2, 1, 8, 8))


def _sparse() -> nn.Module:
    torch.manual_seed(0)
    space = (2, 3, (4, 4), 2)
    layer = Relaxed([SConv(*space), SFC(*space, learn_omega="hyper", bias=True)], mean=True)
    return nn.Sequential(layer, nn.ReLU(), SConv(3, 3, (2, 2)), nn.Flatten(), nn.Linear(12, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2-D": (zoo, (1, 8, 8)),
    "1-D": (line, (2, 9)),
    "3-D": (_volume, (1, 4, 2, 4)),
    "residual": (Residual, (1, 8, 8)),
    "sparse": (_sparse, (2, 4, 4)),
    "relaxed": (_relaxed, (1, 8, 8)),
}


def ella() -> nn.Module:
    """The eight-block network of ELLA section 6.2, narrow."""
    torch.manual_seed(0)
    channels = [3, *(2 * m for m in (1, 2, 2, 4, 4, 8, 8, 16))]
    size, blocks = 32, []
    for c, d, stride in zip(channels, channels[1:], (1, 2, 1, 2, 1, 2, 2, 2), strict=False):
        space = (c, d, (size, size), stride)
        blocks += [Relaxed([FFC(*space), Conv(*space)]), nn.ReLU()]
        size //= stride
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))


def pair(mean: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layer = Relaxed([FFC(1, 4, (8, 8)), Conv(1, 4, (8, 8))], mean)
    other = Relaxed([FFC(4, 4, (8, 8), 2), Conv(4, 4, (8, 8), 2)])
    layer.scale_free_paths(1e4)
    return nn.Sequential(layer, nn.ReLU(), other, nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
