"""Convert arrays, and objects of other libraries that hold data, to tensors; standardise them.

| object | inputs | labels |
|---|---|---|
| pandas or polars frame | its columns of numbers | y |
| Hugging Face data set | the images, or the other columns | column `label`, `y`, ... |
| torch `Dataset` with a length, `DataLoader` | first part of each sample or batch | second part |
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from symrazor.core.files import reserve
from symrazor.data.batches import (
    FRAME_PACKAGES,
    LARGE_BYTES,
    Tensors,
    as_pair,
    chunks,
    is_frame,
    library_of,
)
from symrazor.data.categories import encode, frame_columns, is_missing, stack
from symrazor.data.datasets import Dataset

Array = np.ndarray[Any, np.dtype[Any]]
LABEL_COLUMNS = ("label", "labels", "y", "target", "fine_label")
"""Columns of a Hugging Face data set that hold labels, in order of preference."""
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


def labelled_only(contents: FileContents, source: str | Path) -> FileContents:
    """Return the samples that have a label, with a warning if others are left out.

    A label is missing if it is NaN, of several targets if one of them is.
    """
    if contents.y is None or not contents.y.is_floating_point():
        return contents
    if len(contents.x) != len(contents.y) or len(contents.y) == 0:  # an error later
        return contents
    reserve(len(contents.y), source)  # an array [2^53, 0] takes no memory, but a flag per row does
    is_known = ~contents.y.isnan().reshape(len(contents.y), -1).any(1)
    if bool(is_known.all()):
        return contents
    if not bool(is_known.any()):
        raise ValueError(f"All labels in {source} are missing. Check the label column.")
    warnings.warn(
        f"{source}: {int((~is_known).sum()):,} of {len(is_known):,} samples have no label and are "
        "left out.",
        stacklevel=3,
    )
    y = contents.y[is_known]
    reserve(contents.x.nbytes, source)
    kept = tuple(
        name for name, known in zip(contents.ids, is_known.tolist(), strict=False) if known
    )
    return replace(
        contents,
        x=contents.x[is_known],
        y=y.long() if contents.names else y,
        ids=kept,
        together=None if contents.together is None else contents.together[is_known],
    )


def label_numbers(fields: Sequence[str | None]) -> tuple[Tensor, tuple[str, ...]]:
    """Return the class of each text and the names of the classes; NaN where there is no text."""
    is_known = np.array([field is not None for field in fields])
    names, index = np.unique([field for field in fields if field is not None], return_inverse=True)
    numbers = np.full(len(fields), np.nan)
    numbers[is_known] = index
    return torch.from_numpy(numbers), tuple(names.tolist())


def as_labels(values: Array, source: str | Path) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels as a tensor with the class names; text becomes classes in sorted order.

    Labels that are missing are NaN: those are left out later (`labelled_only`).
    """
    if values.dtype.kind == "O" and values.ndim == 1:
        return label_numbers([None if is_missing(v) else str(v) for v in values.tolist()])
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
    is rounded before the data are centred. Large arrays keep their type, see `LARGE_BYTES`.
    """
    if values.dtype.kind not in NUMBER_KINDS:
        raise ValueError(f"x in {source} must be numbers, got type {values.dtype}.")
    is_exact = np.can_cast(values.dtype, np.float32)
    has_tensor = values.dtype.kind in "bif" and values.dtype.isnative and values.itemsize <= 8
    is_kept = values.dtype == np.uint8 or (has_tensor and values.nbytes >= LARGE_BYTES)
    dtype = values.dtype if is_kept else np.float32 if is_exact else np.float64
    if values.dtype != dtype or not values.flags.c_contiguous:
        reserve(values.size * np.dtype(dtype).itemsize, source)
    return torch.from_numpy(np.require(values, dtype, ["C", "W"]))


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
        columns = encode(frame_columns(x))
        return stack(list(columns.values()), tuple(columns)), y, tuple(columns), ()
    if library_of(x) == "datasets" and hasattr(x, "features"):
        contents = split_contents(x, Path("the data set"))
        return contents.x, contents.y if y is None else y, (), contents.names
    if isinstance(x, DataLoader | TorchDataset) and y is None:
        return (*_samples(x), (), ())
    return x, y, (), ()


def _samples(data: Any) -> tuple[Tensor, Tensor]:
    """Return all samples of a data set or loader as two tensors."""
    if not isinstance(data, DataLoader):
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise ValueError("x must have a length and an index, or be a DataLoader.")
        data = DataLoader(data, batch_size=256)
    parts: list[tuple[Tensor, Tensor]] = []
    for x, y in map(as_pair, data):
        if not isinstance(x, Tensor):
            raise ValueError("Samples must be pairs (x, y) with one array as x.")
        if not parts and hasattr(data.dataset, "__len__"):
            reserve(2 * len(data) * x.nbytes, Path("the data set"))
        parts.append((x, y))
    if not parts:
        raise ValueError("The data set is empty.")
    xs, ys = zip(*parts, strict=True)
    return torch.cat(xs), torch.cat(ys)


def split_contents(train: Any, folder: Path, test: Any = None) -> FileContents:
    """Return the contents of a training split of Hugging Face, and of its test split if given."""
    label = next((name for name in LABEL_COLUMNS if name in train.features), None)
    x = _read_inputs(train, label, folder)
    if label is None:
        return FileContents(x)
    columns = [_read_column(split, label) for split in (train, test) if split]
    names = tuple(getattr(train.features[label], "names", None) or ())
    # Both splits together, so that text gets the same numbers in both.
    y, text_names = as_labels(np.concatenate(columns), folder)
    test_data = None
    has_test_labels = not (names and (columns[-1] < 0).any())  # -1 marks a missing label
    if test and has_test_labels:
        test_data = (_read_inputs(test, label, folder), y[len(train) :])
    return FileContents(x, y[: len(train)], names or text_names, test=test_data)


def _read_inputs(split: Any, label: str | None, folder: Path) -> Tensor:
    import datasets

    names = [name for name in split.features if name != label]
    images = [name for name in names if isinstance(split.features[name], datasets.Image)]
    if images:
        return _read_images(split[images[0]], folder)
    try:
        columns = [_read_column(split, name) for name in names]
        values = columns[0] if len(columns) == 1 else np.stack(columns, 1)
    except (ValueError, IndexError) as error:
        problem = f"{names} have different lengths" if names else "there are none"
        raise ValueError(f"The columns in {folder} must have one shape: {problem}.") from error
    if values.dtype.kind not in "biuf":
        raise ValueError(f"The columns {names} in {folder} are neither numbers nor images.")
    return as_inputs(values[:, None] if values.ndim == 1 else values, folder)


def _read_column(split: Any, name: str) -> Array:
    """Return a column with its own number type.

    The default of `with_format("numpy")` rounds float64 to float32.
    """
    feature = split.features[name]
    while isinstance(feature, list) or hasattr(feature, "feature"):
        feature = feature[0] if isinstance(feature, list) else feature.feature
    is_double = getattr(feature, "dtype", None) == "float64"
    options = {"dtype": np.float64} if is_double else {}
    return np.asarray(split.with_format("numpy", **options)[name])


def _read_images(column: Any, folder: Path) -> Tensor:
    pixels: list[Any] = []
    first: Any = None
    for image in column:
        if first is None:
            first = image
            channels = 1 if image.mode in ("1", "L") else 3
            reserve(2 * len(column) * image.width * image.height * channels, folder)
        if image.size != first.size:
            raise ValueError(
                f"Images in {folder} must have one size, got {first.width} x {first.height} and "
                f"{image.width} x {image.height}. Resize them."
            )
        pixels.append(np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB")))
    if len({array.ndim for array in pixels}) > 1:  # some grey, some in colour
        pixels = [np.stack([p] * 3, -1) if p.ndim == 2 else p for p in pixels]
    stacked = np.stack(pixels).reshape(len(pixels), first.height, first.width, -1)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


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
    scale, target_scale = (torch.where(s > 0, s, 1.0) for s in (scale, target_scale))
    return Preparation(mean, scale, target_mean, target_scale, data.kind == "set")


def _column_names(data: Dataset, count: int) -> list[str]:
    if len(data.columns) == count:
        return [f"column {name!r}" for name in data.columns]
    if count == 1:
        return ["x"]
    return [f"x[:, :, {k}]" if data.kind == "set" else f"x[:, {k}]" for k in range(count)]
