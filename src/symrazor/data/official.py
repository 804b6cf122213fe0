"""Read MNIST, Fashion-MNIST and CIFAR-10 from folders with the official files.

Images are float32 in [0, 1], not normalised; see `symrazor.data.transforms`.
"""

from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.data.binary_files import read_cifar, read_idx

Split = Literal["train", "test"]

_IDX_COUNT = {"train": 60_000, "test": 10_000}
_IDX_PREFIX = {"train": "train", "test": "t10k"}
_CIFAR_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_CIFAR_BATCH = 10_000

Images = tuple[Float[Tensor, "n c h w"], Int64[Tensor, "n"]]


def mnist(folder: str | Path, split: Split = "train") -> Images:
    """Read MNIST: 60,000 training and 10,000 test images, grey, 28 x 28.

    Args:
        folder: Folder with `train-images-idx3-ubyte` and the three other IDX files, with or without
            `.gz`, or with a subfolder `mnist` that has them.
        split: "train" or "test".

    Returns:
        Images [n, 1, 28, 28] in [0, 1] and labels 0 to 9, in the order of the files.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged or has another shape.
    """
    return _read_idx_split(Path(folder), "mnist", split)


def fashion_mnist(folder: str | Path, split: Split = "train") -> Images:
    """Read Fashion-MNIST from a folder or its subfolder `fashion-mnist`; otherwise as `mnist`."""
    return _read_idx_split(Path(folder), "fashion-mnist", split)


def cifar10(folder: str | Path, split: Split = "train") -> Images:
    """Read CIFAR-10: 50,000 training and 10,000 test images in colour, 32 x 32.

    Args:
        folder: Folder with the six `.bin` files of the binary version, or with a subfolder
            `cifar-10-batches-bin`, `cifar-10` or `cifar-10/cifar-10-batches-bin` that has them.
        split: "train" or "test".

    Returns:
        Images [n, 3, 32, 32] in [0, 1] and labels 0 to 9, in the order of the files.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged or has another number of images.
    """
    _check_split(split)
    subfolders = ("", "cifar-10-batches-bin", "cifar-10", "cifar-10/cifar-10-batches-bin")
    images, labels = [], []
    for name in _CIFAR_FILES[split]:
        path = _first_file([Path(folder) / subfolder / name for subfolder in subfolders])
        x, y = read_cifar(path)
        if len(y) != _CIFAR_BATCH:
            raise ValueError(
                f"{path} has {len(y):,} images instead of {_CIFAR_BATCH:,}. Download it again."
            )
        images.append(x)
        labels.append(y)
    return torch.cat(images).float().div_(255), torch.cat(labels)


def _read_idx_split(folder: Path, name: str, split: Split) -> Images:
    _check_split(split)
    arrays = []
    for content in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        file = f"{_IDX_PREFIX[split]}-{content}"
        paths = [folder / name / file, folder / file]
        path = _first_file([p.with_name(p.name + end) for p in paths for end in ("", ".gz")])
        values = read_idx(path)
        shape = [_IDX_COUNT[split], 28, 28][: values.ndim]
        if values.dtype != torch.uint8 or values.ndim not in (1, 3) or list(values.shape) != shape:
            raise ValueError(
                f"{path} holds {values.dtype} of shape {list(values.shape)}; {name} ({split}) has "
                f"bytes of shape {shape}. Download it again."
            )
        arrays.append(values)
    x, y = arrays
    if x.ndim != 3 or y.ndim != 1 or int(y.max()) > 9:
        raise ValueError(
            f"The images and labels in {folder} do not match: shapes {list(x.shape)} and "
            f"{list(y.shape)}, labels up to {int(y.max())}. Check which file is which."
        )
    return x.unsqueeze(1).float().div_(255), y.long()


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")


def _first_file(paths: list[Path]) -> Path:
    """Return the first path that is a file."""
    for path in paths:
        if path.is_file():
            return path
    tried = ", ".join(str(path) for path in paths)
    raise FileNotFoundError(f"None of these files exists: {tried}")
