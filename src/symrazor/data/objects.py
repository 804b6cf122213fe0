"""Convert data that other libraries hold: frames, data sets and loaders.

| object | inputs | labels |
|---|---|---|
| pandas or polars frame | its columns of numbers | y |
| Hugging Face data set | the images, or the other columns | column `label`, `y`, ... |
| torch `Dataset` with a length, `DataLoader` | first part of each sample or batch | second part |
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from symrazor.core.files import reserve
from symrazor.data.batches import FRAME_PACKAGES, as_pair, frame_values, is_frame, library_of
from symrazor.data.folders import split_contents


def as_arrays(x: Any, y: Any = None) -> tuple[Any, Any, tuple[str, ...], tuple[str, ...]]:
    """Return inputs, labels, the names of the columns, and those of the classes.

    Anything that this module does not know is returned as it is.

    Raises:
        ValueError: a column that does not hold numbers, or samples without labels.
    """
    if library_of(y) in FRAME_PACKAGES:
        y = y.to_numpy()
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if is_frame(x):
        return frame_values(x), y, tuple(map(str, x.columns)), ()
    if library_of(x) == "datasets" and hasattr(x, "features"):
        contents = split_contents(x, Path("the data set"))
        return contents.x, contents.y if y is None else y, (), contents.names
    if isinstance(x, DataLoader | Dataset) and y is None:
        return (*_samples(x), (), ())
    return x, y, (), ()


def _samples(data: Any) -> tuple[Tensor, Tensor]:
    """Return all samples of a data set or loader as two tensors."""
    if not isinstance(data, DataLoader):
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise ValueError("x must have a length and an index, or be a DataLoader.")
        data = DataLoader(data, batch_size=256)
    parts: list[tuple[Tensor, Tensor]] = []
    for batch in data:
        x, y = as_pair(batch)
        if not isinstance(x, Tensor):
            raise ValueError("Samples must be pairs (x, y) with one array as x.")
        if not parts and hasattr(data.dataset, "__len__"):
            reserve(2 * len(data) * x.nbytes, Path("the data set"))
        parts.append((x, y))
    if not parts:
        raise ValueError("The data set is empty.")
    xs, ys = zip(*parts, strict=True)
    return torch.cat(xs), torch.cat(ys)
