"""Test whether the result depends on the starting precision of free paths, on two tasks.

The relaxed network of `symrazor discover` on the embedded digits, or a wider one on MNIST. Its free
paths are drawn from priors with precisions from 1 to 10,000. From all of them `fit` should reach
the same result: -log evidence / N within 0.05 of the best, the same verdict for every layer, test
accuracy within 1 %. `--given` also trains with `fit(..., start="given")`, which uses the free paths
as they were drawn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch

import symrazor as sr
from symrazor.data import quadrants
from symrazor.discovery import digits
from symrazor.experiments.images import Images, official
from symrazor.experiments.options import OfOfficialData, OfSeeds
from symrazor.experiments.results import gather, table
from symrazor.layers.plain import convolutional

STARTS = (1.0, 10.0, 100.0, 1e4)
MAX_GAP_NATS, MAX_SPREAD_PERCENT = 0.05, 1.0
"""Largest accepted differences: in -log evidence / N from the best, and in test accuracy."""

MNIST = sr.FitConfig(epochs=20, batch_size=256, lr=4e-3, every=2).change(estimator="mc")
MIN_BATCHES = 16
"""Least number of batches in an epoch of a subset of the images."""
Start = Literal["near", "given"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Options(OfOfficialData, OfSeeds):
    """Options of the experiment.

    Args:
        small: Use a fifth of the epochs and the two outermost starts only.
        data: Folder with MNIST's files; by default the embedded digits are used.
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


def data(task: digits.DigitTask, options: Options, seed: int) -> Images:
    """Return training and test images of a task."""
    if options.data is None:
        train, test = digits.digits_on_canvas(task, seed)
    else:
        train, test = official("mnist", options)
    (x, y), (x_test, y_test) = ((x[: options.limit], y[: options.limit]) for x, y in (train, test))
    if options.data is None:
        return (x, y), (x_test, y_test)
    return quadrants(x, y, task, seed=seed + 1), quadrants(x_test, y_test, task, seed=seed)


def train(
    task: digits.DigitTask,
    precision: float,
    start: Start,
    seed: int,
    options: Options,
    images: Images,
) -> Row:
    """Train one network and return its figures."""
    training, test = images
    base = digits.DIGIT_CONFIG if options.data is None else MNIST
    if options.limit is not None:
        base = base.change(batch_size=min(base.batch_size, -(-len(training[1]) // MIN_BATCHES)))
    epochs = options.epochs or (max(1, base.epochs // 5) if options.small else base.epochs)
    torch.manual_seed(seed)
    shape = tuple(training[0].shape[1:])
    network = convolutional(shape, digits.DIGIT_CLASSES[task])
    model = sr.relax(network, training[0][:2], precision=precision)
    free = precision if start == "given" else None  # "near" has a precision of its own
    config = base.change(seed=seed, free_precision=free, start=start, epochs=epochs)
    config = config.change(
        device=options.resolved_device,
        progress=False,
        switch_off=options.switch_off,
        evidence_structure=None,
    )
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

    comparisons = []
    for (task, seed, start), members in groupby(sorted(rows, key=key), key):
        ends = list(members)
        rivals = [row["evidence"] for row in rows if (row["task"], row["seed"]) == (task, seed)]
        gap = max(row["evidence"] for row in ends) - min(rivals)
        accuracies = [row["accuracy"] for row in ends]
        spread = max(accuracies) - min(accuracies)
        same_verdicts = all(row["verdicts"] == ends[0]["verdicts"] for row in ends)
        tested = ends[0].get("tested")
        images = None if tested is None else round(spread * tested / 100)
        settings = len({(row.get("epochs"), row.get("switch_off")) for row in ends})
        comparable = len(ends) > 1 and settings == 1
        passed = (
            comparable and gap <= MAX_GAP_NATS and same_verdicts and spread <= MAX_SPREAD_PERCENT
        )
        comparisons.append(
            {"task": task, "seed": seed, "start": start, "evidence_gap": gap}
            | {"same_verdicts": same_verdicts, "accuracy_spread": spread, "passed": passed}
            | {"images_apart": images, "tested": tested}
            | {"starts": len(ends), "settings": settings}
        )
    return comparisons


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table, followed by the comparisons."""
    lines = [
        (
            *(row["task"], row["start"], f"{row['precision']:g}", row["seed"]),
            *(f"{row['evidence']:.3f}", f"{row['accuracy']:.1f}"),
            " / ".join(f"{share:.0f}" for share in row["free_shares"]),
            " / ".join(str(verdict) for verdict in row["verdicts"]),
        )
        for row in rows
    ]
    head = ["task", "start", "precision", "seed", "-log ev/N", "accuracy %"]
    text = table([*head, "free share by layer %", "verdict by layer"], lines)
    comparisons = []
    for pair in compare(rows):
        of_all = f" ({pair['images_apart']} of {pair['tested']})" if pair["tested"] else ""
        comparisons.append(
            (
                *(pair["task"], pair["start"], pair["seed"], f"{pair['evidence_gap']:.3f}"),
                "yes" if pair["same_verdicts"] else "no",
                f"{pair['accuracy_spread']:.1f}{of_all}",
                _outcome(pair),
            )
        )
    head = ["task", "start", "seed", f"gap <= {MAX_GAP_NATS}", "same verdicts"]
    head += [f"accuracy within {MAX_SPREAD_PERCENT:g} %", ""]
    return f"{text}\n\n{table(head, comparisons)}"


def _outcome(pair: Row) -> str:
    """Return the outcome of a comparison."""
    if pair["starts"] < 2:
        return "one start only"
    if pair["settings"] > 1:
        return f"not equal: {pair['settings']} settings"
    return "pass" if pair["passed"] else "FAIL"


def run(options: Options) -> str:
    """Test whether the result depends on the initial weights of free paths.

    The file is complete after every run, and other processes may add to it.
    """
    begins: tuple[Start, ...] = ("near", "given") if options.given else ("near",)
    precisions = (STARTS[0], STARTS[-1]) if options.small else STARTS

    def jobs() -> Iterator[Callable[[], Row]]:
        for task in options.task:
            for seed in options.seed:
                images = data(task, options, seed)
                for start in begins:
                    for precision in precisions:
                        yield partial(train, task, precision, start, seed, options, images)

    rows = gather("starts", options.json, jobs(), also=_comparisons)
    same_data = [r for r in rows if (r["small"], r["images"]) == (options.small, options.images)]
    return markdown(sorted(same_data, key=_sort_key))


def _sort_key(row: Row) -> tuple[str, int, bool, float]:
    return row["task"], row["seed"], row["start"] == "given", row["precision"]


def _comparisons(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Compare runs of one size on the same images."""
    comparisons = []
    for small, images in sorted({(row["small"], row["images"]) for row in rows}):
        same_data = [row for row in rows if (row["small"], row["images"]) == (small, images)]
        comparisons += [{"images": images, "small": small, **pair} for pair in compare(same_data)]
    return {"comparisons": comparisons}
