"""Read batches (x, y) from any loader, limit them to a subset, and repeat a pass."""

import math
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.processes import ShardedLoader, world
from symrazor.curvature.tape import Input, map_tensors


def batches(
    loader: Iterable[Any], device: torch.device, subset: int | None = None
) -> Iterator[tuple[Input, Tensor]]:
    """Yield this process's batches on a device, at most `subset` data over all processes.

    A `ShardedLoader` yields the first `subset` data of the whole loader. Of any other loader each
    process reads its share of the subset.

    Raises:
        ValueError: the loader cannot be iterated, or its batches are not pairs (x, y).
    """
    if not isinstance(loader, Iterable):
        raise ValueError(
            f"The loader must be an iterable of batches (x, y), got {type(loader).__name__}."
        )
    if subset is not None and subset < 1:
        raise ValueError(f"subset must be at least 1, got {subset}.")
    if isinstance(loader, ReplayableBatches):
        yield from loader
        return
    process, sharded = world(), isinstance(loader, ShardedLoader)
    share = subset if sharded or subset is None else len(range(subset)[process.shard(subset)])
    remaining = math.inf if share is None else share
    for number, batch in enumerate(loader.loader if isinstance(loader, ShardedLoader) else loader):
        if remaining <= 0:
            return
        x, y = _unpack(batch)
        if remaining < len(y):
            x, y = map_tensors(x, itemgetter(slice(int(remaining)))), y[: int(remaining)]
        remaining -= len(y)
        if not sharded or number % process.size == process.rank:
            yield map_tensors(x, lambda part: part.to(device)), y.to(device)


def check_data_count(n_read: int, expected: int) -> None:
    """Check that a loader yielded the expected number of samples.

    Raises:
        ValueError: gives both numbers.
    """
    if n_read == expected:
        return
    if world().size > 1:
        raise ValueError(
            f"The loaders of all processes yielded {n_read} samples, but n_data or subset is "
            f"{expected}. Every sample must be read once, by exactly one process."
        )
    raise ValueError(
        f"The loader yielded {n_read} samples, but n_data or subset is {expected}. Set n_data to "
        "the size of the data set, or pass subset=... to scale up a part of it."
    )


class ReplayableBatches(list[tuple[Input, Tensor]]):
    """Batches of a loader, stored so that a second pass reads the same data."""


class LoaderRNGState:
    """The state of all random generators that decide the order of a loader's next pass.

    Random probes belong to the data that they were drawn for. A second pass in another order would
    differentiate another estimate than the one of the first pass.

    Args:
        loader: a torch DataLoader, a `TensorLoader`, or a wrapper with an attribute `loader`.
    """

    def __init__(self, loader: object) -> None:
        generators = [torch.default_generator, *_generators(loader)]
        self.states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Make the next pass repeat the one that began when this state was taken."""
        for generator, state in self.states:
            generator.set_state(state)


def _generators(loader: object) -> Iterator[torch.Generator]:
    """Yield the generators of a loader, of its samplers and of the loader it wraps."""
    if isinstance(generator := getattr(loader, "generator", None), torch.Generator):
        yield generator
    for name in ("loader", "batch_sampler", "sampler"):
        if (inner := getattr(loader, name, None)) is not None:
            yield from _generators(inner)


def loader_sizes(loader: Iterable[Any]) -> tuple[int, int]:
    """Return the size of a loader's data set, and the number of samples in one pass.

    The two differ if `drop_last` leaves out a remainder. A loader of unknown size (no `n_data`, no
    `sampler` with a length) is read once and counted.
    """
    size = getattr(loader, "n_data", None) or _length(getattr(loader, "sampler", None))
    if size is None:
        size = sum(len(_unpack(batch)[1]) for batch in loader)
        return size, size
    batch_size = getattr(loader, "batch_size", None)
    if getattr(loader, "drop_last", False) and batch_size:
        return size, size - size % batch_size
    return size, size


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None


def _unpack(batch: Any) -> tuple[Input, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise ValueError(
            f"The loader must give pairs (x, y) with a tensor y, got {type(batch).__name__}."
        )
    return batch[0], batch[1]
