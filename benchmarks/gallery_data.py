"""Prepare the data sets of the gallery: one small .npz file for each.

    python benchmarks/gallery_data.py PACKAGES OFFICIAL OUT

PACKAGES has the unpacked wheels of aeon, scikit-image, geomstats and tensorly, for example the
folder site-packages of an environment with these four. OFFICIAL has mnist, fashion-mnist and
cifar-10 (`symrazor data get`). Every random choice has seed 0.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prequential import read_series
from symrazor.data import cifar10, digits, fashion_mnist, mnist

Array = np.ndarray[Any, Any]
Split = tuple[Array, list[str]]
"""Inputs and the name of the class of each."""


@dataclass(frozen=True)
class DataSet:
    """A data set of the gallery.

    Args:
        title: heading of its page.
        question: what is asked about the data.
        source: where the data come from, and how they are divided.
        kind: kind of the inputs, as in `discover`.
        read: returns training and test data, from the folders PACKAGES and OFFICIAL.
        sizes: numbers of training samples; a part of all depends on the seed.
        groups: groups to ask about; none for the default of the kind.
    """

    title: str
    question: str
    source: str
    kind: str
    read: Callable[[Path, Path], tuple[Split, Split]]
    sizes: tuple[int, ...]
    groups: tuple[str, ...] = ()


def _series(name: str) -> Callable[[Path, Path], tuple[Split, Split]]:
    """Return a reader of series of the UCR archive, which aeon contains."""

    def read(packages: Path, _: Path) -> tuple[Split, Split]:
        folder = packages / "aeon" / "datasets" / "data" / name
        train, test = (read_series(folder / f"{name}_{part}.ts") for part in ("TRAIN", "TEST"))
        return (train[0].numpy(), train[1]), (test[0].numpy(), test[1])

    return read


def _faces(packages: Path, _: Path) -> tuple[Split, Split]:
    """Return 100 faces and 100 other pictures, 25 x 25 pixels; 60 of each for training."""
    x = np.load(packages / "skimage" / "data" / "lfw_subset.npy")[:, None]
    labels = ["face"] * 100 + ["other"] * 100
    order = np.random.default_rng(0).permutation(100)
    train, test = (np.concatenate([part, part + 100]) for part in (order[:60], order[60:]))
    return (x[train], [labels[i] for i in train]), (x[test], [labels[i] for i in test])


def _textures(packages: Path, _: Path) -> tuple[Split, Split]:
    """Return patches of 24 x 24 pixels: the left half of a picture is for training."""
    from PIL import Image

    random = np.random.default_rng(0)
    splits = []
    for left, count in ((0, 400), (256, 200)):
        x, labels = [], []
        for name in ("grass", "gravel", "brick"):
            picture = Image.open(packages / "skimage" / "data" / f"{name}.png").convert("L")
            small = np.asarray(picture.resize((256, 256)))[:, left // 2 : left // 2 + 128]
            corners = random.integers(0, (232, 104), (count, 2))
            x += [small[None, i : i + 24, j : j + 24] for i, j in corners]
            labels += [name] * count
        splits.append((np.stack(x), labels))
    return splits[0], splits[1]


def _cells(packages: Path, _: Path) -> tuple[Split, Split]:
    """Return cell outlines at 64 points of equal distance, centred; 350 for training."""
    folder = packages / "geomstats" / "datasets" / "data" / "cells"
    labels = (folder / "treatments.txt").read_text().split("\n")
    x = []
    for text in (folder / "cells.txt").read_text().split("\n\n"):
        points = np.array([line.split() for line in text.split("\n")], dtype=float)
        closed = np.concatenate([points, points[:1]])
        length = np.concatenate([[0], np.linalg.norm(np.diff(closed, axis=0), axis=1).cumsum()])
        at = np.linspace(0, length[-1], 64, endpoint=False)
        outline = np.stack([np.interp(at, length, closed[:, axis]) for axis in (0, 1)])
        x.append(outline - outline.mean(1, keepdims=True))
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:350], order[350:]
    outlines = np.stack(x)
    return (outlines[train], [labels[i] for i in train]), (
        outlines[test],
        [labels[i] for i in test],
    )


def _gestures(packages: Path, _: Path) -> tuple[Split, Split]:
    """Return the log activity of 8 electrodes in windows; first sessions for training."""
    file = packages / "geomstats" / "datasets" / "data" / "emg" / "emg.csv"
    values: dict[tuple[str, str], list[list[float]]] = {}
    with file.open() as lines:
        for row in csv.DictReader(lines):
            activity = [float(row[f"c{channel}"]) for channel in range(8)]
            values.setdefault((row["exp"], row["label"]), []).append(activity)
    splits = []
    for session, count in (("s1", 120), ("s2", 80)):
        x, labels = [], []
        for (name, label), rows in values.items():
            if name.endswith(session):
                windows = np.array_split(np.array(rows), count)
                x += [np.log(window.std(0)) for window in windows]
                labels += [label] * count
        splits.append((np.stack(x), labels))
    return splits[0], splits[1]


def _digits(_: Path, __: Path) -> tuple[Split, Split]:
    """Return the embedded digits in the division of the package."""
    (x, y), (x_test, y_test) = digits("train"), digits("test")
    return (x.numpy(), _names(y)), (x_test.numpy(), _names(y_test))


def _crops(packages: Path, _: Path) -> tuple[Split, Split]:
    """Return patches of 5 x 5 pixels with 20 bands; the upper half of the scene is for training."""
    folder = packages / "tensorly" / "datasets" / "data"
    scene = np.load(folder / "Indian_pines_corrected.npy")[:, :, ::10]
    plants = np.load(folder / "Indian_pines_gt.npy")
    random, splits = np.random.default_rng(0), []
    for rows, count in ((range(2, 70), 1000), (range(75, 143), 2000)):
        x, labels = [], []
        for i in rows:
            for j in range(2, 143):
                if plants[i, j] in CROPS:
                    x.append(scene[i - 2 : i + 3, j - 2 : j + 3].transpose(2, 0, 1))
                    labels.append(CROPS[plants[i, j]])
        order = random.permutation(len(x))[:count]
        splits.append((np.stack(x)[order], [labels[i] for i in order]))
    return splits[0], splits[1]


def _official(read: Callable[..., Any], name: str, n: int, n_test: int) -> Callable[..., Any]:
    """Return a reader of a random part of an official data set."""

    def part(_: Path, official: Path) -> tuple[Split, Split]:
        splits = []
        for split, count in (("train", n), ("test", n_test)):
            x, y = read(official / name, split)
            order = np.random.default_rng(0).permutation(len(y))[:count]
            pixels = (255 * x[order]).round().to(dtype=torch.uint8).numpy()
            splits.append((pixels, _names(y[order])))
        return splits[0], splits[1]

    return part


def _names(y: Any) -> list[str]:
    return [str(label) for label in y.tolist()]


CROPS = {
    2: "corn, no till",
    3: "corn, little till",
    6: "grass and trees",
    10: "soybean, no till",
    11: "soybean, little till",
    14: "woods",
}
"""Classes of the Indian Pines scene with more than 100 pixels in both halves."""
AEON = "Package aeon ({}), UCR archive, official division."
DATA = {
    "leaves": DataSet(
        "Leaf outlines (OSULeaf)",
        "Does it matter where on the leaf the outline starts?",
        AEON.format("OSULeaf"),
        "series",
        _series("OSULeaf"),
        (100, 200),
    ),
    "arrowheads": DataSet(
        "Arrowheads (ArrowHead)",
        "Does it matter where on the arrowhead the outline starts?",
        AEON.format("ArrowHead"),
        "series",
        _series("ArrowHead"),
        (36,),
    ),
    "gestures": DataSet(
        "A hand draws a gun or points (GunPoint)",
        "Does it matter when the hand moves?",
        AEON.format("GunPoint"),
        "series",
        _series("GunPoint"),
        (50,),
    ),
    "power": DataSet(
        "Electricity demand of a day (ItalyPowerDemand)",
        "Does the time of day matter?",
        AEON.format("ItalyPowerDemand"),
        "series",
        _series("ItalyPowerDemand"),
        (67,),
    ),
    "cells": DataSet(
        "Outlines of cancer cells, three treatments",
        "Does it matter where on the cell the outline starts?",
        "Package geomstats (cells), 64 points of equal distance on each outline; random division.",
        "series",
        _cells,
        (150, 350),
    ),
    "electrodes": DataSet(
        "Signs of a hand, eight electrodes on a ring around the arm",
        "May the ring of electrodes be turned?",
        "Package geomstats (emg), log activity in windows; first sessions of two people for "
        "training, second sessions as test data.",
        "vector",
        _gestures,
        (200, 1200),
        ("cyclic",),
    ),
    "faces": DataSet(
        "Faces or other pictures (LFW subset)",
        "Does it matter where the face is?",
        "Package scikit-image (lfw_subset), divided at random.",
        "image",
        _faces,
        (60, 120),
    ),
    "textures": DataSet(
        "Patches of grass, gravel and brick",
        "Does it matter where a texture begins?",
        "Package scikit-image (data); patches of the left half of each picture are training data, "
        "patches of the right half test data.",
        "image",
        _textures,
        (150, 600, 1200),
    ),
    "crops": DataSet(
        "Crops seen from the air (Indian Pines)",
        "May a patch of a field be turned or mirrored?",
        "Package tensorly (Indian Pines), every tenth of 200 bands, patches of 5 x 5 pixels; "
        "patches of the upper half of the scene are training data, patches of the lower half test "
        "data.",
        "image",
        _crops,
        (200, 1000),
    ),
    "digits": DataSet(
        "Handwritten digits, 8 x 8 pixels",
        "Does it matter where the digit is?",
        "Embedded in this package (UCI), divided by the package.",
        "image",
        _digits,
        (100, 300, 1000),
    ),
    "mnist": DataSet(
        "MNIST",
        "Does it matter where the digit is, and how may it be moved?",
        "symrazor data get mnist; random parts of the official training and test data.",
        "image",
        _official(mnist, "mnist", 6000, 2000),
        (300, 1000, 6000),
    ),
    "fashion": DataSet(
        "Fashion-MNIST",
        "Does it matter where the article is, and how may it be moved?",
        "symrazor data get fashion-mnist; random parts of the official training and test data.",
        "image",
        _official(fashion_mnist, "fashion-mnist", 5000, 2000),
        (300, 1000, 5000),
    ),
    "cifar": DataSet(
        "CIFAR-10",
        "Does it matter where the object is, and how may it be moved?",
        "symrazor data get cifar-10; random parts of the official training and test data.",
        "image",
        _official(cifar10, "cifar-10", 2000, 1000),
        (500, 2000),
    ),
}
"""Name -> data set."""


def prepare(packages: Path, official: Path, out: Path) -> Iterator[Path]:
    """Write a file for each data set."""
    out.mkdir(parents=True, exist_ok=True)
    for name, data in DATA.items():
        (x, labels), (x_test, test_labels) = data.read(packages, official)
        classes = sorted(set(labels))
        y, y_test = (
            np.array([classes.index(label) for label in part], dtype=np.uint8)
            for part in (labels, test_labels)
        )
        small = [
            part if part.dtype == np.uint8 else part.astype(np.float32) for part in (x, x_test)
        ]
        file = out / f"{name}.npz"
        np.savez_compressed(
            file, x=small[0], y=y, x_test=small[1], y_test=y_test, names=np.array(classes)
        )
        yield file


def main() -> None:
    """Prepare all data sets."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("packages", "official", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    for file in prepare(arguments.packages, arguments.official, arguments.out):
        print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
