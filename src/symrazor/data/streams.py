"""Read training data batch by batch, from any data set with a length, for data beyond memory.

`fit` works with a pair of tensors. `Samples` reads a data set through torch's `DataLoader`, and
`Column` stands in for one of the two tensors: it has a length, a shape and a dtype, and an index
reads the samples at that index. Only the requested samples are in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from symrazor.data.batches import Tensors, as_pair
from symrazor.data.datasets import Dataset as LabelledData
from symrazor.data.shapes import as_numbers

Index = slice | int | Tensor


class Samples:
    """Pairs (x, y) of a data set, read by their numbers.

    Args:
        dataset: a data set with a length whose samples are pairs (x, y), or mappings with labels.
        device: device to which batches are moved.
        collate: function that joins samples to a batch; None for torch's default.
        workers: processes that read ahead.
    """

    def __init__(
        self,
        dataset: "Dataset[Any]",
        device: torch.device,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                "fit shuffles the data, so that a data set needs a length and an index. Use Razor "
                "in a training loop of your own for an IterableDataset."
            )
        self.dataset, self.device, self.collate, self.workers = dataset, device, collate, workers

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Tensors]:
        """Yield the samples with these numbers, batch by batch."""
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=[index.tolist() for index in order],
            collate_fn=self.collate,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
        )
        for batch in loader:
            x, y = as_pair(batch)
            if not isinstance(x, Tensor):
                raise ValueError(
                    f"fit needs inputs that are one tensor, got {type(x).__name__}. Use Razor in a "
                    "training loop of your own for models with several inputs."
                )
            yield x.to(self.device), y.to(self.device)

    def read(self, index: Tensor) -> Tensors:
        """Return the samples with these numbers."""
        return next(self.batches([index]))

    @cached_property
    def first(self) -> Tensors:
        """The first sample, as a batch."""
        x, y = self.read(torch.zeros(1, dtype=torch.long))
        return x, y


class Column:
    """Inputs or labels of `Samples`; an index reads them.

    Args:
        samples: the data.
        number: 0 for inputs, 1 for labels.
    """

    def __init__(self, samples: Samples, number: int) -> None:
        self.samples, self.number = samples, number

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def device(self) -> torch.device:
        """Device of what is read."""
        return self.samples.device

    @property
    def is_cuda(self) -> bool:
        """Whether it is read to a GPU."""
        return self.device.type == "cuda"

    @property
    def shape(self) -> torch.Size:
        """Shape of all samples together."""
        return torch.Size([len(self), *self.samples.first[self.number].shape[1:]])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        return self.samples.first[self.number].dtype

    def is_floating_point(self) -> bool:
        """Return whether the numbers are real."""
        return self.samples.first[self.number].is_floating_point()

    def __getitem__(self, index: Index) -> Tensor:
        if isinstance(index, int):
            return self[slice(index, index + 1)][0]
        if isinstance(index, slice):
            index = torch.arange(*index.indices(len(self)))
        if not len(index):
            return self.samples.first[self.number][:0]
        return self.samples.read(index.cpu())[self.number]


class ArrayRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of two NumPy arrays, for example memory-mapped files.

    Args:
        x: inputs.
        y: labels.
    """

    def __init__(self, x: "np.ndarray[Any, Any]", y: "np.ndarray[Any, Any]") -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several samples by one access to each array."""
        x, y = (torch.as_tensor(np.ascontiguousarray(part[numbers])) for part in (self.x, self.y))
        return list(zip(x, y, strict=True))

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([number])[0]


class ConvertedRows(Dataset[tuple[Tensor, Tensor]]):
    """Samples of labelled data, converted to float32 or float64 when they are read.

    Args:
        data: labelled data.
    """

    def __init__(self, data: LabelledData) -> None:
        (self.x, self.y), self.kind = data.labelled, data.kind

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several samples by one access to each tensor."""
        index = torch.tensor(numbers)
        return list(zip(as_numbers(self.x[index], self.kind), self.y[index], strict=True))

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([number])[0]


def as_samples(data: object, device: torch.device) -> Samples | None:
    """Return a DataLoader, a data set or memory-mapped arrays as samples; None for other data."""
    if isinstance(data, LabelledData):
        return Samples(ConvertedRows(data), device)
    if isinstance(data, DataLoader):
        return Samples(data.dataset, device, data.collate_fn, data.num_workers)
    if isinstance(data, (tuple, list)):
        if len(data) == 2 and isinstance(data[0], np.memmap):
            return Samples(ArrayRows(data[0], np.asarray(data[1])), device)
        return None
    if isinstance(data, Dataset) or (
        hasattr(data, "__getitem__") and hasattr(data, "column_names")
    ):
        return Samples(data, device)  # type: ignore[arg-type]
    return None
