"""Compare the evidence of a dense network and a CNN by structure of the curvature.

OSULeaf holds leaf outlines that start anywhere (a CNN is right), ArrowHead and ItalyPowerDemand
aligned series (a dense network is right). Every network is trained twice from the same seed: with
Kronecker factors and with the exact matrix in the evidence steps. The evidence of each trained
state is then computed in every structure, for the same weights and the same prior.

    python benchmarks/structures.py DIR --seeds 0 1 2 3 4 --json FILE

DIR is described in prequential.py.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

import symrazor as sr
from prequential import CNN_WIDTH, DATA_SETS, DENSE_WIDTH, LEARNING_RATE, load
from symrazor.layers.plain import convolutional, fully_connected

RIGHT = {"OSULeaf": "CNN", "ArrowHead": "dense", "ItalyPowerDemand": "dense"}
STRUCTURES = ("kron", "ekfac", "block", "auto")
COLUMNS = [
    *("data", "seed", "trained with", "network", "test accuracy %", "test nll"),
    *(f"log evidence, {structure}" for structure in STRUCTURES),
]


def rows(folder: Path, name: str, seed: int, epochs: int) -> list[list[Any]]:
    """Train both networks in both ways, and return one row for each."""
    (x, y), test = load(folder, name)
    classes = int(y.max()) + 1
    makers = {
        "dense": partial(fully_connected, x.shape[1:], classes, DENSE_WIDTH),
        "CNN": partial(convolutional, x.shape[1:], classes, CNN_WIDTH),
    }
    result = []
    for trained_with in ("kron", "auto"):
        for network, make in makers.items():
            torch.manual_seed(seed)
            config = sr.FitConfig(
                epochs=epochs, batch_size=32, lr=LEARNING_RATE, seed=seed, progress=False
            )
            config = config.change(structure=trained_with)
            fit = sr.fit(make(), (x, y), test=test, config=config)
            values = [
                float(fit.razor.evidence(fit.data, structure=s).log_evidence) for s in STRUCTURES
            ]
            scores = fit.reading.test
            measured = [100 * scores["accuracy"], scores["nll"], *values]
            result.append(
                [name, seed, trained_with, network, *(round(value, 3) for value in measured)]
            )
            print(result[-1], flush=True)
    return result


def wins(table: list[list[Any]], trained_with: str, structure: str) -> dict[str, str]:
    """Return, for each data set, in how many seeds the right network has the higher evidence."""
    column = COLUMNS.index(f"log evidence, {structure}")
    counts: dict[str, list[bool]] = {}
    by_case = {(row[0], row[1], row[3]): row[column] for row in table if row[2] == trained_with}
    for (name, seed, network), value in by_case.items():
        if network == RIGHT[name]:
            other = next(n for n in ("dense", "CNN") if n != network)
            counts.setdefault(name, []).append(value > by_case[name, seed, other])
    return {name: f"{sum(right)} of {len(right)}" for name, right in counts.items()}


def document(
    table: list[list[Any]], right: dict[str, dict[str, str]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the content of a file in benchmarks/results/."""
    seeds = " ".join(map(str, arguments.seeds))
    data = " ".join(arguments.data)
    counts = [f"{case}: {name} {count}" for case, by in right.items() for name, count in by.items()]
    return {
        "title": "Evidence of series by structure of the curvature",
        "question": "Which structure gives the right network the higher evidence?",
        "command": [
            f"python benchmarks/structures.py DIR --data {data} --seeds {seeds} "
            f"--epochs {arguments.epochs} --json FILE"
        ],
        "machine": "one CPU thread",
        "columns": COLUMNS,
        "rows": table,
        "notes": ["Seeds in which the right network has the higher evidence:", *counts],
    }


def main() -> None:
    """Run all data sets and seeds, and write the rows and the counts."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", nargs="+", default=DATA_SETS, help="names of data sets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = [
        row
        for name in arguments.data
        for seed in arguments.seeds
        for row in rows(arguments.folder, name, seed, arguments.epochs)
    ]
    right = {
        f"trained with {t}, compared by {s}": wins(table, t, s)
        for t in ("kron", "auto")
        for s in STRUCTURES
    }
    print(json.dumps(right, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(document(table, right, arguments), indent=1) + "\n")


if __name__ == "__main__":
    main()
