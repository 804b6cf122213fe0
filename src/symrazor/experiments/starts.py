"""Does what is learned depend on where one starts? Free paths from loose to tight, two tasks.

    python -m symrazor.experiments.starts [--seed 0 1 2] [--json FILE]

The relaxed network of `symrazor discover` on the embedded digits, its free paths drawn from priors
of precision 1 to 10,000 and starting there, by `fit` as it is and by `fit(..., start="given")`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal

import torch

import symrazor as sr
from symrazor.discover import digits, maps
from symrazor.report import write_atomically

STARTS = (1.0, 10.0, 100.0, 1e4)
Start = Literal["near", "given"]


def run(task: digits.Task, precision: float, start: Start, seed: int) -> dict[str, Any]:
    """One training, and what it learned."""
    train, test = digits.canvas(task, seed)
    torch.manual_seed(seed)
    network = maps.convolutional(digits.SHAPE, digits.CLASSES[task])
    model = sr.relax(network, train[0][:2], precision=precision)
    config = digits.DEFAULTS.change(seed=seed, free_precision=precision, start=start)
    reading = sr.fit(model, train, test=test, config=config).reading
    relaxed = [layer for layer in reading.layers if layer.relaxed]
    return {
        "task": task,
        "start": start,
        "precision": precision,
        "seed": seed,
        "evidence": -reading.evidence["per_datum"],
        "accuracy": 100 * reading.test["accuracy"],
        "free_shares": [100 * layer.free_share for layer in relaxed],
        "errors": [100 * (layer.error or 0.0) for layer in relaxed],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = "| task | start | precision | seed | -log ev/N | accuracy % | free share by layer % |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in rows:
        shares = " / ".join(f"{share:.0f}" for share in row["free_shares"])
        lines.append(
            f"| {row['task']} | {row['start']} | {row['precision']:g} | {row['seed']} | "
            f"{row['evidence']:.3f} | {row['accuracy']:.1f} | {shares} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all of them."""
    parser = argparse.ArgumentParser(prog="symrazor.experiments.starts")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    ways: tuple[Start, ...] = ("near", "given")
    rows = [
        run(task, precision, start, seed)
        for task in digits.QUESTIONS
        for start in ways
        for seed in options.seed
        for precision in STARTS
    ]
    if options.json is not None:
        write_atomically(options.json, (json.dumps(rows, indent=1) + "\n").encode())
    sys.stdout.write(markdown(rows) + "\n")


if __name__ == "__main__":
    main()
