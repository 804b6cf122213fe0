"""Prune a small convolutional network to a tenth of its weights: by odds, and by magnitude.

Digits of 8 x 8 (1,437 for training, 360 held out). A network is trained by `fit`, its hidden units
and channels are removed until at most the given share of the weights remains, and the smaller
network is trained again. Both ways start from the same trained network; they differ only in the
order in which units are removed: by the odds of the network without the unit, or by the norm of the
incoming weights and bias, relative to the mean norm of the layer.

    python benchmarks/pruning.py --seeds 0 1 2 3 4 --json FILE
"""

import argparse
import json
import math
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.inference.razor import Razor
from symrazor.symmetry import pruning

COLUMNS = [
    "seed",
    "weights kept %",
    "before %",
    "odds %",
    "magnitude %",
    "odds nll",
    "magnitude nll",
]


def network() -> nn.Module:
    """Return a network of two convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


class ByMagnitude:
    """Order units by the norm of their incoming weights and bias, relative to the layer's mean."""

    def __init__(self, module: pruning.Weighted) -> None:
        squares = module.weight.detach().square().flatten(1).sum(1)
        if module.bias is not None:
            squares = squares + module.bias.detach().square()
        norms = squares.sqrt()
        self.scores: Tensor = -norms / norms.mean()
        self.present = torch.ones_like(norms, dtype=torch.bool)

    def log_odds(self) -> Tensor:
        """Return minus the relative norms."""
        return self.scores.masked_fill(~self.present, -math.inf)

    def remove(self, unit: int) -> None:
        """Remove a unit."""
        self.present[unit] = False


def by_magnitude(razor: Razor, _: object) -> dict[str, ByMagnitude]:
    """Return the order of the units of all layers."""
    modules = {layer.name: layer.module for layer in razor.layers}
    return {n: ByMagnitude(m) for n, m in modules.items() if isinstance(m, pruning.Weighted)}


def main() -> None:
    """Print one row for each seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    train, test = sr.data.digits("train"), sr.data.digits("test")
    rows = []
    for seed in options.seeds:
        torch.manual_seed(seed)
        config = sr.FitConfig(epochs=options.epochs, lr=0.005, seed=seed, progress=False)
        config = config.change(estimator="mc")
        model = network()
        fit = sr.fit(model, train, test=test, config=config)
        scores = [fit.reading.test]
        for odds in (pruning.unit_posteriors, by_magnitude):
            with patch.object(pruning, "unit_posteriors", odds):
                smaller = pruning.prune(fit.razor, fit.data, keep=options.keep).model
            scores.append(sr.fit(smaller, train, test=test, config=config).reading.test)
        kept, total = (sum(p.numel() for p in m.parameters()) for m in (smaller, model))
        accuracies = [f"{100 * score['accuracy']:.1f}" for score in scores]
        losses = [f"{score['nll']:.3f}" for score in scores[1:]]
        rows.append([seed, f"{100 * kept / total:.1f}", *accuracies, *losses])
        print(*rows[-1], sep="  ", flush=True)
        if options.json:
            table = {"columns": COLUMNS, "rows": rows}
            options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
