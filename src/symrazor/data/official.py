"""Official data sets from a folder, checked to be whole: MNIST, Fashion-MNIST and CIFAR-10.

Images come out as float32 in [0, 1], not normalised; `symrazor.data.transforms` does the rest.
"""

from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.data.batches import refusal
from symrazor.data.binary_files import read_cifar, read_idx

Split = Literal["train", "test"]

_IDX_COUNT = {"train": 60_000, "test": 10_000}
_IDX_PREFIX = {"train": "train", "test": "t10k"}
_CIFAR_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_CIFAR_BATCH = 10_000

Pictures = tuple[Float[Tensor, "n c h w"], Int64[Tensor, "n"]]


def mnist(folder: str | Path, split: Split = "train") -> Pictures:
    """MNIST: 60,000 and 10,000 grey images of 28 x 28.

    Args:
        folder: Holds `train-images-idx3-ubyte` and the three other IDX files, with or without
            `.gz`, itself or in a folder `mnist`.
        split: Which part.

    Returns:
        Images [n, 1, 28, 28] in [0, 1] and labels 0 to 9, in the order of the files.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged, of another shape, or holds another number of images.
    """
    return _idx_set(Path(folder), "mnist", split)


def fashion_mnist(folder: str | Path, split: Split = "train") -> Pictures:
    """Fashion-MNIST, whose files are named like MNIST's; itself or in a folder `fashion-mnist`.

    See `mnist` for arguments, result and errors.
    """
    return _idx_set(Path(folder), "fashion-mnist", split)


def cifar10(folder: str | Path, split: Split = "train") -> Pictures:
    """CIFAR-10: 50,000 and 10,000 colour images of 32 x 32.

    Args:
        folder: Holds the six `.bin` files of the binary version, itself or in a folder
            `cifar-10-batches-bin`, `cifar-10` or both, one in the other.
        split: Which part.

    Returns:
        Images [n, 3, 32, 32] in [0, 1] and labels 0 to 9, in the order of the files.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged or holds another number of images.
    """
    _check_split(split)
    inner = ("", "cifar-10-batches-bin", "cifar-10", "cifar-10/cifar-10-batches-bin")
    images, labels = [], []
    for name in _CIFAR_FILES[split]:
        path = _find([Path(folder) / place / name for place in inner])
        x, y = read_cifar(path)
        if len(y) != _CIFAR_BATCH:
            raise refusal(f"{_CIFAR_BATCH:,} images", f"{len(y):,} in {path}", "fetch it again")
        images.append(x)
        labels.append(y)
    return torch.cat(images).float().div_(255), torch.cat(labels)


def _idx_set(folder: Path, name: str, split: Split) -> Pictures:
    _check_split(split)
    found = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        file = f"{_IDX_PREFIX[split]}-{kind}"
        places = [folder / name / file, folder / file]
        path = _find([p.with_name(p.name + end) for p in places for end in ("", ".gz")])
        values = read_idx(path)
        shape = [_IDX_COUNT[split], 28, 28][: values.ndim]
        if values.dtype != torch.uint8 or values.ndim not in (1, 3) or list(values.shape) != shape:
            got = f"{values.dtype} of shape {list(values.shape)} in {path}"
            raise refusal(f"bytes of shape {shape} ({name}, {split})", got, "fetch it again")
        found.append(values)
    x, y = found
    if x.ndim != 3 or y.ndim != 1 or int(y.max()) > 9:
        got = f"shapes {list(x.shape)} and {list(y.shape)}, labels up to {int(y.max())}"
        raise refusal(f"images and labels 0 to 9 in {folder}", got, "check which file is which")
    return x.unsqueeze(1).float().div_(255), y.long()


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise refusal("split 'train' or 'test'", repr(split), "split='train'")


def _find(places: list[Path]) -> Path:
    """The first of some paths that is a file."""
    for path in places:
        if path.is_file():
            return path
    tried = ", ".join(str(path) for path in places)
    raise FileNotFoundError(f"expected one of {tried}, got none; do point to the folder with it")
