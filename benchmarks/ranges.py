"""Measure the spread of pictures with a known answer, and write the errors of all ranges.

    python benchmarks/ranges.py DIR --seeds 3 4 --workers 2 --json FILE
    python benchmarks/ranges.py DIR --cases mnist:rotated:20 cifar-10:rotated:90
    python benchmarks/ranges.py DIR --tests 100 --json FILE

Of every data set, those transformations are measured whose range is known. With --tests, the level
and the power of `two_sample_test` are measured instead: reflections of pictures that were mirrored
at random, and of pictures as they are.

DIR has the official files of MNIST, Fashion-MNIST and CIFAR-10, or NAME.npz with `x` (bytes) and
`y`. The method was developed on MNIST and CIFAR-10 with seed 0, and on no picture of Fashion-MNIST.
"""

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.bench.truth.task import OFFICIAL
from symrazor.data.transforms import rotated, scaled, translated
from symrazor.invariance.flows import image_flows, prepared_images
from symrazor.invariance.spread import STEPS, Spread, measure_spread, two_sample_test

ANGLES = (0, 20, 45, 90, 120, 180)
PICTURES = 2000
CASES = [
    *(f"{name}:rotated:{a}" for name in ("mnist", "fashion-mnist", "cifar-10") for a in ANGLES),
    *(
        f"{name}:{kind}"
        for name in ("mnist", "fashion-mnist", "cifar-10")
        for kind in ("mirrored", "shifted:3", "scaled:1.3")
    ),
]
DEGREES, NEAR_DEGREES, LEVEL = 10, 54, 0.05
TESTED_PICTURES, TESTED_STEPS = 500, 150
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
    "error",
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


def pictures_of(folder: Path, name: str, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return random training pictures and their labels."""
    path = folder / f"{name}.npz"
    if path.exists():
        with np.load(path) as file:
            x, y = torch.tensor(file["x"]).float() / 255, torch.tensor(file["y"]).long()
    else:
        x, y = OFFICIAL[name](folder, "train")
    index = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:count]
    return x[index], y[index]


def rows_of(folder: Path, job: tuple[int, str]) -> list[list[Any]]:
    """Measure the transformations of one data set whose ranges are known."""
    seed, case = job
    name, _, kind = case.partition(":")
    x, y = pictures_of(folder, name, seed, PICTURES)
    pictures, known = made(x, seed, kind)
    started = time.process_time()
    flows = image_flows(pictures.shape[1:])
    chosen = [flow for flow in flows if flow.name in known]
    steps = STEPS * len(chosen) // len(flows)
    spreads = measure_spread(prepared_images(pictures), y, chosen, seed, steps)
    seconds = round(time.process_time() - started)
    rows = []
    for flow in chosen:
        s, value = spreads.of_class[flow.name], known[flow.name]
        p_value = spreads.of_all[flow.name].p_value
        numbers = [value, s.range, *s.bounds, p_value, error_of(s, value)]
        rows.append([name, seed, kind, flow.name, *numbers, seconds])
    return rows


def error_of(spread: Spread, known: float) -> float:
    """Return the error as a share of what was tested in one direction."""
    flow = spread.flow
    if flow.kind == "choice":
        return abs(spread.range - known) / 0.5
    end = flow.reported(flow.end)
    if flow.unit == "factor":
        return abs(math.log(spread.range / known)) / math.log(end)
    return abs(spread.range - known) / end


def test_rows(folder: Path, job: tuple[int, str]) -> list[list[Any]]:
    """Test one symmetric data set and one that is not."""
    seed, name = job
    x, _ = pictures_of(folder, name, seed, TESTED_PICTURES)
    flip = partial(torch.flip, dims=(-1,))
    return [
        [name, seed, two_sample_test(mirrored(x, seed), flip, seed, TESTED_STEPS),
         two_sample_test(x, flip, seed, TESTED_STEPS)]
    ]  # fmt: skip


def main() -> None:
    """Measure all data sets and write the rows after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", default=CASES, help="data:made by:amount")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3])
    parser.add_argument("--tests", type=int, help="number of two-sample tests")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [(seed, case) for seed in arguments.seeds for case in arguments.cases]
    if arguments.tests:
        jobs = [(seed, "mnist") for seed in range(1, arguments.tests + 1)]
    measure = test_rows if arguments.tests else rows_of
    rows: list[list[Any]] = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for found in pool.map(partial(measure, arguments.folder), jobs):
            rows += found
            for row in found:
                print(*[shown(cell) for cell in row], flush=True)
            if arguments.json:
                document = tests_of(rows) if arguments.tests else ranges_of(rows, arguments)
                arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def shown(cell: Any) -> Any:
    """Return numbers that are not whole with three digits."""
    return f"{cell:.3g}" if isinstance(cell, float) else cell


def tests_of(rows: list[list[Any]]) -> dict[str, Any]:
    """Return the shares of rejections at 5 %."""
    counts = [sum(row[k] < LEVEL for row in rows) for k in (2, 3)]
    names = ("mirrored at random", "as they are")
    return {
        "title": "Level and power of the two-sample test",
        "question": "Does it reject symmetric data in at most 5 % of the cases, and others often?",
        "command": [f"python benchmarks/ranges.py DIR --tests {len(rows)} --json FILE"],
        "machine": "one CPU thread",
        "columns": ["MNIST pictures", "rejected (%)", "95 % interval (%)", "tests"],
        "rows": [
            [name, f"{100 * count / len(rows):.1f}", _interval(count, len(rows)), len(rows)]
            for name, count in zip(names, counts, strict=True)
        ],
        "notes": [
            f"Reflections of {TESTED_PICTURES:,} pictures, {TESTED_STEPS} training steps for each "
            "test, rejected at p < 0.05. Interval: Wilson's for a share."
        ],
    }


def _interval(count: int, n: int) -> str:
    """Return Wilson's 95 % interval of a share in percent."""
    z = NormalDist().inv_cdf(0.975)
    middle = (count + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(count * (n - count) / n + z * z / 4)
    return f"{100 * max(0.0, middle - half):.1f} to {100 * min(1.0, middle + half):.1f}"


def ranges_of(rows: list[list[Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the measured ranges."""
    options = f"--seeds {' '.join(map(str, arguments.seeds))}"
    if arguments.cases != CASES:
        options += f" --cases {' '.join(arguments.cases)}"
    covered = sum(row[6] <= row[4] <= row[7] for row in rows)
    turned = [row for row in rows if row[3] == "rotation" and row[4] > 0]
    close = sum(abs(row[5] - row[4]) <= DEGREES for row in turned)
    near = sum(abs(row[5] - row[4]) <= NEAR_DEGREES for row in turned)
    return {
        "title": "Ranges of transformations of pictures",
        "question": "Are pictures spread over the range of a transformation that is known?",
        "command": [f"python benchmarks/ranges.py DIR {options} --json FILE"],
        "machine": "one CPU thread for each data set",
        "columns": COLUMNS,
        "rows": [[shown(cell) for cell in row] for row in rows],
        "notes": [
            f"{PICTURES:,} training pictures. Ranges are in degrees, probability, pixels, factor. "
            "Known ranges do not contain the natural spread of the pictures. The error is a share "
            "of the largest tested amount. p: hypothesis that all pictures are spread evenly.",
            f"The known range is between low and high in {covered} of {len(rows)} rows. Of "
            f"{len(turned)} rotations by more than 0 degrees, {close} are within {DEGREES} degrees "
            f"of the known range, and {near} within {NEAR_DEGREES} (15 % of the circle).",
            "Developed on MNIST and CIFAR-10 with seed 0; no picture of Fashion-MNIST was used.",
        ],
    }


if __name__ == "__main__":
    main()
