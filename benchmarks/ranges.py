"""Measure the ranges that `discover` states of pictures whose ranges are known.

    python benchmarks/ranges.py DIR --half develop --seeds 0 --json FILE
    python benchmarks/ranges.py DIR --half report --seeds 8 9 --json FILE
    python benchmarks/ranges.py DIR --tests 200 --json FILE

The ranges are learned and confirmed as by `discover`, in half of its time, on a network that reads
positions: its comparison of networks, which takes the other half, says nothing about ranges.
With --tests, the level and the power of `two_sample_test` are measured instead: reflections of
pictures that were mirrored at random, and of pictures as they are.

DIR has the official files of MNIST, Fashion-MNIST and CIFAR-10, or NAME.npz with `x` (bytes) and
`y`. Cases and seeds are divided into two halves: the method may be adjusted on one of them.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.bench.truth.task import OFFICIAL
from symrazor.core.likelihood import Categorical
from symrazor.data import dataset
from symrazor.data.arrays import prepare
from symrazor.data.transforms import resized, rotated, scaled, translated
from symrazor.discovery.families import candidates_for
from symrazor.discovery.invariances import LearnedInvariances, learn_invariances
from symrazor.discovery.question import Options, Question
from symrazor.invariance.flows import Flow
from symrazor.invariance.spread import two_sample_test
from symrazor.training.loop import clock

PICTURES, SIDE, MINUTES = 1500, 16, 1.2
"""Pictures of each case, their side, and CPU time for ranges and confirmation. A default run of
`discover` has two minutes for both on two cores."""
DEVELOP = (
    *("mnist:rotated:0", "mnist:rotated:45", "mnist:rotated:120", "mnist:mirrored"),
    *("mnist:scaled:1.3", "cifar-10:rotated:20", "cifar-10:rotated:90", "cifar-10:rotated:180"),
)
REPORT = (
    *("fashion-mnist:rotated:20", "mnist:rotated:90", "cifar-10:rotated:45"),
    *("fashion-mnist:rotated:90", "fashion-mnist:mirrored", "mnist:rotated:180"),
    *("cifar-10:rotated:0", "fashion-mnist:rotated:180", "mnist:rotated:20"),
    *("fashion-mnist:rotated:0", "mnist:shifted:2", "cifar-10:rotated:120"),
    *("fashion-mnist:rotated:45", "fashion-mnist:shifted:2", "cifar-10:mirrored"),
    *("fashion-mnist:rotated:120", "fashion-mnist:scaled:1.3"),
)
HALVES = {"develop": (DEVELOP, range(5)), "report": (REPORT, range(8, 100))}
"""Cases and seeds of each half. Objects in
photographs have other places and sizes, so that their shifts and scales are not known."""
TOLERANCE, DEGREES, LEVEL = 0.15, 10, 0.05
ROUNDING = 1e-3
"""Largest error, as a share of all that was tested in both directions; degrees of a stricter count;
level of the tests."""
TESTED_PICTURES, TESTED_SIDE, TESTED_STEPS = 500, 14, 150
COLUMNS = [
    *("data", "seed", "made by", "transformation", "known", "measured", "low", "high", "stated"),
    *("answer", "error (%)", "gain (nats)", "CPU s"),
]
PLAIN = {"left-right flip": 0.0, "up-down flip": 0.0, "x-translation": 0.0, "y-translation": 0.0,
         "scale": 1.0}  # fmt: skip
"""Ranges of pictures in frames: MNIST and Fashion-MNIST. Natural spread is not known."""
PHOTOGRAPHS = {"left-right flip": 0.5, "up-down flip": 0.0}
"""Ranges of CIFAR-10: which side an object shows is chance."""


def mirrored(x: Tensor, seed: int) -> Tensor:
    """Return pictures of which half are mirrored."""
    coin = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(coin[:, None, None, None], x.flip(-1), x)


def made(x: Tensor, seed: int, kind: str, is_photograph: bool) -> tuple[Tensor, dict[str, float]]:
    """Return transformed pictures and the ranges that are known of them."""
    name, _, amount = kind.partition(":")
    size = float(amount or 0)
    if name == "rotated":
        known = {"rotation": size}
        plain = PHOTOGRAPHS if is_photograph else PLAIN
        return (rotated(x, size, seed), known) if size else (x, known | plain)
    if name == "shifted":
        return translated(x, size, seed), {"x-translation": size, "y-translation": size}
    if name == "scaled":
        return scaled(x, size, seed), {"scale": size}
    return mirrored(x, seed), {"left-right flip": 0.5}


@cache
def all_pictures(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Return all training pictures and their labels."""
    path = folder / f"{name}.npz"
    if not path.exists():
        return OFFICIAL[name](folder, "train")
    with np.load(path) as file:
        return torch.tensor(file["x"]).float() / 255, torch.tensor(file["y"]).long()


def pictures_of(folder: Path, name: str, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return random training pictures and their labels."""
    x, y = all_pictures(folder, name)
    index = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:count]
    return x[index], y[index]


def rows_of(folder: Path, job: tuple[int, str]) -> list[list[Any]]:
    """Learn the ranges of one data set, and compare those that are known."""
    seed, case = job
    name, _, kind = case.partition(":")
    x, y = pictures_of(folder, name, seed, PICTURES)
    x, known = made(resized(x, SIDE), seed, kind, name == "cifar-10")
    data = dataset(x, y, kind="image", task="classification")
    family, train = candidates_for(data), prepare(data).data(data.labelled)
    question = Question(case, "", family, train, None, Categorical)
    options, started = Options(minutes=MINUTES, seed=seed), time.process_time()
    best = torch.zeros(1)  # with log likelihoods that none can surpass, nothing is delivered
    with clock.counting(time.process_time):  # other jobs on the machine change nothing
        found = learn_invariances(question, "positional", best, options, tell=lambda text: None)
    seconds = round(time.process_time() - started)
    if isinstance(found, str):
        none = (None, None)
        return [
            [name, seed, kind, flow, value, None, *none, "not tested", "undecided", *none, seconds]
            for flow, value in known.items()
        ]
    gain = None if found.gain is None else round(found.gain.mean, 1)
    rows = []
    for flow, value in known.items():
        spread, stated = found.learned.spreads.of_class[flow], statement(found, flow)
        measured = [value, spread.range, *spread.bounds, stated]
        neutral = 1.0 if spread.flow.unit == "factor" else 0.0
        denies = stated in ("no evidence", "changes labels")
        error = error_of(spread.flow, neutral if denies else spread.range, value)
        answer = "wrong" if error > TOLERANCE else "right"
        if stated == "not confirmed" or (denies and answer == "right" and value != neutral):
            answer = "undecided"
        rows.append([name, seed, kind, flow, *measured, answer, 100 * error, gain, seconds])
    return rows


def statement(found: LearnedInvariances, flow: str) -> str:
    """Return what is stated of a transformation."""
    learned = found.learned
    if flow in {spread.flow.name for spread in learned.found}:
        return "range" if found.supported else "not confirmed"
    changes = {spread.flow.name for spread in learned.label_changing}
    return "changes labels" if flow in changes else "no evidence"


def error_of(flow: Flow, value: float, known: float) -> float:
    """Return the error as a share of all that was tested, in both directions."""
    if flow.kind == "choice":
        return abs(value - known)
    if flow.unit == "factor":
        return abs(math.log(value / known)) / (2 * flow.end)
    return abs(value - known) / (2 * flow.reported(flow.end))


def test_rows(folder: Path, job: tuple[int, str]) -> list[list[Any]]:
    """Test one symmetric data set and one that is not."""
    seed, name = job
    x = resized(pictures_of(folder, name, seed, TESTED_PICTURES)[0], TESTED_SIDE)
    flip = partial(torch.flip, dims=(-1,))
    return [
        [name, seed, two_sample_test(mirrored(x, -seed), flip, seed, TESTED_STEPS),
         two_sample_test(x, flip, seed, TESTED_STEPS)]
    ]  # fmt: skip


def main() -> None:
    """Measure all data sets and write the rows after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=HALVES, default="develop")
    parser.add_argument("--cases", nargs="+", help="data:made by:amount; default: all of the half")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tests", type=int, help="number of two-sample tests")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases, seeds = HALVES[arguments.half]
    cases = arguments.cases or cases
    if not set(cases) <= set(HALVES[arguments.half][0]) or not set(arguments.seeds) <= set(seeds):
        parser.error(f"The {arguments.half} half has the seeds {seeds} and other cases.")
    jobs = [(seed, case) for seed in arguments.seeds for case in cases]
    if arguments.tests:
        jobs = [(seed, "mnist") for seed in range(1, arguments.tests + 1)]
    measure = partial(test_rows if arguments.tests else rows_of, arguments.folder)
    rows: list[list[Any]] = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for found in pool.map(measure, jobs):
            rows += found
            for row in found:
                print(*[shown(cell) for cell in row], sep="\t", flush=True)
            if arguments.json:
                document = tests_of(rows) if arguments.tests else ranges_of(rows, arguments)
                arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def shown(cell: Any) -> Any:
    """Return numbers that are not whole with three digits."""
    return f"{cell:.3g}" if isinstance(cell, float) else cell


def share_of(rows: Sequence[Sequence[Any]], of: Sequence[Sequence[Any]]) -> str:
    """Return the share of rows in words, with its interval."""
    if not of:
        return "0 of 0"
    return f"{len(rows)} of {len(of)} ({interval(len(rows), len(of))} %)"


def interval(count: int, n: int) -> str:
    """Return Wilson's 95 % interval of a share in percent."""
    z = NormalDist().inv_cdf(0.975)
    middle = (count + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(count * (n - count) / n + z * z / 4)
    return f"{100 * max(0.0, middle - half):.1f} to {100 * min(1.0, middle + half):.1f}"


def ranges_of(rows: list[list[Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the stated ranges, and how many are right."""
    options = f"--half {arguments.half} --seeds {' '.join(map(str, arguments.seeds))}"
    if arguments.cases:
        options += f" --cases {' '.join(arguments.cases)}"
    right, wrong = ([row for row in rows if row[9] == answer] for answer in ("right", "wrong"))
    turned = [row for row in rows if row[3] == "rotation"]
    turned_right = [row for row in turned if row[9] == "right"]
    close = [row for row in turned_right if row[10] / 100 * 360 <= DEGREES]
    covered = [row for row in rows if row[8] == "range" and row[6] <= row[4] <= row[7] + ROUNDING]
    stated = [row for row in rows if row[8] == "range"]
    share = ""
    if arguments.cases:
        share = f" Only {len(arguments.cases)} of the {len(HALVES[arguments.half][0])} cases."
    return {
        "title": "Ranges of transformations of pictures",
        "question": "Does `discover` state ranges that are right?",
        "command": [f"python benchmarks/ranges.py DIR {options} --json FILE"],
        "machine": "one CPU thread for each data set",
        "summary": {
            "right": f"{len(right)} of {len(rows)}",
            "wrong": len(wrong),
            "rotations right": f"{len(turned_right)} of {len(turned)}",
            "rotations close": f"{len(close)} of {len(turned)}",
        },
        "columns": COLUMNS,
        "rows": [[shown(cell) for cell in row] for row in rows],
        "notes": [
            f"{PICTURES:,} training pictures of all classes, resized to {SIDE} x {SIDE} pixels to "
            f"save time; {MINUTES:g} minutes of CPU time for ranges and their confirmation (2 "
            "minutes in a default run of `discover`). Ranges of rotations are in degrees, of flips "
            "probabilities, of shifts in pixels, of scales factors. Known ranges do not contain "
            "the natural spread of the pictures.",
            'Stated: "no evidence" means that no range is stated; it counts as wrong or undecided '
            "where there is a range. Error: the difference of stated and known range, "
            "as a share of all that was tested in both directions. An answer is right if it is at "
            f"most {100 * TOLERANCE:.0f} %.",
            f"Right: {share_of(right, rows)}; wrong: {len(wrong)}; undecided: "
            f"{len(rows) - len(right) - len(wrong)}. "
            f"Rotations: right {share_of(turned_right, turned)}, within {DEGREES} degrees "
            f"{len(close)}. The known range is between low and high in {len(covered)} of "
            f"{len(stated)} stated ranges.{share}",
            "The method was adjusted on other cases, with one exception. Seeds 5 to 7 of "
            "Fashion-MNIST rotated by 20 degrees were undecided; the time and the limit of the "
            "confirmation were then changed."
            if arguments.half == "report"
            else "The method was adjusted on these cases and seeds.",
        ],
    }


def tests_of(rows: list[list[Any]]) -> dict[str, Any]:
    """Return the shares of rejections at 5 %."""
    counts = [sum(row[k] < LEVEL for row in rows) for k in (2, 3)]
    names = ("mirrored at random", "as they are")
    return {
        "title": "Level and power of the two-sample test",
        "question": "Does it reject symmetric data in at most 5 % of the tests, and other data in "
        "at least 95 %?",
        "command": [f"python benchmarks/ranges.py DIR --tests {len(rows)} --json FILE"],
        "machine": "one CPU thread",
        "columns": ["MNIST pictures", "rejected (%)", "95 % interval (%)", "tests"],
        "rows": [
            [name, f"{100 * count / len(rows):.1f}", interval(count, len(rows)), len(rows)]
            for name, count in zip(names, counts, strict=True)
        ],
        "notes": [
            f"Reflections of {TESTED_PICTURES:,} pictures of {TESTED_SIDE} x {TESTED_SIDE} pixels, "
            f"{TESTED_STEPS} training steps for each half, rejected at p < 0.05. Interval: "
            "Wilson's for a share."
        ],
    }


if __name__ == "__main__":
    main()
