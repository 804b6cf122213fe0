"""Folders that the Hugging Face package `datasets` saved, where it is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.data.arrays import Array, as_inputs, as_labels, check_size
from symrazor.data.batches import Tensors, refusal

MARKS = ("dataset_info.json", "dataset_dict.json")
_LABELS = ("label", "labels", "y", "target", "fine_label")
_TESTS = ("test", "validation", "valid")

Read = tuple[Tensor, Tensor | None, tuple[str, ...], Tensors | None]


def is_hub_folder(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` made this folder."""
    return any((folder / mark).is_file() for mark in MARKS)


def read_hub(folder: Path) -> Read:
    """Inputs, labels, names of the classes and test data of a saved data set.

    Of one in several parts, "train" is for training and "test" or "validation" for testing. The
    label is the column of that name, the input the image column, or the only other one, or all
    others together if they are numbers.

    Raises:
        ModuleNotFoundError: `datasets` is not installed.
        ValueError: a damaged folder, or no column that can be read.
    """
    train, test = _parts(folder)
    columns = list(train.features)
    label = next((name for name in _LABELS if name in columns), None)
    x = _inputs(train, label, folder)
    if label is None:
        return x, None, (), None
    both = [_column(part, label) for part in (train, test) if part]
    names = tuple(getattr(train.features[label], "names", None) or ())
    y, found = as_labels(np.concatenate(both), folder)  # together: text gets the same numbers
    held = None
    if test and not (names and (both[1] < 0).any()):  # a test without labels says -1
        held = (_inputs(test, label, folder), y[len(train) :])
    return x, y[: len(train)], names or found, held


def _parts(folder: Path) -> tuple[Any, Any]:
    """What to train on, and what to test on or None."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"expected the package datasets to read {folder}, got none; do: pip install datasets, "
            "or save the data as .npz"
        ) from error
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever its readers of JSON and Arrow raise
        what = f"a folder saved by datasets {datasets.__version__} or older, {folder}"
        raise refusal(what, f"{type(error).__name__}: {error}", "save it again") from error
    if not isinstance(found, datasets.DatasetDict):
        train, test = found, None
    else:
        train = found["train" if "train" in found else next(iter(found))]
        test = next((found[name] for name in _TESTS if name in found), None)
    if len(train) == 0:
        raise refusal(f"data in {folder}", "none", "save some")
    return train, None if test is train or test is None or len(test) == 0 else test


def _inputs(part: Any, label: str | None, folder: Path) -> Tensor:
    """The column of images, or those of numbers."""
    import datasets

    inputs = [name for name in part.features if name != label]
    images = [name for name in inputs if isinstance(part.features[name], datasets.Image)]
    if images:
        return _images(part[images[0]], folder)
    try:
        columns = [_column(part, name) for name in inputs]
        stacked = columns[0] if len(columns) == 1 else np.stack(columns, 1)
    except (ValueError, IndexError) as error:  # ragged; no column
        got = f"{inputs} of other lengths" if inputs else "none"
        raise refusal(f"columns of one shape in {folder}", got, "convert them") from error
    if stacked.dtype.kind not in "biuf":
        raise refusal(f"columns of numbers or images in {folder}", str(inputs), "convert them")
    return as_inputs(stacked[:, None] if stacked.ndim == 1 else stacked, folder)


def _column(part: Any, name: str) -> Array:
    """Return a column as an array of its own number type.

    The default of `with_format("numpy")` rounds float64 to float32.
    """
    leaf = part.features[name]
    while isinstance(leaf, list) or hasattr(leaf, "feature"):
        leaf = leaf[0] if isinstance(leaf, list) else leaf.feature
    wide = {"dtype": np.float64} if getattr(leaf, "dtype", None) == "float64" else {}
    return np.asarray(part.with_format("numpy", **wide)[name])


def _images(column: Any, folder: Path) -> Tensor:
    """Pictures as bytes, each decoded once."""
    pixels: list[Any] = []
    first: Any = None
    for image in column:
        if first is None:
            first = image
            grey = image.mode in ("1", "L")
            check_size(len(column) * image.width * image.height * (1 if grey else 3), folder)
        if image.size != first.size:
            got = f"{first.width} x {first.height} and {image.width} x {image.height}"
            raise refusal(f"images of one size in {folder}", got, "resize them")
        pixels.append(np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB")))
    if len({array.ndim for array in pixels}) > 1:  # some grey, some in colour
        pixels = [np.stack([p] * 3, -1) if p.ndim == 2 else p for p in pixels]
    stacked = np.stack(pixels).reshape(len(pixels), first.height, first.width, -1)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()
