"""Trajectories: which quantities are conserved?"""

import importlib
from typing import Any

import torch

from symrazor.data import Dataset
from symrazor.discover.run import Options


def discover(data: Dataset, options: Options) -> Any:
    """What `symrazor.dynamics.discover` finds: an object with `verdict` and `to_dict()`.

    Raises:
        ValueError: an odd number of coordinates, or an installation without dynamics.
    """
    if data.x.shape[2] % 2:
        raise ValueError(
            f"expected an even number of coordinates (positions, then momenta) in {data.source}, "
            f"got {data.x.shape[2]}"
        )
    times = data.times
    if times is None:
        times = torch.arange(data.x.shape[1], dtype=torch.float32)
    try:
        dynamics: Any = importlib.import_module("symrazor.dynamics")
        find = dynamics.discover
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"expected data of another kind in {data.source}, got trajectories, which this "
            "version cannot learn from yet; do --kind series with labels"
        ) from error
    return find(
        data.x, times, minutes=options.minutes, seed=options.seed, progress=options.progress
    )
