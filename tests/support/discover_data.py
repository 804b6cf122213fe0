"""Small data of every kind that `discover` takes."""

import torch

from symrazor.data import Dataset, dataset

N = 60


def some_data(kind: str, task: str = "classification", n: int = N) -> Dataset:
    """Noise of some kind, and labels that depend on it."""
    shapes = {
        "image": (1, 8, 8),
        "volume": (1, 4, 4, 4),
        "series": (2, 16),
        "set": (6, 2),
        "vector": (5,),
    }
    x = torch.randn(n, *shapes[kind], generator=torch.Generator().manual_seed(0)) * 3 + 1
    size = x.flatten(1).mean(1)
    y = (size > size.median()).long() if task == "classification" else 100 + 10 * size
    return dataset(x, y, kind=kind, task=task)  # type: ignore[arg-type]
