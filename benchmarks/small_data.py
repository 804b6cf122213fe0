"""Prepare small real data sets for benchmarks/ranking.py, one .npz file each.

    python benchmarks/small_data.py OUT --images IMAGES --series SERIES

IMAGES has the folders mnist and fashion-mnist with the four IDX files, and cifar-10 with the folder
cifar-10-batches-bin of the binary files. SERIES has one folder per data set, as in the wheel of
aeon (aeon/datasets/data). Either may be missing. The digits are part of symrazor.

Images are averaged over blocks of 2 x 2 pixels (not the digits, and not mnist-28 and cifar-10-32,
which are for benchmarks/table3_structures.py). A file holds a pool of training
images, of which each seed uses other ones, and 1,000 test images. Series have the official split.

Two files are small versions of the data of ELLA: digits-quadrant (Table 1) has digits in a random
quadrant of a canvas, mnist-rotated (Table 3) digits that are turned by any angle.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from prequential import load
from symrazor.data import digits
from symrazor.data.embedded import on_canvas
from symrazor.data.transforms import rotated

POOL = 1200
"""Training images in a file, enough for four disjoint training sets."""
TEST = 1000
SERIES = ("OSULeaf", "ArrowHead", "ItalyPowerDemand", "GunPoint")
MORE_SERIES = ("UnitTest", "ACSF1")
"""Series on which settings may be tried: no result is reported for them."""


def read_idx(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, 1, h, w] and labels of MNIST or Fashion-MNIST."""
    images = np.fromfile(folder / f"{part}-images-idx3-ubyte", np.uint8)[16:]
    labels = np.fromfile(folder / f"{part}-labels-idx1-ubyte", np.uint8)[8:]
    return images.reshape(-1, 1, 28, 28), labels


def read_cifar(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, 3, 32, 32] and labels of a file of CIFAR-10."""
    rows = np.fromfile(folder / "cifar-10-batches-bin" / f"{name}.bin", np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def halved(images: np.ndarray, count: int) -> np.ndarray:
    """Return the first images as bytes at half the resolution."""
    smaller = avg_pool2d(torch.from_numpy(images[:count].copy()).float(), 2)
    return smaller.round().to(torch.uint8).numpy()


def as_bytes(images: Tensor) -> Tensor:
    """Return images in [0, 1] as bytes."""
    return (255 * images).round().to(torch.uint8)


def turned(images: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the first images, each turned by a random angle, as bytes."""
    as_floats = torch.from_numpy(images[:count].copy()).float() / 255
    return as_bytes(rotated(as_floats, 180, seed)).numpy()


def write(file: Path, x: object, y: object, x_test: object, y_test: object) -> None:
    """Write training and test data."""
    np.savez_compressed(file, x=x, y=y, x_test=x_test, y_test=y_test)  # type: ignore[arg-type]
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")


def prepared(file: Path, seed: int, count: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return standardised training and test data of a file; images of a seed are disjoint."""
    with np.load(file) as arrays:
        x, y, x_test, y_test = (torch.from_numpy(arrays[k]) for k in ("x", "y", "x_test", "y_test"))
    if x.dtype == torch.uint8:
        part = slice(seed * count, (seed + 1) * count)
        if part.stop > len(x):
            raise ValueError(f"{file} has {len(x)} training images, too few for seed {seed}.")
        x, y = x[part].float() / 255, y[part]
        x_test = x_test.float() / 255
    mean, scale = x.mean(), x.std()
    return ((x - mean) / scale, y.long()), ((x_test - mean) / scale, y_test.long())


def development(file: Path, seed: int, count: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return training and held-out data that are both from the training data of a file.

    Settings may be chosen by them. Images are those that seeds 2 and 3 of `prepared` train on, half
    for each purpose; the seed changes their order. Of series, each half of the training set.
    """
    with np.load(file) as arrays:
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    if x.dtype == torch.uint8:
        x, y = x[2 * count : 4 * count].float() / 255, y[2 * count : 4 * count]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, held_out = order[: (len(x) + 1) // 2], order[(len(x) + 1) // 2 :]
    mean, scale = x[train].mean(), x[train].std()
    x = (x - mean) / scale
    return (x[train], y[train].long()), (x[held_out], y[held_out].long())


def full_size(file: Path, count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the first training images, and the test images, in [0, 1]."""
    with np.load(file) as arrays:
        x, y, x_test, y_test = (torch.from_numpy(arrays[k]) for k in ("x", "y", "x_test", "y_test"))
    train = x[:count].float() / 255, y[:count].long()
    return train, (x_test.float() / 255, y_test.long())


def main() -> None:
    """Write the files of all sources that are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--series", type=Path)
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    x, y = digits("all")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    for name, digit in (("digits", x), ("digits-quadrant", on_canvas(x, y)[0])):
        images = as_bytes(digit)
        write(out / f"{name}.npz", images[597:], y[597:], images[:597], y[:597])
    if arguments.images:
        for name in ("mnist", "fashion-mnist"):
            (a, b), (c, d) = (read_idx(arguments.images / name, k) for k in ("train", "t10k"))
            write(out / f"{name}.npz", halved(a, POOL), b[:POOL], halved(c, TEST), d[:TEST])
            if name == "mnist":
                write(out / "mnist-28.npz", a[:2000], b[:2000], c[:TEST], d[:TEST])
                a, c = turned(a, POOL, 1), turned(c, TEST, 0)
                turned_file = out / "mnist-rotated.npz"
                write(turned_file, halved(a, POOL), b[:POOL], halved(c, TEST), d[:TEST])
        cifar = arguments.images / "cifar-10"
        (a, b), (c, d) = (read_cifar(cifar, k) for k in ("data_batch_1", "test_batch"))
        write(out / "cifar-10.npz", halved(a, POOL), b[:POOL], halved(c, TEST), d[:TEST])
        write(out / "cifar-10-32.npz", a[:2000], b[:2000], c[:TEST], d[:TEST])
    if arguments.series:
        for name in (*SERIES, *MORE_SERIES):
            train, test = load(arguments.series, name)
            write(out / f"{name}.npz", *(t.numpy() for t in (*train, *test)))


if __name__ == "__main__":
    main()
