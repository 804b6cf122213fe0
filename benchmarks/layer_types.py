"""Compare structures of the curvature with the exact log-determinant, for every type of layer.

Small networks with random weights in float64, one type of layer each, 60 random data with three
classes. Printed is log |I + H / delta| at delta = 1, for the same weights in every structure.

    python benchmarks/layer_types.py --json FILE
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import symrazor as sr

N, STEPS, WIDTH = 60, 6, 8
STRUCTURES: dict[str, dict[str, Any]] = {
    "exact": {"structure": "full"},
    "block-diagonal": {"structure": "block"},
    "EKFAC": {"structure": "ekfac"},
    "Kronecker, expand": {"structure": "kron"},
    "Kronecker, reduce": {"structure": "kron", "flavour": "reduce"},
    "diagonal": {"structure": "diag"},
}


class First(nn.Module):
    """Return the first of several outputs."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence."""
        y: Tensor = self.body(x)[0]
        return y


class SelfAttention(nn.Module):
    """Return the attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence."""
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


class Positions(nn.Module):
    """Add a position to each step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(STEPS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence."""
        return torch.tanh(x + self.positions)


class Tokens(nn.Module):
    """Predict the next of five tokens; the head may be the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of three tokens."""
        index = (2 * x[:, :, 0]).round().clamp(-2, 2).long() + 2
        y: Tensor = self.head(torch.tanh(self.body(self.words(index).cumsum(1)))[:, -1])[:, :3]
        return y


def with_head(*body: nn.Module) -> nn.Module:
    """Return a network of this body, a nonlinearity, a mean over positions, and a linear head."""
    return nn.Sequential(*body, nn.Tanh(), Mean(), nn.Linear(WIDTH, 3))


class Mean(nn.Module):
    """Average over positions: the second dimension of sequences, the last ones of images."""

    def forward(self, x: Tensor) -> Tensor:
        """Return features [n, c]."""
        return x.flatten(2).mean(2) if x.dim() == 4 else x.mean(1)


def convolutions(groups: int, norm: nn.Module) -> nn.Module:
    """Return a network of two convolutions on [n, 1, steps, width]."""
    first = nn.Conv2d(1, WIDTH, 3, padding=1)
    second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=groups)
    return with_head(nn.Unflatten(1, (1, STEPS)), first, norm, nn.GELU(), second)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(STEPS * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    ),
    "linear, shared by positions": lambda: with_head(nn.Linear(WIDTH, WIDTH)),
    "convolution": lambda: convolutions(1, nn.Identity()),
    "convolution, depth-wise": lambda: convolutions(WIDTH, nn.Identity()),
    "convolution, GroupNorm": lambda: convolutions(1, nn.GroupNorm(2, WIDTH)),
    "attention": lambda: with_head(SelfAttention()),
    "transformer layer": lambda: with_head(
        nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
    ),
    "positions": lambda: with_head(Positions(), nn.Linear(WIDTH, WIDTH)),
    "GRU": lambda: with_head(First(nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "LSTM": lambda: with_head(First(nn.LSTM(WIDTH, WIDTH, batch_first=True))),
    "embedding": lambda: Tokens(tied=False),
    "embedding, tied to the head": lambda: Tokens(tied=True),
}


def main() -> None:
    """Print one row for each network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    rows = []
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        model = make().double().eval()
        x, y = torch.randn(N, STEPS, WIDTH, dtype=torch.float64), torch.arange(N) % 3
        n_weights = sum(value.numel() for value in sr.weights(model).values())
        razors = [sr.Razor(model, "categorical", N, **method) for method in STRUCTURES.values()]
        values = [float(razor.evidence([(x, y)]).log_det) for razor in razors]
        rows.append([name, n_weights, *(f"{value:.1f}" for value in values)])
        print(*rows[-1], sep="  ", flush=True)
        exact, block, ekfac = values[:3]
        assert exact <= block * (1 + 1e-9) <= ekfac * (1 + 1e-6), name
    if options.json:
        columns = ["layer", "weights", *STRUCTURES]
        options.json.write_text(json.dumps({"columns": columns, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
