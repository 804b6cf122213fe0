"""Any iterable of (x, y) batches, read as the engine needs it: on one device, cut to a subset."""

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
    """This process's batches of a loader on a device, at most `subset` data of all processes.

    Of a `processes.ShardedLoader` loader the first data count, wherever they are; of any other each
    process reads its part of the subset.

    Raises:
        ValueError: a loader that is not one, or whose batches are not pairs (x, y).
    """
    if not isinstance(loader, Iterable):
        raise ValueError(f"expected a loader of batches (x, y), got {type(loader).__name__}")
    if subset is not None and subset < 1:
        raise ValueError(f"expected a subset of at least 1 datum, got {subset}")
    if isinstance(loader, ReplayableBatches):
        yield from loader
        return
    here, shared = world(), isinstance(loader, ShardedLoader)
    own = subset if shared or subset is None else len(range(subset)[here.shard(subset)])
    left = math.inf if own is None else own
    for number, batch in enumerate(loader.loader if isinstance(loader, ShardedLoader) else loader):
        if left <= 0:
            return
        x, y = _unpack(batch)
        if left < len(y):
            x, y = map_tensors(x, itemgetter(slice(int(left)))), y[: int(left)]
        left -= len(y)
        if not shared or number % here.size == here.rank:
            yield map_tensors(x, lambda part: part.to(device)), y.to(device)


def check_data_count(seen: int, expected: int) -> None:
    """Refuse sums over another number of data than they are to stand for.

    Raises:
        ValueError: with both numbers.
    """
    if seen == expected:
        return
    several = world().size > 1
    raise ValueError(
        f"expected {expected} data from the loader{'s of all processes' if several else ''}, got "
        f"{seen}; give n_data its true size, or pass subset=... to scale a part of the data up"
        + ("; each datum has to be read by one process, once" if several else "")
    )


class ReplayableBatches(list[tuple[Input, Tensor]]):
    """What `batches` gave, to be read again as it is."""


class LoaderRNGState:
    """The order in which a loader is about to be read: that of its generators, and of torch's own.

    Probes belong to the data that they were drawn for. A second pass of a loader that shuffles
    would give them to others, and differentiate another estimate than the first one found.

    Args:
        loader: of torch, `TensorLoader`, or one inside of another as its `loader`.
    """

    def __init__(self, loader: object) -> None:
        """Note where all generators are."""
        found = [torch.default_generator, *_generators(loader)]
        self.states = [(generator, generator.get_state()) for generator in found]

    def restore(self) -> None:
        """Let the next pass be as the one that began here."""
        for generator, state in self.states:
            generator.set_state(state)


def _generators(loader: object) -> Iterator[torch.Generator]:
    """Those of a loader, of its samplers and of the loader inside of it."""
    if isinstance(own := getattr(loader, "generator", None), torch.Generator):
        yield own
    for name in ("loader", "batch_sampler", "sampler"):
        if (inner := getattr(loader, name, None)) is not None:
            yield from _generators(inner)


def loader_sizes(loader: Iterable[Any]) -> tuple[int, int]:
    """How many data a loader draws from, and how many of them one pass gives.

    Two numbers, because `drop_last` leaves a remainder out of each pass. A loader that does not
    say (no `sampler` of known length, no `n_data`) is read once and counted.
    """
    size = getattr(loader, "n_data", None) or _length(getattr(loader, "sampler", None))
    if size is None:
        size = sum(len(_unpack(batch)[1]) for batch in loader)
        return size, size
    batch_size = getattr(loader, "batch_size", None)
    if getattr(loader, "drop_last", False) and batch_size:
        return size, size - size % batch_size
    return size, size


def _length(of: Any) -> int | None:
    try:
        return len(of)
    except TypeError:
        return None


def _unpack(batch: Any) -> tuple[Input, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise ValueError(f"expected batches (x, y) from the loader, got {type(batch).__name__}")
    return batch[0], batch[1]
