"""Official files, the papers' transformations and the augmentation, against slow oracles."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from symrazor.data import (
    binary_files,
    cifar10,
    fashion_mnist,
    mnist,
    read_cifar,
)

# ----------------------------------------------------------------------------------------- CIFAR


def _records(n: int, labels: int = 1, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (n, labels + 3072), dtype=np.uint8)
    records[:, :labels] = rng.integers(0, 10, (n, labels))
    return records


@pytest.mark.parametrize(("classes", "head"), [(10, 1), (100, 2)])
def test_cifar_byte_by_byte(tmp_path: Path, classes: int, head: int) -> None:
    content = _records(3, head).tobytes()
    (tmp_path / "a.bin").write_bytes(content)
    x, y = read_cifar(tmp_path / "a.bin", classes)
    assert (x.shape, x.dtype, y.dtype) == ((3, 3, 32, 32), torch.uint8, torch.int64)
    size = head + 3072
    for n in range(3):
        assert y[n] == content[n * size + head - 1]
        for c, i, j in ((0, 0, 0), (0, 0, 31), (0, 1, 0), (1, 0, 0), (2, 31, 30), (2, 31, 31)):
            assert x[n, c, i, j] == content[n * size + head + 1024 * c + 32 * i + j]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, not a multiple of the record size 1 \\+ 3072"),
        (bytes(3072), "has 3072 bytes.* Download"),
        (bytes(2 * 3073 - 1), "has 6145 bytes"),
        (b"\x0a" + bytes(3072), "has the label 10; CIFAR-10 has labels 0 to 9"),
    ],
    ids=["empty", "headless", "truncated", "label"],
)
def test_damaged_cifar_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_cifar(tmp_path / "a.bin")


def test_cifar_of_other_classes_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="classes must be 10 or 100, got 20"):
        read_cifar(tmp_path / "a.bin", 20)


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin", "cifar-10/cifar-10-batches-bin"])
def test_cifar_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    monkeypatch.setattr(binary_files, "_CIFAR_BATCH", 4)
    folder = tmp_path / inner
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        (folder / name).write_bytes(_records(4, seed=seed).tobytes())
    x, y = cifar10(tmp_path)
    assert (x.shape, x.dtype) == ((20, 3, 32, 32), torch.float32)
    for batch in range(5):  # in the order of the files
        raw = _records(4, seed=batch)
        assert y[4 * batch : 4 * batch + 4].tolist() == raw[:, 0].tolist()
        expected = torch.from_numpy(raw[:, 1:].reshape(4, 3, 32, 32)).float() / 255
        assert torch.equal(x[4 * batch : 4 * batch + 4], expected)
    assert cifar10(tmp_path, "test")[1].tolist() == _records(4, seed=5)[:, 0].tolist()
    (folder / "data_batch_3.bin").write_bytes(_records(3).tobytes())
    with pytest.raises(ValueError, match="data_batch_3.bin has 3 images instead of 4"):
        cifar10(tmp_path)
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(FileNotFoundError, match="None of these files exists: .*data_batch_2.bin"):
        cifar10(tmp_path)


# ----------------------------------------------------------------------------------------- MNIST


def _idx(values: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.tobytes()


def _idx_folder(folder: Path, n: int = 6, zipped: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "t10k"):
        arrays[f"{split}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"{split}-labels-idx1-ubyte"] = rng.integers(0, 10, n, dtype=np.uint8)
    for name, values in arrays.items():
        content = _idx(values)
        file = folder / (f"{name}.gz" if zipped else name)
        file.write_bytes(gzip.compress(content) if zipped else content)
    return arrays


@pytest.fixture
def six(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary_files, "_IDX_COUNT", {"train": 6, "test": 6})


@pytest.mark.usefixtures("six")
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("read", "name"), [(mnist, "mnist"), (fashion_mnist, "fashion-mnist")])
def test_mnist_folder(tmp_path: Path, read: Callable, name: str, zipped: bool) -> None:
    for folder in (tmp_path / "a", tmp_path / "b" / name):
        arrays = _idx_folder(folder, zipped=zipped)
    for place in (tmp_path / "a", tmp_path / "b"):
        for split, prefix in (("train", "train"), ("test", "t10k")):
            x, y = read(place, split)
            images = arrays[f"{prefix}-images-idx3-ubyte"]
            assert (x.shape, x.dtype, y.dtype) == ((6, 1, 28, 28), torch.float32, torch.int64)
            assert torch.equal(x[:, 0], torch.from_numpy(images).float() / 255)
            assert y.tolist() == arrays[f"{prefix}-labels-idx1-ubyte"].tolist()


@pytest.mark.usefixtures("six")
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-images-idx3-ubyte", _idx(np.zeros((5, 28, 28), np.uint8)), r"shape \[6, 28, 28\]"),
        ("train-images-idx3-ubyte", _idx(np.zeros((6, 8, 8), np.uint8)), r"holds .* \[6, 8, 8\]"),
        ("train-images-idx3-ubyte", _idx(np.zeros(6, np.uint8)), "Check which file is which"),
        ("train-labels-idx1-ubyte", _idx(np.full(6, 10, np.uint8)), "labels up to 10"),
        (
            "train-labels-idx1-ubyte",
            _idx(np.zeros(6, np.uint8))[:-1],
            "6 bytes of elements",
        ),
        ("train-labels-idx1-ubyte", b"PK\3\4....", "not an IDX file"),
    ],
    ids=["fewer", "smaller", "labels for images", "label 10", "truncated", "magic"],
)
def test_damaged_mnist_is_rejected(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    _idx_folder(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        mnist(tmp_path)


def test_missing_files_and_unknown_splits(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mnist/train-images-idx3-ubyte.gz"):
        mnist(tmp_path)
    for read in (mnist, cifar10):
        with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'valid'"):
            read(tmp_path, "valid")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ transforms


# ---------------------------------------------------------------------------------- augmentation
