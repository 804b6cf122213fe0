"""Batches of tensors that are already in memory, and the check that they can be used."""

from collections.abc import Iterator

import torch
from torch import Tensor

Tensors = tuple[Tensor, Tensor]


class TensorLoader:
    """A re-iterable loader of batches from two tensors that are already in memory.

    Args:
        x: Inputs, data along the first dimension.
        y: Targets, one for each input.
        batch_size: Data per batch; the last batch may be smaller.
        shuffle: Draw a new order for every pass.
        generator: Where the order comes from; the same generator state gives the same batches.
            Without one, the loader makes its own, with seed 0.
        drop_last: Leave out a last batch that is smaller than the others.
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
            raise refusal("batch_size of 1 or more", f"{batch_size}", "batch_size=128")
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.drop_last = drop_last

    @property
    def n_data(self) -> int:
        """Number of data, those that drop_last leaves out included."""
        return len(self.x)

    def __len__(self) -> int:
        full, rest = divmod(self.n_data, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Tensors]:
        order = torch.arange(self.n_data)
        if self.shuffle:
            place = self.generator.device
            order = torch.randperm(self.n_data, generator=self.generator, device=place)
        order = order.to(self.x.device)  # all at once: a copy waits for whatever a GPU has to do
        for index in order.split(self.batch_size)[: len(self)]:
            yield self.x.index_select(0, index), self.y.index_select(0, index.to(self.y.device))


def check_batch(x: Tensor, y: Tensor, where: str) -> None:
    """Refuse a batch that no evidence can be computed from, and name the culprit.

    Args:
        x: Inputs, data along the first dimension.
        y: Targets, one for each input.
        where: What the message calls this batch, for example "training data, batch 3".

    Raises:
        ValueError: If the batch is empty or sparse, the lengths differ, or a value is not finite.
    """
    check_lengths(x, y, where)
    for name, values in (("x", x), ("y", y)):
        if values.layout is not torch.strided:
            raise refusal(f"a dense {name} in {where}", str(values.layout), f"{name}.to_dense()")
        if not (values.is_floating_point() or values.is_complex()):
            continue
        bad = ~torch.isfinite(values)
        if bool(bad.any()):
            first = int(torch.nonzero(bad.reshape(len(values), -1).any(dim=1))[0, 0])
            n_nan = int(torch.isnan(values).sum())
            n_inf = int(bad.sum()) - n_nan
            got = f"{n_nan} NaN and {n_inf} infinite values, the first in sample {first}"
            raise refusal(f"finite {name} in {where}", got, "remove or repair these samples")


def check_lengths(x: Tensor, y: Tensor, where: str) -> None:
    """Refuse inputs and targets that do not pair up, or of which there are none."""
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        got = f"shapes {list(x.shape)} and {list(y.shape)}"
        raise refusal(f"x and y of the same length in {where}", got, "pass the y of these x")
    if len(x) == 0:
        raise refusal(f"at least one sample in {where}", "none", "check where the data come from")


def refusal(expected: str, got: str, do: str) -> ValueError:
    """The error to raise: one form for every message."""
    return ValueError(f"expected {expected}, got {got}; do {do}")
