"""The three tables of ELLA: rows with the paper's figures, data and training options.

Differences from the reference: table 1 trains on all 60,000 images, not on 50,000 of them. Table 2
flips and crops each training image with its own draw, not with one draw per batch. Test images are
not augmented. Table 3 trains for at most a tenth of the paper's 1,000 epochs (MNIST) and 4,000
(CIFAR-10).
"""

from collections.abc import Sequence
from statistics import mean
from typing import Literal

from torch import Tensor

import symrazor as sr
from symrazor.data import (
    flip_and_crop,
    normalised,
    on_canvas,
    quadrants,
    resized,
    rotated,
    translated,
)
from symrazor.data.transforms import MAX_SHIFT_PIXELS
from symrazor.experiments.ella import Options, Row, Table
from symrazor.experiments.images import Images, data_seeds, embedded, official, transformed
from symrazor.experiments.results import Run, table
from symrazor.layers.ella import FREE_PRECISION, Prior

Figures = tuple[float, float, float, float, float]
"""Figures of the paper: MAP NLL and accuracy; Laplace NLL, accuracy and -log evidence / N."""


def _rows(
    name: str, task: str, paths: str, figures: Figures, prior: Prior = "weights", small: bool = True
) -> list[Row]:
    """Return the rows of a network trained by MAP and by the evidence."""
    map_nll, map_accuracy, nll, accuracy, evidence = figures
    by_map = {"accuracy": map_accuracy, "nll": map_nll}
    learned = {"accuracy": accuracy, "nll": nll, "evidence": evidence}
    return [
        Row(f"{name}/map", task, paths, "map", prior, by_map, small),
        Row(f"{name}/laplace", task, paths, "laplace", prior, learned, small),
    ]


# Table 1: the same images, with labels that depend on position or do not. MNIST digits are placed
# in one of four quadrants. A convolutional network cannot distinguish the quadrants (24.7 %), and a
# dense network has to learn every digit at every position. A network whose symmetry is learned by
# the evidence should do well on both tasks and break the symmetry only where the labels require it.

ACCURACIES_1 = {
    "digit/fc/map": 95.73,
    "digit/conv/map": 99.38,
    "digit/fc/laplace": 97.04,
    "digit/conv/laplace": 99.23,
    "digit/f-fc+conv/laplace": 98.86,
    "quadrant/fc/map": 95.10,
    "quadrant/conv/map": 24.68,
    "quadrant/fc/laplace": 95.46,
    "quadrant/conv/laplace": 24.50,
    "quadrant/f-fc+conv/laplace": 99.00,
}
"""Row -> test accuracy in per cent."""


def _row_1(name: str) -> Row:
    task, paths, method = name.split("/")
    return Row(
        name,
        task,
        paths,
        "map" if method == "map" else "laplace",
        paper={"accuracy": ACCURACIES_1[name]},
        classes=10 if task == "digit" else 40,
    )


def data_1(task: str, options: Options, seed: int = 0) -> Images:
    """Return training and test images; every seed draws other quadrants."""
    kind: Literal["digit", "quadrant"] = "digit" if task == "digit" else "quadrant"
    train_seed, test_seed = data_seeds(seed)
    if options.small:
        train, test = embedded()
        train = on_canvas(*train, seed=train_seed, task=kind)
        return train, on_canvas(*test, seed=test_seed, task=kind)
    train, test = official("mnist", options)
    return quadrants(*train, kind, seed=train_seed), quadrants(*test, kind, seed=test_seed)


def config_1(row: Row, small: bool) -> sr.FitConfig:
    """Return the training options of a row.

    Muon reaches more evidence than AdamW in the same number of epochs where free paths are learned,
    and sharpness-aware steps reduce test errors. Dense networks have large factors, so their
    evidence is estimated less often.
    """
    if small:
        epochs = {"fc": 15, "conv": 30, "f-fc+conv": 60}[row.paths]
        base = sr.FitConfig(epochs=epochs, batch_size=64, lr=6e-3, every=4, start="given")
        return base.change(estimator="mc", switch_off=True)
    base = sr.FitConfig(epochs=80, batch_size=256, lr=4e-3, every=5)
    if row.paths == "fc":
        base = base.change(epochs=60, lr=5e-4, every=25)
    if row.paths == "f-fc+conv":
        base = base.change(epochs=45, optimizer="muon", lr=0.01, switch_off=True, sam_radius=0.1)
    return base.change(estimator="mc")


TABLE_1 = Table("ella-table1", [_row_1(name) for name in ACCURACIES_1], data_1, config_1)


# Table 2: eleven networks on CIFAR-10, trained by MAP and by the evidence.

FIGURES_2: dict[str, Figures] = {
    "fc": (2.423, 64.42, 1.319, 52.36, 1.896),
    "conv": (1.184, 82.81, 0.464, 84.07, 1.022),
    "fc+conv": (1.713, 76.93, 0.489, 83.32, 1.019),
    "f-fc": (4.291, 50.47, 1.307, 53.38, 2.119),
    "f-fc+conv": (1.343, 81.61, 0.468, 83.92, 1.277),
    "s-fc-u": (5.614, 50.21, 1.496, 46.18, 1.926),
    "s-conv-u": (0.604, 82.53, 0.562, 81.29, 1.037),
    "s-fc+s-conv-u": (5.485, 58.80, 0.538, 81.55, 0.978),
    "s-fc-omega": (7.783, 49.69, 1.319, 52.22, 1.813),
    "s-conv-omega": (0.913, 81.84, 0.549, 81.20, 1.055),
    "s-fc+s-conv-omega": (2.040, 77.97, 0.564, 80.63, 1.067),
}


def _rows_2(name: str) -> list[Row]:
    paths = name.removesuffix("-u").removesuffix("-omega")
    prior: Prior = "omega" if name.endswith("-omega") else "weights"
    return _rows(name, "images", paths, FIGURES_2[name], prior)


def data_2(task: str, options: Options, seed: int = 0) -> Images:
    """Return CIFAR-10, normalised, or the embedded digits resized to 16 x 16."""
    if options.small:
        return embedded(16)
    return transformed(official("cifar-10", options), lambda x, _: normalised(x, "cifar-10"))


def config_2(row: Row, small: bool) -> sr.FitConfig:
    """Return the training options of a row.

    Muon is used except for dense paths, whose matrices of 10,000 rows are too large to
    orthogonalise at every step, and except for free paths trained by MAP, which diverge at Muon's
    learning rate.
    """
    if small:
        base = sr.FitConfig(epochs=8, batch_size=64, lr=4e-3, every=2, start="given")
        return base.change(estimator="mc", switch_off=True)
    base = sr.FitConfig(epochs=190, batch_size=256, every=5, optimizer="muon", lr=0.01)
    if "fc" in row.paths.split("+"):
        base = base.change(epochs=120, optimizer="adamw", lr=5e-4 if row.paths == "fc" else 1e-3)
    elif row.method == "map" and "fc" in row.paths:
        base = base.change(optimizer="adamw", lr=2e-3)
    base = base.change(estimator="mc", free_precision=FREE_PRECISION[32], augment=flip_and_crop)
    return base.change(start="given")


TABLE_2 = Table(
    "ella-table2", [row for name in FIGURES_2 for row in _rows_2(name)], data_2, config_2
)


# Table 3: each layer of F-FC+CONV+GCONV with width 2 chooses between no symmetry, translations, and
# quarter turns. Images are transformed once; every seed draws other transformations.

FIGURES_3: dict[str, Figures] = {
    "mnist": (0.172, 97.59, 0.023, 99.21, 0.328),
    "translated-mnist": (0.812, 90.78, 0.053, 98.27, 0.216),
    "rotated-mnist": (0.819, 91.02, 0.136, 95.55, 0.896),
    "cifar-10": (3.540, 68.33, 0.552, 80.94, 0.926),
    "rotated-cifar-10": (5.953, 48.30, 1.236, 55.68, 1.630),
}
SHARES_3 = {
    "mnist": ("10 (0-46)", "15 (0-98)", "75 (1-100)"),
    "translated-mnist": ("0 (0-0)", "23 (0-99)", "77 (1-100)"),
    "rotated-mnist": ("8 (0-20)", "8 (0-47)", "83 (47-100)"),
    "cifar-10": ("0 (0-1)", "44 (0-99)", "56 (0-100)"),
    "rotated-cifar-10": ("4 (0-22)", "14 (0-41)", "82 (58-99)"),
}
"""Data -> per cent of effective parameters in FC, CONV and GCONV, mean (min-max) over layers."""
PATHS_3 = ("FFC", "Conv", "GConv p4")


def data_3(task: str, options: Options, seed: int = 0) -> Images:
    """Return training and test images of 32 x 32, normalised, or embedded digits of 16 x 16."""
    name = "mnist" if "mnist" in task else "cifar-10"
    shift = 3.0 if options.small else MAX_SHIFT_PIXELS[name]

    def change(x: Tensor, seed: int) -> Tensor:
        if task.startswith("rotated"):
            x = rotated(x, 180, seed)
        elif task.startswith("translated"):
            x = translated(x, shift, seed)
        return x if options.small else resized(normalised(x, name), 32)

    sets = embedded(16) if options.small else official(name, options)
    return transformed(sets, change, data_seeds(seed))


def config_3(row: Row, small: bool) -> sr.FitConfig:
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
    rows = []
    for task, paper_shares in SHARES_3.items():
        row_runs = [r for r in runs if r["row"] == f"{task}/laplace" and "error" not in r]
        if not row_runs:
            continue
        cells = [task]
        for path, paper in zip(PATHS_3, paper_shares, strict=True):
            values = [r["reading"]["relative_effective_parameters"][path] for r in row_runs]
            average, low, high = (100 * mean(v[k] for v in values) for k in ("mean", "min", "max"))
            cells += [f"{average:.0f} ({low:.0f}-{high:.0f})", paper]
        rows.append([*cells, len(row_runs)])
    return table(["data", "F-FC %", "paper", "CONV %", "paper", "GCONV %", "paper", "seeds"], rows)


TABLE_3 = Table(
    "ella-table3",
    [
        row
        for task, figures in FIGURES_3.items()
        for row in _rows(task, task, "f-fc+conv+gconv", figures, small="mnist" in task)
    ],
    data_3,
    config_3,
    alpha=(2, 2),
    more=shares,
)


def run_table1(options: Options) -> str:
    """Reproduce ELLA table 1: is position used where the task needs it?"""
    return TABLE_1.run(options)


def run_table2(options: Options) -> str:
    """Reproduce ELLA table 2: eleven networks on CIFAR-10."""
    return TABLE_2.run(options)


def run_table3(options: Options) -> str:
    """Reproduce ELLA table 3: no symmetry, translations or rotations in each layer."""
    return TABLE_3.run(options)
