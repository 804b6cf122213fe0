"""Read and generate data.

All readers return a `Dataset` or a pair (x, y) of tensors with the samples along the first
dimension. Numbers stay float64 unless float32 represents them exactly; they are rounded only after
standardisation. Random functions take a seed and never touch the global random state. May import:
`core`.
"""

from symrazor.data.batches import TensorLoader, Tensors, check_batch
from symrazor.data.binary_files import (
    cifar10,
    fashion_mnist,
    mnist,
    read_cifar,
    read_idx,
    read_npz,
)
from symrazor.data.datasets import Dataset, dataset
from symrazor.data.embedded import digits, on_canvas, rings
from symrazor.data.sources import read
from symrazor.data.transforms import (
    flip_and_crop,
    normalised,
    quadrants,
    resized,
    rotated,
    scaled,
    translated,
)

__all__ = [
    "Dataset",
    "TensorLoader",
    "Tensors",
    "check_batch",
    "cifar10",
    "dataset",
    "digits",
    "fashion_mnist",
    "flip_and_crop",
    "mnist",
    "normalised",
    "on_canvas",
    "quadrants",
    "read",
    "read_cifar",
    "read_idx",
    "read_npz",
    "resized",
    "rings",
    "rotated",
    "scaled",
    "translated",
]
