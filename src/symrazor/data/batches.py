"""Batches of tensors in memory, and the checks that every batch must pass."""

from collections.abc import Iterator

import torch
from torch import Tensor

Tensors = tuple[Tensor, Tensor]


class TensorLoader:
    """Iterate over batches of two tensors that are already in memory, any number of times.

    Args:
        x: Inputs, samples along the first dimension.
        y: Targets, one for each input.
        batch_size: Samples per batch; the last batch may be smaller.
        shuffle: Draw a new order for every pass.
        generator: Source of the order. By default a new generator with seed 0.
        drop_last: Drop the last batch if it is smaller than the others.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
    ) -> None:
        check_lengths(x, y, "TensorLoader")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.drop_last = drop_last

    @property
    def n_data(self) -> int:
        """Number of samples, including those that drop_last drops."""
        return len(self.x)

    def __len__(self) -> int:
        full_batches, remainder = divmod(self.n_data, self.batch_size)
        return full_batches + (remainder > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Tensors]:
        order = torch.arange(self.n_data)
        if self.shuffle:
            device = self.generator.device
            order = torch.randperm(self.n_data, generator=self.generator, device=device)
        # One copy for the whole pass: each copy to a GPU waits for the work queued there.
        order = order.to(self.x.device)
        for index in order.split(self.batch_size)[: len(self)]:
            yield self.x.index_select(0, index), self.y.index_select(0, index.to(self.y.device))

    def __repr__(self) -> str:
        return f"TensorLoader({self.n_data:,} samples, batch_size={self.batch_size})"


def check_batch(x: Tensor, y: Tensor, where: str) -> None:
    """Check that a batch is dense, non-empty, paired and finite.

    Args:
        x: Inputs, samples along the first dimension.
        y: Targets, one for each input.
        where: Name of the batch in error messages, for example "training data, batch 3".

    Raises:
        ValueError: The batch fails a check; the message names the first offending sample.
    """
    check_lengths(x, y, where)
    for name, values in (("x", x), ("y", y)):
        if values.layout is not torch.strided:
            raise ValueError(
                f"{name} in {where} must be dense, got layout {values.layout}. "
                f"Use {name}.to_dense()."
            )
        if not (values.is_floating_point() or values.is_complex()):
            continue
        not_finite = ~torch.isfinite(values)
        if bool(not_finite.any()):
            first = int(torch.nonzero(not_finite.reshape(len(values), -1).any(dim=1))[0, 0])
            n_nan = int(torch.isnan(values).sum())
            n_infinite = int(not_finite.sum()) - n_nan
            raise ValueError(
                f"{name} in {where} has {n_nan} NaN and {n_infinite} infinite values, the first "
                f"in sample {first}. Remove or repair these samples."
            )


def check_lengths(x: Tensor, y: Tensor, where: str) -> None:
    """Check that x and y have the same, non-zero number of samples."""
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise ValueError(
            f"x and y in {where} must have the same number of samples, got shapes "
            f"{list(x.shape)} and {list(y.shape)}."
        )
    if len(x) == 0:
        raise ValueError(f"No samples in {where}.")
