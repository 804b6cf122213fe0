"""Test whether the range learned by the evidence is the one the data were made with.

    python -m symrazor.experiments.lila_recovery --data DIR --json FILE [--rows "rotation*/learned"]
    python -m symrazor.experiments.lila_recovery --small

MNIST rotated, translated, scaled or flipped by known amounts, each image once, and a small
convolutional network averaged over transformed copies. The range is learned by the evidence (from
two starts, of which the evidence chooses one; the table shows the range of poses), learned by the
training loss, chosen from a grid on held-out data, or absent. "affine 90" opens all six affine
generators on images that are only rotated.
"""

from dataclasses import replace
from statistics import mean

import torch

import symrazor as sr
from symrazor.data import Tensors, rotated, scaled, translated
from symrazor.experiments import lila
from symrazor.experiments.results import Run, add_runs, merged
from symrazor.invariance import Average

NAME = "lila-recovery"
METHODS = ("learned", "likelihood", "grid", "none")
AVERAGE: Average = "joint"
SAMPLES = 16
"""Copies of each image: with few copies the network cannot distinguish poses."""
TASKS: dict[str, tuple[str, float]] = {
    "rotation 0": ("rotation", 0),
    "rotation 30": ("rotation", 30),
    "rotation 60": ("rotation", 60),
    "rotation 90": ("rotation", 90),
    "rotation 180": ("rotation", 180),
    "translation 0": ("translation", 0),
    "translation 4": ("translation", 4),
    "scale 1": ("scale", 1),
    "scale 1.5": ("scale", 1.5),
    "flip 0": ("flip", 0),
    "flip 1": ("flip", 0.5),
    "affine 90": ("affine", 90),
}
"""Name -> augmentation and true amount: degrees, pixels, factor, probability."""


def moved(x: torch.Tensor, kind: str, amount: float, seed: int) -> torch.Tensor:
    """Return images, each transformed once."""
    if kind in ("rotation", "affine"):
        return rotated(x, amount, seed) if amount else x
    if kind == "translation":
        return translated(x, amount, seed) if amount else x
    if kind == "scale":
        return scaled(x, amount, seed) if amount > 1 else x
    chosen = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < amount
    return torch.where(chosen.to(x.device).reshape(-1, 1, 1, 1), x.flip(-1), x)


def data(task: str, options: lila.Options, seed: int) -> tuple[Tensors, Tensors]:
    """Return training and test data of a task, on the device."""
    n = options.n or (500 if options.small else 2000)
    kind, amount = TASKS[task]
    pairs = [
        (x.to(options.place), y.to(options.place))
        for x, y in lila.pictures("mnist", options, n, seed)
    ]
    half = 0.5 if options.small and kind == "translation" else 1.0  # of pictures half as large
    train, test = (
        (moved(x, kind, amount * half, 2 * seed + i), y) for i, (x, y) in enumerate(pairs)
    )
    return train, test


def config(options: lila.Options) -> sr.FitConfig:
    """Return training options with an evidence step after every epoch, in large batches."""
    epochs = options.epochs or (30 if options.small else 45)
    base = sr.FitConfig(epochs=epochs, batch_size=128, lr=5e-3, every=1, device=options.place)
    large = base.change(evidence_batch=500, pieces=1)
    return large.change(estimator="mc", subset=1000, progress=False)


def run(options: lila.Options) -> str:
    """Train the requested rows and return the table as markdown."""
    runs: list[Run] = []
    if options.json is not None:
        runs = add_runs(NAME, options.json, [])
    jobs = [(t, m) for t in TASKS for m in METHODS if options.wants(f"{t}/{m}")]
    if options.rows and not jobs:
        raise ValueError(
            f"No row matches {' '.join(options.rows)}. Rows look like 'rotation 90/learned'."
        )
    for seed in options.seed:
        for task, method in jobs:
            train, test = data(task, options, seed)
            average = options.average or AVERAGE
            job = lila.Job(TASKS[task][0], method, train, test, seed, config(options))
            job = replace(job, average=average, samples=lila.SAMPLES if options.small else SAMPLES)
            found = {"row": f"{task}/{method}", "seed": seed, "small": options.small}
            new = found | {"n": len(train[1]), "average": average} | lila.run(job)
            runs = merged(runs, [new])
            if options.json is not None:
                runs = merged(runs, add_runs(NAME, options.json, [new]))
    return markdown([r for r in runs if r["small"] == options.small])


def markdown(runs: list[Run]) -> str:
    """Return learned ranges, accuracy and NLL by method."""
    lines = [
        "| data | method | learned | accuracy % | test NLL | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for method in METHODS:
            found = [r for r in runs if r["row"] == f"{task}/{method}"]
            if not found:
                continue
            lines.append(
                f"| {task} | {method} | {_listed(found)} | "
                f"{mean(r['accuracy'] for r in found):.2f} | "
                f"{mean(r['nll'] for r in found):.4f} | {len(found)} |"
            )
    return "\n".join(lines)


def _listed(found: list[Run]) -> str:
    """Format one range per seed, for example "rotation (degrees) 30.10 29.50"."""
    return "; ".join(
        f"{name} " + " ".join(f"{r['widths'][name]:.2f}" for r in found)
        for name in found[0]["widths"]
    )


if __name__ == "__main__":
    lila.main(NAME, run)
