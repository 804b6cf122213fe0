"""Test whether the range learned by the evidence is the one the data were made with.

MNIST rotated, translated, scaled or flipped by known amounts, each image once, and a small
convolutional network averaged over transformed copies. The range is learned by the evidence (from
two starts, of which the evidence chooses one; the table shows the range of poses), learned by the
training loss, chosen from a grid on held-out data, or absent. "affine 90" opens all six affine
generators on images that are only rotated.
"""

from dataclasses import replace
from statistics import mean

import torch

from symrazor.data import rotated, scaled, translated
from symrazor.experiments import lila
from symrazor.experiments.images import Images, transformed
from symrazor.experiments.results import Run, run_rows, table

NAME = "lila-recovery"
METHODS = ("learned", "likelihood", "grid", "none")
SAMPLES = 16
"""Copies of each image: with few copies the network cannot distinguish poses."""
AMOUNTS: dict[str, tuple[float, ...]] = {
    "rotation": (0, 30, 60, 90, 180),
    "translation": (0, 4),
    "scale": (1, 1.5),
    "flip": (0, 1),
    "affine": (90,),
}
"""Augmentation -> true amounts: degrees, pixels, factor, whether half of the images are flipped."""
TASKS = {f"{kind} {amount:g}": (kind, amount) for kind in AMOUNTS for amount in AMOUNTS[kind]}


def transform(x: torch.Tensor, kind: str, amount: float, seed: int) -> torch.Tensor:
    """Return images, each transformed once."""
    if kind in ("rotation", "affine"):
        return rotated(x, amount, seed) if amount else x
    if kind == "translation":
        return translated(x, amount, seed) if amount else x
    if kind == "scale":
        return scaled(x, amount, seed) if amount > 1 else x
    chosen = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < amount / 2
    return torch.where(chosen.to(x.device).reshape(-1, 1, 1, 1), x.flip(-1), x)


def data(task: str, options: lila.Options, seed: int) -> Images:
    """Return training and test data of a task, on the device."""
    n = options.n or (500 if options.small else 2000)
    kind, amount = TASKS[task]
    if options.small and kind == "translation":
        amount /= 2  # the images are half as large
    sets = lila.pictures("mnist", options, n, seed)
    return transformed(sets, lambda x, s: transform(x, kind, amount, s), (2 * seed, 2 * seed + 1))


def run_row(row: str, seed: int, options: lila.Options) -> Run:
    """Train one network, with an evidence step after every epoch."""
    task, method = row.split("/")
    train, test = data(task, options, seed)
    epochs = options.epochs or (30 if options.small else 45)
    config = lila.fit_config(options, epochs, every=1, lr=5e-3, batch=128)
    job = lila.Job(TASKS[task][0], method, train, test, seed, config)
    samples = lila.SAMPLES if options.small else SAMPLES
    job = replace(job, average=options.average or "joint", samples=samples)
    return {"n": len(train[1]), "average": job.average} | lila.train(job)


def run(options: lila.Options) -> str:
    """Test whether learned augmentation recovers the width that generated the data."""
    rows = (f"{task}/{method}" for task in TASKS for method in METHODS)
    return markdown(run_rows(NAME, options, rows, run_row))


def markdown(runs: list[Run]) -> str:
    """Return learned ranges, accuracy and NLL by method."""
    rows = []
    for task in TASKS:
        for method in METHODS:
            row_runs = [r for r in runs if r["row"] == f"{task}/{method}"]
            if row_runs:
                accuracy, nll = (mean(r[key] for r in row_runs) for key in ("accuracy", "nll"))
                cells = (task, method, _ranges(row_runs), f"{accuracy:.2f}", f"{nll:.4f}")
                rows.append((*cells, len(row_runs)))
    return table(["data", "method", "learned", "accuracy %", "test NLL", "seeds"], rows)


def _ranges(runs: list[Run]) -> str:
    """Format one range per seed, for example "rotation (degrees) 30.10 29.50"."""
    return "; ".join(
        f"{name} " + " ".join(f"{r['widths'][name]:.2f}" for r in runs)
        for name in runs[0]["widths"]
    )
