"""Run `discover` on series with a known answer, and write the verdict and the delivered accuracy.

    python benchmarks/discover_series.py DIR --seeds 2 3 4 --json FILE

DIR and the known answers are described in structures.py.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import symrazor as sr
from prequential import read_series
from structures import RIGHT

COLUMNS = [
    *("data", "seed", "recommended network", "right network", "delivered accuracy %"),
    *("margin to the next candidate, nats", "curvature"),
]
EXPECTED = {"CNN": "convolutional", "dense": "fully connected"}


def row(folder: Path, name: str, seed: int, minutes: float) -> list[Any]:
    """Run `discover` once."""
    (x, labels), (x_test, test_labels) = (
        read_series(folder / name / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")
    )
    test = (x_test, np.array(test_labels))
    result = sr.discover(
        x, np.array(labels), test=test, kind="series", minutes=minutes, seed=seed, tell=print
    )
    answer = result.results[0].answer
    delivered = answer.final or answer.recommended
    first, second = sorted((c.log_evidence for c in answer.candidates), reverse=True)[:2]
    accuracy = round(100 * delivered.fit.reading.test["accuracy"], 1)
    margin, structure = round(first - second, 1), delivered.fit.evidence.structure
    return [name, seed, delivered.name, EXPECTED[RIGHT[name]], accuracy, margin, structure]


def main() -> None:
    """Run all data sets and seeds, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", nargs="+", default=["OSULeaf", "ArrowHead"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.data:
        for seed in arguments.seeds:
            rows.append(row(arguments.folder, name, seed, arguments.minutes))
            print(rows[-1], flush=True)
    if arguments.json:
        seeds, data = " ".join(map(str, arguments.seeds)), " ".join(arguments.data)
        document = {
            "title": "Networks that discover delivers for series",
            "question": "Is the recommended network the right one, and how accurate is it?",
            "command": [
                f"python benchmarks/discover_series.py DIR --data {data} --seeds {seeds} "
                f"--minutes {arguments.minutes:g} --json FILE"
            ],
            "machine": "one CPU thread",
            "columns": COLUMNS,
            "rows": rows,
            "notes": [],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
