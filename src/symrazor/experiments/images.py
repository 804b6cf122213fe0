"""Load the images of the experiments: official data sets, or the embedded digits."""

from collections.abc import Callable

from torch import Tensor

from symrazor.data import Tensors, cifar10, digits, fashion_mnist, mnist, resized
from symrazor.experiments.options import OfOfficialData

Images = tuple[Tensors, Tensors]
"""Training and test data: images and labels of each."""

READERS = {
    "mnist": ("MNIST", mnist),
    "fashion-mnist": ("Fashion-MNIST", fashion_mnist),
    "cifar-10": ("CIFAR-10", cifar10),
}


def official(name: str, options: OfOfficialData) -> Images:
    """Return training and test images of an official data set.

    Raises:
        ValueError: No folder is given.
    """
    title, read = READERS[name]
    if options.data is None:
        raise ValueError(f"No data. Use --data DIR with the files of {title}, or --small.")
    return read(options.data, "train"), read(options.data, "test")


def embedded(size: int = 8) -> Images:
    """Return training and test images of the embedded digits, resized from 8 x 8 if needed."""
    sets = digits("train"), digits("test")
    return sets if size == 8 else transformed(sets, lambda x, _: resized(x, size))


def data_seeds(seed: int) -> tuple[int, int]:
    """Return the seeds of the transformations of training and test images; no two are equal."""
    return 2 * seed + 1, 2 * seed


def transformed(
    sets: Images, change: Callable[[Tensor, int], Tensor], seeds: tuple[int, int] = (1, 0)
) -> Images:
    """Apply a function of (images, seed) to training and test images, once for all."""
    train, test = ((change(x, seed), y) for (x, y), seed in zip(sets, seeds, strict=True))
    return train, test


def validation_images(train: Tensors) -> Images:
    """Return training images without the last sixth, and the last sixth."""
    (x, y), count = train, len(train[1]) - len(train[1]) // 6
    return (x[:count], y[:count]), (x[count:], y[count:])


def on_device(sets: Images, device: str) -> Images:
    """Move training and test data to a device."""
    (x, y), (x_test, y_test) = sets
    return (x.to(device), y.to(device)), (x_test.to(device), y_test.to(device))
