"""Compare options of the prequential evidence on one half of small training sets.

Predictions at the trained weights or with the weights integrated out, warm starts, and blocks of
doubling size instead of eight equal ones. Higher is better. DIR as in prequential.py; iris and wine
are those of scikit-learn.

    python benchmarks/prequential_options.py DIR --json FILE
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_iris, load_wine
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the next import is a script beside this

import symrazor as sr
from prequential import LEARNING_RATE, Tensors, load, networks
from symrazor.training.predictive import log_predictive

SERIES = ("GunPoint", "ItalyPowerDemand", "ArrowHead", "OSULeaf")
VECTORS = {"iris": load_iris, "wine": load_wine}
ORDERS = 4
COLUMNS = [
    "data",
    "samples",
    "network",
    "map",
    "mc",
    "warm start",
    "warm start, half the epochs",
    "doubling blocks",
    "standard error of map",
]


def development_half(data: Tensors) -> Tensors:
    """Return a random half of the data, always the same one."""
    n = len(data[1])
    index = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: n // 2]
    return data[0][index], data[1][index]


def load_vectors(name: str) -> Tensors:
    """Return standardised features and classes."""
    features, labels = VECTORS[name](return_X_y=True)
    x = torch.as_tensor(features, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.as_tensor(labels)


def measure(folder: Path, name: str, epochs: int) -> list[list[Any]]:
    """Return one row for each network."""
    data = development_half(load_vectors(name) if name in VECTORS else load(folder, name)[0])
    n, makers = len(data[1]), networks(data)
    if name in VECTORS:
        del makers["CNN"]
    options: dict[str, Any] = {"orders": ORDERS, "epochs": epochs, "lr": LEARNING_RATE}
    rows: list[list[Any]] = []
    for network, make in makers.items():
        gains: list[float] = []

        def predict(fit: sr.Fit, x: Tensor, y: Tensor, gains: list[float] = gains) -> Tensor:
            """Predict at the trained weights and record the gain of integrating over them."""
            log_p = log_predictive(fit, x, y, "map")
            gains.append(float((log_predictive(fit, x, y, "mc") - log_p).sum()))
            return log_p

        plain = sr.prequential(make, data, predict=predict, **options)
        others = [
            sr.prequential(make, data, **options | changes).log_evidence
            for changes in (
                {"warm_start": True},
                {"warm_start": True, "epochs": epochs // 2},
                {"blocks": [n // 8, n // 4, n // 2]},
            )
        ]
        integrated = plain.log_evidence + sum(gains) / ORDERS
        numbers = [plain.log_evidence, integrated, *others, plain.standard_error]
        rows.append([name, n, network, *(round(number, 1) for number in numbers)])
        print(*rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with one folder per data set")
    parser.add_argument("--data", nargs="+", default=(*SERIES, *VECTORS), help="names of data sets")
    parser.add_argument("--epochs", type=int, default=100, help="epochs of each training")
    parser.add_argument("--machine", default="one CPU thread", help="description of the machine")
    parser.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    document = {
        "title": "Options of the prequential evidence",
        "question": "Which predictions, starts and blocks give the highest prequential evidence?",
        "command": ["python benchmarks/prequential_options.py DIR --json FILE"],
        "machine": args.machine,
        "columns": COLUMNS,
        "rows": [row for name in args.data for row in measure(args.folder, name, args.epochs)],
        "notes": [],
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
