"""Measure how well a random subset tells the log-determinant of all data.

For subsets of several sizes, three figures are compared with the exact log-determinant and the
exact number of effective parameters: the log-determinant of the subset times N/n (a lower bound of
the evidence in expectation), that of the scaled matrix (an upper bound in expectation), and their
geometric mean (`scaling="geometric"`). The network is a small CNN, trained on the embedded digits.

    python benchmarks/subsets.py --json benchmarks/results/evidence-subsets.json
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import symrazor as sr
from symrazor.data import TensorLoader, digits

N = 400
SIZES = (25, 50, 100, 200)
PRECISIONS = (1.0, 10.0)
COLUMNS = [
    "samples",
    "prior precision",
    "lower bound, error %",
    "upper bound, error %",
    "geometric mean, error %",
    "largest error promised %",
    "effective parameters, error %",
]
Figures = tuple[float, float]
"""Log-determinant and number of effective parameters."""


def trained(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a trained network and its data."""
    x, y = (part[:N] for part in digits("train"))
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        for images, labels in TensorLoader(x, y, 64, shuffle=True):
            optimiser.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimiser.step()
    return model.eval(), x, y


def figures(model: nn.Module, x: Tensor, y: Tensor, precision: float, **options: Any) -> Figures:
    """Return the figures of all data, estimated from some."""
    options = {"structure": "kernel", **options}
    razor = sr.Razor(model, "categorical", N, prior_precision=precision, **options)
    evidence = razor.evidence([(x, y)], subset=len(x))
    return float(evidence.log_det), sum(evidence.effective_parameters.values())


def row(
    data: tuple[nn.Module, Tensor, Tensor], size: int, precision: float, exact: Figures, draws: int
) -> list[Any]:
    """Return mean errors over random subsets, in percent."""
    model, x, y = data
    errors: list[list[float]] = []
    for draw in range(draws):
        index = torch.randperm(N, generator=torch.Generator().manual_seed(draw))[:size]
        part = x[index], y[index]
        low, _ = figures(model, *part, precision)
        high, _ = figures(model, *part, precision, block=size)
        mean_value, mean_gamma = figures(model, *part, precision, scaling="geometric")
        ratios = [low / exact[0], high / exact[0], mean_value / exact[0]]
        ratios += [(high / low) ** 0.5, mean_gamma / exact[1]]
        errors.append([100 * (ratio - 1) for ratio in ratios])
    return [size, precision, *(round(mean(column)) for column in zip(*errors, strict=True))]


def main() -> None:
    """Measure all sizes and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = trained(arguments.seed)
    rows = []
    for precision in PRECISIONS:
        exact = figures(*data, precision, structure="full")
        rows += [row(data, size, precision, exact, arguments.draws) for size in SIZES]
    command = f"python benchmarks/subsets.py --seed {arguments.seed} --json FILE"
    content = {
        "title": "The log-determinant from a subset of the data",
        "question": "How far is the log-determinant of all data from three estimates that read a "
        "random subset?",
        "command": [command],
        "machine": "one CPU thread",
        "columns": COLUMNS,
        "rows": rows,
        "notes": [
            f"A CNN with three convolutions on {N:,} embedded digits. Mean errors over "
            f"{arguments.draws} random subsets, relative to the exact log-determinant (last "
            "column: to the exact number of effective parameters, by the gradient of the "
            'geometric mean). "Promised" is the largest error of the geometric mean if both bounds '
            "are at their expectations.",
            "The lower and the upper bound of the log-determinant hold in expectation over "
            "subsets, not for each subset. The geometric mean is no bound.",
        ],
    }
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
