"""ELLA Table 3: each layer chooses between no symmetry, translations, and quarter turns.

F-FC+CONV+GCONV with width 2 on regular, translated and rotated MNIST and CIFAR-10. The figures are
accuracy, NLL, evidence, and the share of a layer's effective parameters in each path: mean
(min-max) over layers. Images are transformed once, with seeds 1 (training) and 0 (test) for every
run. Test images are not augmented; the reference augments them.

The paper trains for 1,000 epochs (MNIST) and 4,000 (CIFAR-10); this experiment uses at most a
tenth.
"""

from collections.abc import Sequence
from statistics import mean

import symrazor as sr
from symrazor.data import (
    Tensors,
    cifar10,
    digits,
    flip_and_crop,
    mnist,
    normalised,
    resized,
    rotated,
    translated,
)
from symrazor.data.transforms import MAX_SHIFT_PIXELS
from symrazor.experiments.results import Run
from symrazor.experiments.tables import Experiment, Options, Row, main

PATHS = "f-fc+conv+gconv"

PAPER: dict[str, tuple[float, float, float, float, float]] = {
    "mnist": (0.172, 97.59, 0.023, 99.21, 0.328),
    "translated-mnist": (0.812, 90.78, 0.053, 98.27, 0.216),
    "rotated-mnist": (0.819, 91.02, 0.136, 95.55, 0.896),
    "cifar-10": (3.540, 68.33, 0.552, 80.94, 0.926),
    "rotated-cifar-10": (5.953, 48.30, 1.236, 55.68, 1.630),
}
"""Data -> MAP NLL and accuracy; Laplace NLL, accuracy and -log evidence / N."""

PAPER_SHARES = {
    "mnist": ("10 (0-46)", "15 (0-98)", "75 (1-100)"),
    "translated-mnist": ("0 (0-0)", "23 (0-99)", "77 (1-100)"),
    "rotated-mnist": ("8 (0-20)", "8 (0-47)", "83 (47-100)"),
    "cifar-10": ("0 (0-1)", "44 (0-99)", "56 (0-100)"),
    "rotated-cifar-10": ("4 (0-22)", "14 (0-41)", "82 (58-99)"),
}
"""Data -> per cent of effective parameters in FC, CONV and GCONV, mean (min-max) over layers."""

KINDS = ("FFC", "Conv", "GConv p4")


def _rows() -> list[Row]:
    rows = []
    for task, (map_nll, map_accuracy, nll, accuracy, evidence) in PAPER.items():
        small = "mnist" in task
        by_map = {"accuracy": map_accuracy, "nll": map_nll}
        learned = {"accuracy": accuracy, "nll": nll, "evidence": evidence}
        rows.append(Row(f"{task}/map", task, PATHS, "map", paper=by_map, small=small))
        rows.append(Row(f"{task}/laplace", task, PATHS, "laplace", paper=learned, small=small))
    return rows


def moved(x: Tensors, task: str, seed: int, shift: float) -> Tensors:
    """Return images rotated by any angle, translated, or unchanged, depending on the task."""
    images, labels = x
    if task.startswith("rotated"):
        return rotated(images, 180, seed), labels
    return (translated(images, shift, seed), labels) if task.startswith("translated") else x


def data(task: str, options: Options) -> tuple[Tensors, Tensors]:
    """Return training and test images of 32 x 32, normalised, or embedded digits of 16 x 16."""
    if options.small:
        parts = digits("train"), digits("test")
        sets = [(resized(x, 16), y) for x, y in parts]
        train, test = (moved(s, task, seed, 3.0) for s, seed in zip(sets, (1, 0), strict=True))
        return train, test
    name = "mnist" if "mnist" in task else "cifar-10"
    if options.data is None:
        raise ValueError(f"No data. Use --data DIR with the files of {name}, or --small.")
    read = mnist if name == "mnist" else cifar10
    found = []
    for part, seed in (("train", 1), ("test", 0)):
        x, y = moved(read(options.data, part), task, seed, MAX_SHIFT_PIXELS[name])  # type: ignore[arg-type]
        found.append((resized(normalised(x, name), 32), y))
    return found[0], found[1]


def config(row: Row, small: bool) -> sr.FitConfig:
    """Return the training options of a row."""
    if small:
        return sr.FitConfig(epochs=20, batch_size=64, lr=6e-3, every=4).change(estimator="mc")
    if "mnist" in row.task:
        base = sr.FitConfig(epochs=60, batch_size=256, lr=4e-3, every=5)
    else:
        base = sr.FitConfig(epochs=100, batch_size=256, lr=0.01, every=5, optimizer="muon")
        base = base.change(augment=flip_and_crop)
    return base.change(estimator="mc")


def shares(runs: Sequence[Run]) -> str:
    """Return a table of effective parameters by path, mean (min-max) over layers."""
    head = ["data", "F-FC %", "paper", "CONV %", "paper", "GCONV %", "paper", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for task, theirs in PAPER_SHARES.items():
        done = [r for r in runs if r["row"] == f"{task}/laplace" and "error" not in r]
        if not done:
            continue
        cells = [task]
        for kind, paper in zip(KINDS, theirs, strict=True):
            found = [r["reading"]["relative_effective_parameters"][kind] for r in done]
            average, low, high = (100 * mean(f[k] for f in found) for k in ("mean", "min", "max"))
            cells += [f"{average:.0f} ({low:.0f}-{high:.0f})", paper]
        lines.append(f"| {' | '.join([*cells, str(len(done))])} |")
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="ella-table3",
    rows=_rows(),
    data=data,
    classes=lambda task: 10,
    config=config,
    alpha=(2, 2),
    more=shares,
)

if __name__ == "__main__":
    main(EXPERIMENT)
