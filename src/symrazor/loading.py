"""Any iterable of (x, y) batches, read as the engine needs it: on one device, cut to a subset."""

import math
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from symrazor.curvature.tape import Input, each


def batches(
    loader: Iterable[Any], device: torch.device, subset: int | None = None
) -> Iterator[tuple[Input, Tensor]]:
    """Batches of a loader on a device, at most `subset` data in all.

    Raises:
        ValueError: a loader that is not one, or whose batches are not pairs (x, y).
    """
    if not isinstance(loader, Iterable):
        raise ValueError(f"expected a loader of batches (x, y), got {type(loader).__name__}")
    if subset is not None and subset < 1:
        raise ValueError(f"expected a subset of at least 1 datum, got {subset}")
    left = math.inf if subset is None else subset
    for batch in loader:
        x, y = _unpack(batch)
        if left < len(y):
            x, y = each(x, itemgetter(slice(int(left)))), y[: int(left)]
        yield each(x, lambda part: part.to(device)), y.to(device)
        left -= len(y)
        if left <= 0:
            return


def sizes(loader: Iterable[Any]) -> tuple[int, int]:
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
