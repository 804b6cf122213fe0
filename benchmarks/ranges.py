"""Measure the spread of pictures with a known answer, and write the errors of all ranges.

    python benchmarks/ranges.py DIR --seeds 3 --json FILE
    python benchmarks/ranges.py DIR --cases mnist:rotated:20 cifar-10:rotated:90 --only rotation

With --only, one transformation is measured, with its share of the training steps. DIR has the
official files of MNIST, Fashion-MNIST and CIFAR-10. The method was developed on the embedded
digits, MNIST and CIFAR-10 with seed 0, and on no picture of Fashion-MNIST.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symrazor.bench.truth.task import OFFICIAL
from symrazor.data.transforms import rotated, scaled, translated
from symrazor.invariance.flows import image_flows, prepared_images
from symrazor.invariance.spread import STEPS, measure_spread

ANGLES = (0, 20, 45, 90, 120, 180)
PICTURES = 2000
CASES = [
    *(f"{name}:rotated:{a}" for name in ("mnist", "fashion-mnist", "cifar-10") for a in ANGLES),
    *(f"{name}:{k}" for name in ("mnist", "fashion-mnist") for k in ("mirrored", "shifted:3")),
    *("mnist:scaled:1.3", "fashion-mnist:scaled:1.3"),
]
COLUMNS = [
    "data",
    "seed",
    "made by",
    "transformation",
    "known",
    "measured",
    "low",
    "high",
    "p",
    "CPU s",
]
PLAIN = {
    "left-right flip": 0.0,
    "up-down flip": 0.0,
    "x-translation": 0.0,
    "y-translation": 0.0,
    "scale": 1.0,
}
"""Ranges that nothing was done to; natural spread is not known."""


def mirrored(x: Tensor, seed: int) -> Tensor:
    """Return pictures of which half are mirrored."""
    coin = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(coin[:, None, None, None], x.flip(-1), x)


def made(x: Tensor, seed: int, kind: str) -> tuple[Tensor, dict[str, float]]:
    """Return transformed pictures and the ranges that are known of them."""
    name, _, amount = kind.partition(":")
    size = float(amount or 0)
    if name == "rotated":
        known = {"rotation": size}
        return (rotated(x, size, seed), known) if size else (x, known | PLAIN)
    if name == "shifted":
        return translated(x, size, seed), {"x-translation": size, "y-translation": size}
    if name == "scaled":
        return scaled(x, size, seed), {"scale": size}
    return mirrored(x, seed), {"left-right flip": 0.5}


def rows_of(folder: Path, name: str, seed: int, kind: str, only: str | None) -> list[list[Any]]:
    """Measure one data set."""
    x, y = OFFICIAL[name](folder, "train")
    index = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:PICTURES]
    pictures, known = made(x[index], seed, kind)
    started = time.process_time()
    flows, steps = image_flows(pictures.shape[1:]), STEPS
    if only is not None:
        steps = STEPS // len(flows)
        flows = tuple(flow for flow in flows if flow.name == only)
    prepared = prepared_images(pictures)
    spreads = measure_spread(prepared, y[index], flows, seed, steps).of_class
    seconds = round(time.process_time() - started)
    rows = []
    for flow, value in known.items():
        if flow not in spreads:
            continue
        s = spreads[flow]
        numbers = [value, s.range, *s.interval, s.p_value]
        rows.append([name, seed, kind, flow, *numbers, seconds])
    return rows


def main() -> None:
    """Measure all data sets and write the rows after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", default=CASES, help="data:made by:amount")
    parser.add_argument("--only", help="one transformation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    for seed in arguments.seeds:
        for case in arguments.cases:
            name, _, kind = case.partition(":")
            rows += rows_of(arguments.folder, name, seed, kind, arguments.only)
            print(*rows[-1], flush=True)
            if arguments.json:
                write(rows, arguments)


def shown(cell: Any) -> Any:
    """Return numbers that are not whole with three digits."""
    return f"{cell:.3g}" if isinstance(cell, float) else cell


def write(rows: list[list[Any]], arguments: argparse.Namespace) -> None:
    """Write the rows."""
    options = f"--seeds {' '.join(map(str, arguments.seeds))}"
    if arguments.cases != CASES:
        options += f" --cases {' '.join(arguments.cases)}"
    if arguments.only:
        options += f" --only {arguments.only}"
    document = {
        "title": "Ranges of transformations of pictures",
        "question": "Are pictures spread over the range of a transformation that is known?",
        "command": [f"python benchmarks/ranges.py DIR {options} --json FILE"],
        "machine": "one CPU thread",
        "columns": COLUMNS,
        "rows": [[shown(cell) for cell in row] for row in rows],
        "notes": [
            f"{PICTURES:,} training pictures. Ranges are in degrees, probability, pixels, factor. "
            "Known ranges do not contain the natural spread of the pictures.",
            "Low and high are two standard errors of sampling. An imperfect network makes ranges "
            "too wide, which they do not contain; verdicts divide the lower end by 1.5.",
            "Developed on the embedded digits, MNIST and CIFAR-10 with seed 0; no picture of "
            "Fashion-MNIST was used.",
        ],
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
