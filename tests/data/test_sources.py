"""Read files of every format back as the data that were written; recognise kinds of data."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from symrazor.data import dataset, read

RNG = np.random.default_rng(0)
N = 24
LABELS = np.arange(N) % 3


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "read_as"),
    [
        ((5,), np.float32, "vector", (5,)),
        ((8, 8), np.float32, "image", (1, 8, 8)),
        ((6, 9), np.uint8, "image", (1, 6, 9)),
        ((12, 2), np.float32, "set", (12, 2)),
        ((3, 40), np.float32, "series", (3, 40)),
        ((3, 10, 9), np.float32, "image", (3, 10, 9)),
        ((10, 9, 3), np.uint8, "image", (3, 10, 9)),
        ((9, 8, 8), np.float32, "volume", (1, 9, 8, 8)),
        ((2, 4, 5, 6), np.float32, "volume", (2, 4, 5, 6)),
    ],
)
def test_kinds_are_recognised(
    shape: tuple[int, ...], dtype: type, kind: str, read_as: tuple[int, ...], tmp_path: Path
) -> None:
    x = (RNG.random((N, *shape)) * 200).astype(dtype)
    np.savez(tmp_path / "data.npz", x=x, y=LABELS)
    result = read(tmp_path / "data.npz")
    assert (result.kind, result.task, result.x.shape[1:]) == (kind, "classification", read_as)
    scale = 255 if dtype is np.uint8 else 1
    assert float(result.x.sum()) == pytest.approx(
        float(x.astype(np.float64).sum()) / scale, rel=1e-5
    )
    assert result.names == ("0", "1", "2")
    as_vectors = read(tmp_path / "data.npz", kind="vector", task="regression")
    assert as_vectors.x.shape == (N, x[0].size)
    assert as_vectors.y is not None
    assert as_vectors.y.flatten().tolist() == LABELS.tolist()


def test_npz_with_test_data_names_and_kind(tmp_path: Path) -> None:
    x = RNG.random((N, 10, 4)).astype(np.float32)
    np.savez(
        tmp_path / "a.npz",
        x=x,
        y=LABELS + 1,
        x_test=x[:5],
        y_test=LABELS[:5] + 1,
        names=["-", "a", "b", "c"],
        kind="series",
    )
    result = read(tmp_path / "a.npz")
    assert result.kind == "series"
    assert result.names == ("a", "b", "c")
    assert result.test is not None
    assert torch.equal(result.test[0], torch.from_numpy(x[:5]))
    assert result.test[1].tolist() == LABELS[:5].tolist()
    assert result.describe() == "24 series of 10 x 4, 3 classes"


def test_npy_pairs_fortran_order_and_text_labels(tmp_path: Path) -> None:
    x = np.asfortranarray(RNG.random((N, 4)))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.array(["red", "blue"])[LABELS % 2])
    for path in (tmp_path, tmp_path / "x.npy"):
        result = read(path)
        assert torch.equal(result.x, torch.from_numpy(x))
        assert result.names == ("blue", "red")
        assert result.y is not None
        assert result.y.tolist() == (1 - LABELS % 2).tolist()


def test_idx_and_cifar_folders(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (N, 9, 9), dtype=np.uint8)
    for part in ("train", "t10k"):
        head = b"\0\0\x08\x03" + struct.pack(">3I", N, 9, 9)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(head + x.tobytes())
        labels = b"\0\0\x08\x01" + struct.pack(">I", N) + LABELS.astype(np.uint8).tobytes()
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    result = read(tmp_path)
    assert torch.equal(result.x, torch.from_numpy(x).unsqueeze(1) / 255)
    assert result.test is not None
    assert torch.equal(result.test[0], result.x)
    cifar = tmp_path / "cifar"
    cifar.mkdir()
    records = RNG.integers(0, 256, (N, 3073), dtype=np.uint8)
    records[:, 0] = LABELS
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        (cifar / name).write_bytes(records.tobytes())
    result = read(cifar)
    assert result.x.shape == (2 * N, 3, 32, 32)
    assert result.test is not None
    assert result.test[1].tolist() == LABELS.tolist()


def test_classes_are_numbered_and_unknown_ones_of_the_test_data_rejected() -> None:
    x = torch.rand(N, 3)
    result = dataset(x, torch.from_numpy(10 + 5 * LABELS), names=[str(i) for i in range(21)])
    assert result.names == ("10", "15", "20")
    assert result.outputs == 3
    with pytest.raises(ValueError, match="the class 7, which the training data do not have"):
        dataset(x, torch.from_numpy(LABELS), test=(x[:1], torch.tensor([7])))
    with pytest.raises(ValueError, match="classes for .* samples"):
        dataset(x, torch.arange(N))
    with pytest.raises(ValueError, match="Unknown kind 'picture'. Choose one of: image"):
        dataset(x, torch.from_numpy(LABELS), kind="picture")  # type: ignore[arg-type]
