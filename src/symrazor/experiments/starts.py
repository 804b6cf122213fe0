"""Test whether the result depends on the starting precision of free paths, on two tasks.

    python -m symrazor.experiments.starts [--seed 0 1 2] [--json FILE]
    python -m symrazor.experiments.starts --data DIR --seed 0 --device cuda [--task digit]

The relaxed network of `symrazor discover` on the embedded digits, or a wider one on MNIST. Its free
paths are drawn from priors with precisions from 1 to 10,000. From all of them `fit` should reach
the same result: -log evidence / N within 0.05 of the best, the same verdict for every layer, test
accuracy within 1 %. `--given` also trains with `fit(..., start="given")`, which uses the free paths
as they were drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

import symrazor as sr
from symrazor.core.files import check_writable_file
from symrazor.data import Tensors, mnist, quadrants
from symrazor.discovery import digits
from symrazor.experiments.command import command
from symrazor.experiments.options import Common
from symrazor.experiments.results import add_runs, merged
from symrazor.layers.plain import convolutional

STARTS = (1.0, 10.0, 100.0, 1e4)
NATS, PERCENT = 0.05, 1.0
"""Largest accepted differences: in -log evidence / N from the best, and in test accuracy."""

MNIST = sr.FitConfig(epochs=20, batch_size=256, lr=4e-3, every=2).change(estimator="mc")
BATCHES = 16  # in an epoch, at least, of fewer images than there are
Start = Literal["near", "given"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Options(Common):
    """Options of the experiment.

    Args:
        small: Use a fifth of the epochs and the two outermost starts only.
        data: Folder with MNIST's files; by default the embedded digits are used.
        device: "auto" uses a GPU if there is one.
        seed: One or more seeds of data placement, initial weights, shuffling and probes.
        json: File to merge rows and comparisons into after each run.
        given: Also train from free paths as they were drawn.
        task: Tasks: "digit", "quadrant".
        epochs: Number of epochs, if not the default of the data.
        switch_off: Try to remove free paths, see `FitConfig`.
        limit: Use only the first images for training and testing.
    """

    seed: tuple[int, ...] = (0, 1, 2)
    given: bool = False
    task: tuple[digits.DigitTask, ...] = ("digit", "quadrant")
    epochs: int | None = None
    switch_off: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers and the tasks."""
        for name, value in (("epochs", self.epochs), ("limit", self.limit)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not self.seed:
            raise ValueError("No seeds given. For example: --seed 0 1 2")
        unknown = sorted(set(self.task) - set(digits.DIGIT_QUESTIONS))
        if unknown or not self.task:
            raise ValueError(
                f"Unknown tasks {unknown}. Choose from {list(digits.DIGIT_QUESTIONS)}."
            )

    @property
    def images(self) -> str:
        """Name of the data, which separates rows of different data."""
        name = "digits" if self.data is None else "mnist"
        return name if self.limit is None else f"{name}[:{self.limit}]"


def data(task: digits.DigitTask, options: Options, seed: int) -> tuple[Tensors, Tensors]:
    """Return training and test images of a task."""
    if options.data is None:
        train, test = digits.digits_on_canvas(task, seed)
    else:
        train, test = mnist(options.data, "train"), mnist(options.data, "test")
    (x, y), (xt, yt) = ((x[: options.limit], y[: options.limit]) for x, y in (train, test))
    if options.data is None:
        return (x, y), (xt, yt)
    return quadrants(x, y, task, seed=seed + 1), quadrants(xt, yt, task, seed=seed)


def train(
    task: digits.DigitTask,
    precision: float,
    start: Start,
    seed: int,
    options: Options | None = None,
    images: tuple[Tensors, Tensors] | None = None,
) -> Row:
    """Train one network and return its figures; by default on the images of `data`."""
    options = Options() if options is None else options
    training, test = data(task, options, seed) if images is None else images
    base = digits.DIGIT_CONFIG if options.data is None else MNIST
    if options.limit is not None:
        base = base.change(batch_size=min(base.batch_size, -(-len(training[1]) // BATCHES)))
    epochs = options.epochs or (max(1, base.epochs // 5) if options.small else base.epochs)
    torch.manual_seed(seed)
    shape = tuple(training[0].shape[1:])
    network = convolutional(shape, digits.DIGIT_CLASSES[task])
    model = sr.relax(network, training[0][:2], precision=precision)
    free = precision if start == "given" else None  # "near" has a precision of its own
    config = base.change(seed=seed, free_precision=free, start=start, epochs=epochs)
    config = config.change(device=options.place, progress=False, switch_off=options.switch_off)
    reading = sr.fit(model, training, test=test, config=config).reading
    relaxed = [layer for layer in reading.layers if layer.relaxed]
    return {
        "row": f"{options.images}/{task}/{start}/{precision:g}",
        "seed": seed,
        "small": options.small,
        "images": options.images,
        "task": task,
        "start": start,
        "precision": precision,
        "epochs": epochs,
        "switch_off": options.switch_off,
        "evidence": -reading.evidence["per_datum"],
        "accuracy": 100 * reading.test["accuracy"],
        "tested": len(test[1]),
        "free_shares": [100 * layer.free_share for layer in relaxed],
        "errors": [100 * (layer.error or 0.0) for layer in relaxed],
        "verdicts": [layer.kind for layer in relaxed],
        "seconds": reading.train["seconds"],
    }


def compare(rows: Sequence[Row]) -> list[Row]:
    """Compare the results of all starts for every task, seed and way to start.

    The best evidence is the highest found for the task and seed, from any start. A single start, or
    runs with different settings, are not compared.
    """

    def key(row: Row) -> tuple[str, int, str]:
        return row["task"], row["seed"], row["start"]

    found = []
    for (task, seed, start), members in groupby(sorted(rows, key=key), key):
        ends = list(members)
        rivals = [row["evidence"] for row in rows if (row["task"], row["seed"]) == (task, seed)]
        gap = max(row["evidence"] for row in ends) - min(rivals)
        accuracies = [row["accuracy"] for row in ends]
        spread = max(accuracies) - min(accuracies)
        same = all(row["verdicts"] == ends[0]["verdicts"] for row in ends)
        tested = ends[0].get("tested")
        images = None if tested is None else round(spread * tested / 100)
        settings = len({(row.get("epochs"), row.get("switch_off")) for row in ends})
        shown = len(ends) > 1 and settings == 1
        passed = shown and gap <= NATS and same and spread <= PERCENT
        found.append(
            {"task": task, "seed": seed, "start": start, "evidence_gap": gap}
            | {"same_verdicts": same, "accuracy_spread": spread, "passed": passed}
            | {"images_apart": images, "tested": tested}
            | {"starts": len(ends), "settings": settings}
        )
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table, followed by the comparisons."""
    head = "| task | start | precision | seed | -log ev/N | accuracy % | free share by layer % |"
    lines = [f"{head} verdict by layer |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        shares = " / ".join(f"{share:.0f}" for share in row["free_shares"])
        lines.append(
            f"| {row['task']} | {row['start']} | {row['precision']:g} | {row['seed']} | "
            f"{row['evidence']:.3f} | {row['accuracy']:.1f} | {shares} | "
            f"{' / '.join(str(verdict) for verdict in row['verdicts'])} |"
        )
    bounds = f"gap <= {NATS} | same verdicts | accuracy within {PERCENT:g} %"
    lines += ["", f"| task | start | seed | {bounds} | |", "|---|---|---|---|---|---|---|"]
    for pair in compare(rows):
        of_all = f" ({pair['images_apart']} of {pair['tested']})" if pair["tested"] else ""
        lines.append(
            f"| {pair['task']} | {pair['start']} | {pair['seed']} | {pair['evidence_gap']:.3f} | "
            f"{'yes' if pair['same_verdicts'] else 'no'} | {pair['accuracy_spread']:.1f}{of_all} | "
            f"{_outcome(pair)} |"
        )
    return "\n".join(lines)


def _outcome(pair: Row) -> str:
    """Return the outcome of a comparison."""
    if pair["starts"] < 2:
        return "one start only"
    if pair["settings"] > 1:
        return f"not alike: {pair['settings']} settings"
    return "pass" if pair["passed"] else "FAIL"


def run(options: Options) -> str:
    """Train from every start and return the tables as markdown, including earlier runs in the file.

    The file is complete after every run, and other processes may add to it.
    """
    ways: tuple[Start, ...] = ("near", "given") if options.given else ("near",)
    starts = (STARTS[0], STARTS[-1]) if options.small else STARTS
    check_writable_file(options.json)
    rows = _merge(options.json, [], [])  # before the work: a run must not be lost to a bad path
    for task in options.task:
        for seed in options.seed:
            images = data(task, options, seed)
            for way in ways:
                for precision in starts:
                    new = train(task, precision, way, seed, options, images)
                    rows = _merge(options.json, rows, [new])
    alike = (options.small, options.images)
    shown = [row for row in rows if (row["small"], row["images"]) == alike]
    return markdown(sorted(shown, key=_place))


def _place(row: Row) -> tuple[str, int, bool, float]:
    """Return the sort key of a row."""
    return row["task"], row["seed"], row["start"] == "given", row["precision"]


def _merge(file: Path | None, old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Merge old and new runs with those in the file."""
    if file is None:
        return merged(old, new)
    return merged(old, add_runs("starts", file, new, _comparisons))


def _comparisons(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Compare runs of one size on the same images."""
    kinds = sorted({(row["small"], row["images"]) for row in rows})
    found = []
    for small, images in kinds:
        alike = [row for row in rows if (row["small"], row["images"]) == (small, images)]
        found += [{"images": images, "small": small, **pair} for pair in compare(alike)]
    return {"comparisons": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment as a command."""
    command("starts", run, Options, arguments)


if __name__ == "__main__":
    main()
