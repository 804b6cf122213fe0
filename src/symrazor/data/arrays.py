"""Convert arrays to tensors, and standardise them in float64.

A warning names columns whose variation is lost to the rounding of their number type.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.core.files import reserve
from symrazor.data.batches import Tensors, chunks
from symrazor.data.datasets import Dataset

Array = np.ndarray[Any, np.dtype[Any]]
NUMBER_KINDS, TEXT_KINDS = "biuf", "US"
"""Kinds of NumPy types."""
MIN_LEVELS = 32
"""Smallest spread of a column, in units of the gap between neighbouring numbers at its mean. With
32 gaps, rounding contributes 1 % of the spread."""
NAMED_COLUMNS = 5
"""Columns that a warning names."""


@dataclass(frozen=True)
class FileContents:
    """Arrays of a file, before kind and task are recognised; the fields are those of `Dataset`.

    `target` is the name of the column of labels, `id_name` that of `ids`, which name the samples.
    """

    x: Tensor
    y: Tensor | None = None
    names: tuple[str, ...] = ()
    kind: str | None = None
    times: Tensor | None = None
    test: Tensors | None = None
    columns: tuple[str, ...] = ()
    target: str | None = None
    ids: tuple[str, ...] = ()
    id_name: str = ""
    together: Tensor | None = None


def as_labels(values: Array, source: str | Path) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels as a tensor with the class names; text becomes classes in sorted order."""
    if values.dtype.kind == "S":
        reserve(4 * values.nbytes, source)
        values = np.char.decode(values, "utf-8")
    reserve(2 * (values.nbytes if values.dtype.kind == "U" else 8 * values.size), source)
    if values.dtype.kind == "U":
        names, index = np.unique(values, return_inverse=True)
        return torch.from_numpy(index.reshape(values.shape).astype(np.int64)), tuple(names.tolist())
    if values.dtype.kind not in NUMBER_KINDS:
        raise ValueError(f"y in {source} must be numbers or text, got type {values.dtype}.")
    dtype = np.int64 if values.dtype.kind in "biu" else np.float64
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise ValueError(
            f"y in {source} has integers above 2^63 - 1. Number the classes 0, 1, ..., or save "
            "them as text."
        )
    if values.dtype.kind == "f" and values.dtype.itemsize > 8:
        narrow = values.astype(np.float64)
        if not np.array_equal(narrow.astype(values.dtype), values, equal_nan=True):
            raise ValueError(f"y in {source} loses digits as float64. Save it as float64.")
    return torch.from_numpy(values.astype(dtype)), ()


def as_both_labels(
    values: Array, test: Array, source: str | Path
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Return training and test labels; text is numbered over both together."""
    if values.dtype.kind not in TEXT_KINDS and test.dtype.kind not in TEXT_KINDS:
        y, names = as_labels(values, source)
        return y, as_labels(test, source)[0], names
    if (values.dtype.kind in TEXT_KINDS) != (test.dtype.kind in TEXT_KINDS):
        raise ValueError(
            f"Training and test labels in {source} have different types, {values.dtype} and "
            f"{test.dtype}. Convert the test labels."
        )
    both, names = as_labels(np.concatenate([values.reshape(-1), test.reshape(-1)]), source)
    return both[: values.size], both[values.size :], names


def as_inputs(values: Array, source: str | Path) -> Tensor:
    """Return inputs as a tensor: bytes stay bytes, other numbers become float32 or float64.

    The type is float32 if that represents every value of the array's type exactly, so that nothing
    is rounded before the data are centred.
    """
    if values.dtype.kind not in NUMBER_KINDS:
        raise ValueError(f"x in {source} must be numbers, got type {values.dtype}.")
    is_exact = np.can_cast(values.dtype, np.float32)
    dtype = values.dtype if values.dtype == np.uint8 else np.float32 if is_exact else np.float64
    if values.dtype != dtype or not values.flags.c_contiguous:
        reserve(values.size * np.dtype(dtype).itemsize, source)
    return torch.from_numpy(np.require(values, dtype, ["C", "W"]))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation in float64, over all dimensions of x but the second.

    The mean is corrected by the mean of the residuals: it is then exact for a constant column,
    whose standard deviation is 0 whatever its value.
    """
    axes = [0, *range(2, x.ndim)]
    count = x.numel() / x.shape[1]
    shape = (-1, *[1] * (x.ndim - 2))
    mean = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(2):
        centre = mean.reshape(shape)
        mean = mean + sum(((part.double() - centre) / count).sum(axes) for part in chunks(x))
    centre = mean.reshape(shape)
    largest = torch.zeros_like(mean)
    for part in chunks(x):
        largest = torch.maximum(largest, (part.double() - centre).abs().amax(axes))
    unit = torch.where(largest > 0, largest, 1.0)  # squares neither overflow nor underflow
    residuals = ((part.double() - centre) / unit.reshape(shape) for part in chunks(x))
    variance = sum((part.square() / count).sum(axes) for part in residuals)
    return mean, unit * torch.as_tensor(variance).sqrt()


def warn_if_coarse(
    mean: Tensor, spread: Tensor, dtype: torch.dtype, names: Sequence[str], source: str
) -> None:
    """Warn about columns, not constant, whose variation is lost to rounding.

    Mean and spread (the size of the variation) of each column are float64; dtype is the number
    type of the columns. The message names them and the source of the data.
    """
    if not dtype.is_floating_point:
        return
    gap = torch.finfo(dtype).eps * mean.abs()
    coarse = ((spread > 0) & (spread < MIN_LEVELS * gap)).nonzero().flatten().tolist()
    if not coarse:
        return
    listed = [
        f"{names[k]} (spread {spread[k]:.3g} around {mean[k]:.6g}, resolution {gap[k]:.3g})"
        for k in coarse[:NAMED_COLUMNS]
    ]
    more = f" and {len(coarse) - NAMED_COLUMNS} more" if len(coarse) > NAMED_COLUMNS else ""
    name = str(dtype).removeprefix("torch.")
    action = "Subtract" if dtype == torch.float64 else "Store the values as float64, or subtract"
    warnings.warn(
        f"{source}: {name} rounds away the variation of {', '.join(listed)}{more}. "
        f"{action} a constant near the mean before storing them.",
        stacklevel=3,
    )


@dataclass(frozen=True)
class Preparation:
    """Standardise each input channel and each regression target to mean 0 and variance 1.

    All constants are float64. Data are centred and scaled in float64 and then rounded to float32.

    Args:
        mean: mean of each channel (or feature) over samples and positions; a single one for all
            features of a vector that groups permute.
        scale: standard deviation of each channel, 1 instead of 0.
        target_mean: mean of each target; 0 for classes.
        target_scale: standard deviation of each target; 1 for classes.
        points: whether inputs [n, points, features] are transposed to [n, features, points].
    """

    mean: Tensor
    scale: Tensor
    target_mean: Tensor
    target_scale: Tensor
    points: bool = False

    def inputs(self, x: Tensor) -> Tensor:
        """Return standardised inputs in float32, converted in chunks to save memory."""
        x = x.transpose(1, 2) if self.points else x
        shape = (-1, *[1] * (x.ndim - 2))
        mean, scale = self.mean.reshape(shape), self.scale.reshape(shape)
        standardised = torch.empty(x.shape, dtype=torch.float32)
        for source, target in zip(chunks(x), chunks(standardised), strict=True):
            target.copy_((source.double() - mean) / scale)
        return standardised

    def targets(self, y: Tensor) -> Tensor:
        """Return standardised targets in float32; class labels are unchanged."""
        if not y.is_floating_point():
            return y
        return ((y.double() - self.target_mean) / self.target_scale).float()

    def data(self, data: Tensors) -> Tensors:
        """Return standardised inputs and targets."""
        return self.inputs(data[0]), self.targets(data[1])


def prepare(data: Dataset, same_scale: bool = False, centred: bool = True) -> Preparation:
    """Return means and scales of the training data; warn about columns that are rounded away.

    With `same_scale`, the features of a vector share one scale, because groups mix them. Without
    `centred`, inputs are only scaled, because matrices act about the origin.
    """
    x = data.x.transpose(1, 2) if data.kind == "set" else data.x
    x = x.unsqueeze(1) if same_scale and data.kind == "vector" else x
    mean, scale = moments(x)
    warn_if_coarse(mean, scale, x.dtype, _column_names(data, len(mean)), data.source)
    if not centred:
        mean, scale = torch.zeros_like(mean), (mean.square() + scale.square()).sqrt()
    target_mean, target_scale = torch.zeros(1).double(), torch.ones(1).double()
    if data.task == "regression" and data.y is not None:
        target_mean, target_scale = moments(data.y)
        names = [f"y[:, {k}]" for k in range(len(target_mean))]
        warn_if_coarse(target_mean, target_scale, data.y.dtype, names, data.source)
    points = data.kind == "set"
    return Preparation(mean, _positive(scale), target_mean, _positive(target_scale), points)


def _column_names(data: Dataset, count: int) -> list[str]:
    if len(data.columns) == count:
        return [f"column {name!r}" for name in data.columns]
    if count == 1:
        return ["x"]
    return [f"x[:, :, {k}]" if data.kind == "set" else f"x[:, {k}]" for k in range(count)]


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
