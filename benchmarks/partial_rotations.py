"""Learn up to which angle each group convolution is equivariant, on sixes and nines of MNIST.

    python benchmarks/partial_rotations.py DIR --seeds 1 2 3 --json FILE

MNIST6-180 (Romero and Lohit 2022) has sixes that are upright or upside down; the label is which. A
network that is invariant to all rotations cannot pass 50 %. Here, the sixes are also turned by up
to some angle. The network has two group convolutions over
eight rotations, each followed by `ElementRange`. Settings were chosen with seed 0. DIR has the
official files of MNIST.
"""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import symrazor as sr
from symrazor.bench.truth.task import OFFICIAL
from symrazor.bench.truth.turned_pictures import rotated_by
from symrazor.data import Tensors
from symrazor.data.transforms import resized
from symrazor.layers import ElementRange, GConv, GroupPool

SIDE, TRAINING, TEST, EPOCHS, RATE = 14, 500, 900, 20, 0.01
GROUP, ROTATIONS, FIELDS = "C8", 8, 3
STARTS, NARROW = (60.0, 120.0), 0.01
"""Ranges in degrees from which networks start; the higher evidence wins. A range that leaves the
filters as they are: an ordinary CNN."""
PROBLEMS = {
    "sixes, upright or upside down (MNIST6-180)": 0.0,
    "the same, turned by up to 45 degrees": 45.0,
}
"""Name -> largest angle of the sixes."""
COLUMNS = [
    *("pictures", "network", "accuracy (%)", "log evidence", "range of layer 1, layer 2 (degrees)"),
    "seeds",
]


@dataclass(frozen=True)
class Outcome:
    """One trained network: accuracy, log evidence, and the range of each layer in degrees."""

    network: str
    accuracy: float
    log_evidence: float
    ranges: tuple[float, ...] = ()


def pictures(
    folder: Path, split: Literal["train", "test"], degrees: float, count: int, seed: int
) -> Tensors:
    """Return turned sixes, and whether each is upside down."""
    x, y = OFFICIAL["mnist"](folder, split)
    index = (y == 6).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    index = index[torch.randperm(len(index), generator=generator)[:count]]
    x = resized(x[index], SIDE)
    angle = 2 * torch.rand(len(x), generator=generator) - 1
    is_nine = torch.randint(2, (len(x),), generator=generator)
    return rotated_by(x, 180 * is_nine + degrees * angle), is_nine


def network(outputs: int, start: float | None) -> tuple[nn.Module, list[ElementRange]]:
    """Return two group convolutions and their ranges; without a start, of the whole group."""
    ranges = [] if start is None else [ElementRange(GROUP, start) for _ in range(2)]
    first, second = ranges or (nn.Identity(), nn.Identity())
    channels = FIELDS * ROTATIONS
    model = nn.Sequential(
        GConv(1, channels, (SIDE, SIDE), group=GROUP, kind="lift", kernel=5),
        *(nn.ReLU(), first, nn.MaxPool2d(2)),
        GConv(channels, 2 * channels, (SIDE // 2, SIDE // 2), group=GROUP, kernel=5),
        *(nn.ReLU(), second, GroupPool(GROUP), nn.AdaptiveMaxPool2d(1), nn.Flatten()),
        nn.Linear(2 * FIELDS, outputs),
    )
    return model, ranges


def trained(name: str, start: float | None, train: Tensors, test: Tensors, seed: int) -> Outcome:
    """Return a network that `fit` trained; a range of `NARROW` degrees is not learned."""
    torch.manual_seed(seed)
    model, ranges = network(int(train[1].max()) + 1, start)
    if start == NARROW:
        for layer in ranges:
            layer.requires_grad_(False)
    options: dict[str, Any] = {"epochs": EPOCHS, "lr": RATE, "every": 1, "estimator": "mc"}
    fit = sr.fit(model, train, test=test, seed=seed, progress=False, **options)
    accuracy = 100 * fit.reading.test["accuracy"]
    degrees = tuple(layer.degrees for layer in ranges) if start != NARROW else ()
    return Outcome(name, accuracy, float(fit.evidence.log_evidence), degrees)


def measure(folder: Path, job: tuple[int, str]) -> tuple[str, int, list[Outcome]]:
    """Train all networks on one problem."""
    torch.set_num_threads(1)
    seed, name = job
    train = pictures(folder, "train", PROBLEMS[name], TRAINING, seed)
    test = pictures(folder, "test", PROBLEMS[name], TEST, seed)
    run = partial(trained, train=train, test=test, seed=seed)
    learned = max((run("learned ranges", start) for start in STARTS), key=lambda o: o.log_evidence)
    return name, seed, [learned, run("all rotations", None), run("ordinary CNN", NARROW)]


def document(results: list[tuple[str, int, list[Outcome]]]) -> dict[str, Any]:
    """Return the content of the result file."""
    rows = []
    for name in PROBLEMS:
        runs = [outcomes for n, _, outcomes in results if n == name]
        for outcomes in zip(*runs, strict=True):
            accuracies = [outcome.accuracy for outcome in outcomes]
            evidence = statistics.fmean(outcome.log_evidence for outcome in outcomes)
            ranges = "; ".join(
                ", ".join(f"{value:.0f}" for value in outcome.ranges)
                for outcome in outcomes
                if outcome.ranges
            )
            rows.append([
                *(name, outcomes[0].network, f"{statistics.fmean(accuracies):.1f}"),
                *(f"{evidence:.0f}", ranges, len(outcomes)),
            ])  # fmt: skip
    seeds = sorted({seed for _, seed, _ in results})
    return {
        "title": "Range of rotations of each layer",
        "question": "Does the evidence learn up to which angle each layer is equivariant?",
        "command": [
            "python benchmarks/partial_rotations.py DIR "
            f"--seeds {' '.join(map(str, seeds))} --json FILE"
        ],
        "machine": "one CPU thread",
        "columns": COLUMNS,
        "rows": rows,
        "notes": [
            f"{TRAINING} training and at most {TEST} test pictures of {SIDE} x {SIDE} pixels, "
            f"{FIELDS} and {2 * FIELDS} fields of {ROTATIONS} rotations, {EPOCHS} epochs: much "
            "smaller than the networks of Romero and Lohit. Accuracies and evidence are means over "
            "seeds; ranges are listed by seed.",
            f"Learned ranges: of two trainings that start at {STARTS[0]:.0f} and {STARTS[1]:.0f} "
            "degrees, the one with the higher evidence. An invariant network cannot be better than "
            "chance (50 %) on this task.",
            f"After {EPOCHS} evidence steps, ranges still depend on their starting values. "
            "Settings were chosen with seed 0. DDMNIST was not tried.",
        ],
    }


def main() -> None:
    """Train all networks and write the table after each problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jobs = [(seed, name) for seed in options.seeds for name in PROBLEMS]
    results = []
    with ProcessPoolExecutor(options.workers) as pool:
        for result in pool.map(partial(measure, options.folder), jobs):
            results.append(result)
            print(*result, flush=True)
            if options.json and len({name for _, name, _ in results}) == len(PROBLEMS):
                text = json.dumps(document(results), indent=1) + "\n"
                options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
