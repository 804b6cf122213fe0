"""Measure the cost of the structures of the curvature, in epochs of plain SGD.

    python benchmarks/structure_cost.py --rounds 3 --json FILE

Network and data are those of `symrazor bench evidence`: eight convolutions, 1,000 random images of
32 x 32 pixels, 10 classes. Structures are timed in turn, round after round, and medians of CPU time
are compared. The file is written after every round.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from symrazor.bench import evidence
from symrazor.bench.evidence import MINI_BATCH, NEW_PRECISIONS, variants
from symrazor.bench.measure import fresh_peak

SGD, BLOCKS, N = "SGD epoch", "kernel, blocks of 200", 1000
COLUMNS = [
    *("first channels", "structure", "rounds", "CPU s", "CPU time / SGD epoch"),
    *("CPU time / exact", "peak memory, MB"),
]
EPOCHS, TIMES_EXACT, MEMORY = COLUMNS[4:]
GOALS = [
    ("kernel", EPOCHS, 15),
    ("kernel", MEMORY, 2000),
    (NEW_PRECISIONS, EPOCHS, 0.1),
    ("EKFAC", TIMES_EXACT, 1.6),
    (BLOCKS, EPOCHS, 4),
]
"""Structure, column, and the greatest value that is good enough."""


def rows(
    channels: int, seconds: dict[str, list[float]], peaks: dict[str, float]
) -> list[list[Any]]:
    """Return the medians of one network."""
    cpu = {name: median(times) for name, times in seconds.items()}
    return [
        [
            *(channels, name, len(seconds[name]), round(took, 2), round(took / cpu[SGD], 2)),
            *(round(took / cpu["exact"], 2), round(peaks[name]) if name in peaks else None),
        ]
        for name, took in cpu.items()
    ]


def goal(table: list[list[Any]], structure: str, column: str, most: float) -> str:
    """Return a goal and whether every network meets it."""
    values = [row[COLUMNS.index(column)] for row in table if row[1] == structure]
    is_met = all(value is not None and value <= most for value in values)
    return f"{structure}, {column}: at most {most:g} ({'met' if is_met else 'missed'})"


def document(table: list[list[Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the content of a file in benchmarks/results/."""
    channels = " ".join(map(str, arguments.channels))
    return {
        "title": "Cost of the structures of the curvature",
        "question": "How many epochs of plain SGD does one estimate cost, and how much memory?",
        "command": [
            f"python benchmarks/structure_cost.py --channels {channels} "
            f"--rounds {arguments.rounds} --json FILE"
        ],
        "machine": "one thread of a machine with two cores that were shared with other jobs",
        "goal": "; ".join(goal(table, *wanted) for wanted in GOALS),
        "columns": COLUMNS,
        "rows": table,
        "notes": [
            'The network has random weights. "exact" is Kronecker factors with the exact '
            "estimator. The memory was measured in a new process for each structure.",
            "Blocks of samples cost as much as all samples together, because the backward passes "
            "and the rows are the same. With one random output, or from one mini-batch, the value "
            "is a lower bound in expectation.",
        ],
    }


def main() -> None:
    """Measure all networks, and write the rows after each round."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, nargs="+", default=[10], help="of the first layer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    table: list[list[Any]] = []

    def save(current: list[list[Any]]) -> None:
        content = document([*table, *current], arguments)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")

    for channels in arguments.channels:
        runs = variants(channels, "zeros", N, structures=True)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()  # a warm-up
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                started = time.process_time()
                run()
                seconds[name].append(time.process_time() - started)
                print(channels, name, seconds[name][-1], flush=True)
            save(rows(channels, seconds, {}))
        measured = ("exact", "EKFAC", "kernel", BLOCKS, MINI_BATCH)
        peaks: dict[str, float] = {}
        for name in measured:
            peaks[name] = fresh_peak(evidence.__name__, channels, "zeros", name, N, 1, True)
            save(rows(channels, seconds, peaks))
        table += rows(channels, seconds, peaks)


if __name__ == "__main__":
    main()
