"""Folders that the Hugging Face package `datasets` saved, where it is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.data.arrays import check_size
from symrazor.data.batches import refusal

MARKS = ("dataset_info.json", "dataset_dict.json")
_LABELS = ("label", "labels", "y", "target", "fine_label")


def is_hub_folder(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` made this folder."""
    return any((folder / mark).is_file() for mark in MARKS)


def read_hub(folder: Path) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Inputs, labels and names of the classes of a saved data set, or of its part "train".

    The label is the column of that name, the input the image column, or the only other one, or all
    others together if they are numbers.

    Raises:
        ModuleNotFoundError: `datasets` is not installed.
        ValueError: no column that can be read.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"expected the package datasets to read {folder}, got none; do: pip install datasets, "
            "or save the data as .npz"
        ) from error
    found: Any = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        found = found["train" if "train" in found else next(iter(found))]
    columns = list(found.features)
    label = next((name for name in _LABELS if name in columns), None)
    inputs = [name for name in columns if name != label]
    images = [name for name in inputs if isinstance(found.features[name], datasets.Image)]
    if images:
        x = _images(found, images[0], folder)
    else:
        found = found.with_format("numpy")
        parts = [np.asarray(found[name]) for name in inputs]
        if not parts or any(part.dtype.kind not in "biuf" for part in parts):
            raise refusal(f"columns of numbers or images in {folder}", str(columns), "convert them")
        stacked = parts[0] if len(parts) == 1 else np.stack(parts, 1)
        x = torch.from_numpy(stacked if stacked.dtype == np.uint8 else stacked.astype(np.float32))
    if label is None:
        return x, None, ()
    y = np.asarray(found.with_format("numpy")[label])
    names = tuple(getattr(found.features[label], "names", None) or ())
    kind = np.int64 if y.dtype.kind in "biu" else np.float32
    return x, torch.from_numpy(y.astype(kind)), names


def _images(found: Any, name: str, folder: Path) -> Tensor:
    """A column of pictures as bytes."""
    sizes = {image.size for image in found[name]}
    if len(sizes) > 1:
        raise refusal(f"images of one size in {folder}", str(sorted(sizes)[:3]), "resize them")
    grey = all(image.mode in ("1", "L") for image in found[name])
    width, height = next(iter(sizes))
    check_size(len(found) * width * height * (1 if grey else 3), folder)
    mode = "L" if grey else "RGB"
    pixels = np.stack([np.asarray(image.convert(mode)) for image in found[name]])
    pixels = pixels.reshape(len(pixels), height, width, -1)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
