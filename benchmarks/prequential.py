"""Compare a dense network with a CNN by prequential evidence, on series with a known answer.

OSULeaf holds leaf outlines that start anywhere (cyclic shifts do not matter), ArrowHead and
ItalyPowerDemand aligned series (position matters). The Laplace evidence with Kronecker factors and
the accuracy on test data are computed for the same networks.

    python benchmarks/prequential.py DIR --json FILE

DIR has one folder per data set, as in the wheel of aeon (aeon/datasets/data):
DIR/OSULeaf/OSULeaf_TRAIN.ts, DIR/OSULeaf/OSULeaf_TEST.ts and so on.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.layers.plain import convolutional, fully_connected

DATA_SETS = ("OSULeaf", "ArrowHead", "ItalyPowerDemand")
CNN_WIDTH, DENSE_WIDTH = 6, 10
LEARNING_RATE = 1e-2
COLUMNS = [
    "data",
    "seed",
    "dense: nats",
    "CNN: nats",
    "dense minus CNN",
    "standard error over orders",
    "standard error over data",
    "last block",
    "verdict",
    "Laplace: dense minus CNN",
    "test accuracy %, dense",
    "test accuracy %, CNN",
]
Tensors = tuple[Tensor, Tensor]


def read_series(path: Path) -> tuple[Tensor, list[str]]:
    """Read series of equal length [n, 1, length] and their labels from a .ts file."""
    _, _, body = path.read_text(encoding="utf-8").partition("@data")
    series, labels = [], []
    for line in body.splitlines():
        if line.strip():
            values, _, label = line.strip().rpartition(":")
            series.append([float(value) for value in values.split(",")])
            labels.append(label)
    return torch.tensor(series).unsqueeze(1), labels


def load(folder: Path, name: str) -> tuple[Tensors, Tensors]:
    """Return training and test data, standardised by the training data."""
    (x, labels), (x_test, test_labels) = (
        read_series(folder / name / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")
    )
    classes = {label: index for index, label in enumerate(sorted(set(labels)))}
    y, y_test = (torch.tensor([classes[one] for one in part]) for part in (labels, test_labels))
    mean, scale = x.mean(), x.std()
    return ((x - mean) / scale, y), ((x_test - mean) / scale, y_test)


def networks(data: Tensors) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build the networks to compare."""
    shape, n_classes = data[0].shape[1:], int(data[1].max()) + 1
    return {
        "dense": partial(fully_connected, shape, n_classes, DENSE_WIDTH),
        "CNN": partial(convolutional, shape, n_classes, CNN_WIDTH),
    }


def measure(folder: Path, name: str, seed: int, orders: int, epochs: int) -> list[Any]:
    """Return one row of the table."""
    data, test = load(folder, name)
    makers = networks(data)
    runs = [
        sr.prequential(make, data, seed=seed, orders=orders, epochs=epochs, lr=LEARNING_RATE)
        for make in makers.values()
    ]
    for network, run in zip(makers, runs, strict=True):
        blocks = [round(value, 1) for value in run.blocks.mean((0, 1)).tolist()]
        print(f"{name}, seed {seed}, {network}: {run}, blocks {blocks}", flush=True)
    gap = runs[0].compare(runs[1])
    torch.manual_seed(seed)
    fits = [
        sr.fit(make(), data, test=test, seed=seed, epochs=epochs, lr=LEARNING_RATE, progress=False)
        for make in makers.values()
    ]
    laplace = [float(fit.evidence.log_evidence) for fit in fits]
    accuracies = [round(100 * fit.reading.test["accuracy"], 1) for fit in fits]
    print(f"{name}, seed {seed}: {gap}; Laplace {laplace}; accuracy {accuracies}", flush=True)
    numbers = [run.log_evidence for run in runs]
    numbers += [gap.difference, gap.standard_error, gap.sampling_error, gap.last_block]
    verdict = {"first": "dense", "second": "CNN"}.get(gap.verdict, gap.verdict)
    rounded = [round(number, 1) for number in numbers]
    return [name, seed, *rounded, verdict, round(laplace[0] - laplace[1], 1), *accuracies]


def document(rows: Sequence[Sequence[Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the content of a file in benchmarks/results/."""
    return {
        "title": "Prequential evidence of series",
        "question": "Does the prequential evidence rank a dense network and a CNN correctly?",
        "command": [
            f"python benchmarks/prequential.py DIR --epochs {args.epochs} --orders {args.orders} "
            f"--seeds {args.seeds} --json FILE"
        ],
        "machine": args.machine,
        "columns": COLUMNS,
        "rows": rows,
        "notes": [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with one folder per data set")
    parser.add_argument("--data", nargs="+", default=DATA_SETS, help="names of data sets")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds")
    parser.add_argument("--orders", type=int, default=2, help="orders of the data for each seed")
    parser.add_argument("--epochs", type=int, default=200, help="epochs of each training")
    parser.add_argument("--machine", default="one CPU thread", help="description of the machine")
    parser.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(args.folder, name, seed, args.orders, args.epochs)
        for name in args.data
        for seed in range(args.seeds)
    ]
    if args.json:
        args.json.write_text(json.dumps(document(rows, args), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
