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


def _unpack(batch: Any) -> tuple[Input, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise ValueError(f"expected batches (x, y) from the loader, got {type(batch).__name__}")
    return batch[0], batch[1]
