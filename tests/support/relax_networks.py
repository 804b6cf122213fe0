"""Ordinary networks that are relaxed in tests."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.layers import Relaxed
from symrazor.testing import assert_close


class Block(nn.Module):
    """conv - norm - activation - conv - norm, plus a shortcut that fits."""

    def __init__(self, c: int, d: int, stride: int = 1, norm: type = nn.GroupNorm) -> None:
        super().__init__()
        make = (lambda: nn.GroupNorm(2, d)) if norm is nn.GroupNorm else (lambda: norm(d))
        self.conv1 = nn.Conv2d(c, d, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make()
        self.conv2 = nn.Conv2d(d, d, 3, padding=1)
        self.norm2 = make()
        self.shortcut = nn.Conv2d(c, d, 1, stride=stride) if c != d else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Nested blocks in a ModuleList, functional pooling, a linear head."""

    def __init__(self, c: int = 1, norm: type = nn.GroupNorm) -> None:
        super().__init__()
        self.stem = nn.Conv2d(c, 4, 3, padding=1, padding_mode="circular")
        self.blocks = nn.ModuleList([Block(4, 4, norm=norm), Block(4, 6, stride=2, norm=norm)])
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def classifier(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


def same(model: nn.Module, x: Any, tolerance: float = 1e-5, **options: Any) -> nn.Module:
    """Relax, and check that outputs stay and that gradients reach the free paths."""
    relaxed = sr.relax(model, x, **options)
    with torch.no_grad():
        expected = model.eval()(x)
        assert_close(relaxed.eval()(x), expected, tolerance)
    relaxed(x).square().sum().backward()
    layers = [m for m in relaxed.modules() if isinstance(m, Relaxed)]
    assert layers
    for layer in layers:
        for path in list(layer.paths)[1:]:
            last = [p for n, p in path.named_parameters() if n.endswith("weight")][-1]
            assert last.grad is not None and float(last.grad.abs().max()) > 0
            assert not last.any()
    return relaxed


class Looking(nn.Module):
    """Reaches around its modules in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(1, 2, 3), how
        self.hidden = [self.conv]

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "attribute":
                return (self.conv(x) * self.conv.weight.norm()).flatten(1)
            case "list":
                return self.hidden[0](x).flatten(1)
            case _:
                y = self.conv(x).flatten(1)
                return y if isinstance(self.conv, nn.Conv2d) else 2 * y
