"""Read files of every format back as the data that were written; recognise kinds of data."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

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


def test_csv_tables(tmp_path: Path) -> None:
    x = RNG.random((N, 3)).astype(np.float32)
    rows = [
        f"{a!r};{b!r};{'yes' if y else 'no'};{c!r}"
        for (a, b, c), y in zip(x.tolist(), LABELS % 2, strict=True)
    ]
    (tmp_path / "a.csv").write_text("a;b;label;c\n" + "\n".join(rows) + "\n")
    result = read(tmp_path / "a.csv")
    assert (result.kind, result.task, result.names) == ("vector", "classification", ("no", "yes"))
    assert torch.equal(result.x, torch.from_numpy(x))
    np.savetxt(tmp_path / "b.csv", np.c_[x, x.sum(1)], delimiter=",")
    result = read(tmp_path / "b.csv")
    assert result.task == "regression"
    assert result.y is not None
    assert torch.allclose(result.y[:, 0], torch.from_numpy(x.sum(1)).double())
    steps = ",".join(f"t{i}" for i in range(10))
    np.savetxt(
        tmp_path / "c.csv",
        np.c_[RNG.random((N, 10)), LABELS],
        delimiter=",",
        header=f"{steps},y",
        comments="",
    )
    result = read(tmp_path / "c.csv")
    assert (result.kind, result.x.shape, result.task) == ("series", (N, 1, 10), "classification")


@pytest.mark.parametrize("kind", ["series", "set", "trajectory"])
def test_csv_of_groups(kind: str, tmp_path: Path) -> None:
    """Rows in any order; ids by name; a label that is repeated."""
    values = RNG.random((N, 6, 2)).astype(np.float32)
    label = "" if kind == "trajectory" else ",label"
    rows = []
    for group in range(N):
        for t in range(6):
            a, b = values[group, t].tolist()
            rows.append(f"g{group},{t},{a!r},{b!r}" + (f",{LABELS[group]}" if label else ""))
    order = [r for r in range(len(rows)) if r % 2] + [r for r in range(len(rows)) if r % 2 == 0]
    shuffled = (
        rows
        if kind == "set"
        else sorted((rows[r] for r in order), key=lambda r: int(r[1:].split(",")[0]))
    )
    head = f"{kind},time,q,p{label}"
    (tmp_path / "a.csv").write_text("\n".join([head, *shuffled]))
    result = read(tmp_path / "a.csv")
    assert result.kind == kind
    expected = torch.from_numpy(values)
    assert torch.equal(result.x, expected.transpose(1, 2) if kind == "series" else expected)
    if kind == "trajectory":
        assert result.times is not None
        assert result.times.tolist() == [0, 1, 2, 3, 4, 5]
        assert result.y is None
    else:
        assert result.y is not None
        assert result.y.tolist() == LABELS.tolist()


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_folders_of_images(mode: str, tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (N, 5, 7, len(mode)), dtype=np.uint8)
    for number, image in enumerate(pixels):
        inner = tmp_path / f"class {number % 2}"
        inner.mkdir(exist_ok=True)
        Image.fromarray(image[:, :, 0] if mode == "L" else image).save(inner / f"{number:03}.png")
    result = read(tmp_path)
    assert result.names == ("class 0", "class 1")
    order = [*range(0, N, 2), *range(1, N, 2)]
    expected = torch.from_numpy(pixels[order]).permute(0, 3, 1, 2) / 255
    assert torch.equal(result.x, expected)
    flat = read(tmp_path / "class 0", kind="image", labelled=False)
    assert torch.equal(flat.x, expected[: N // 2])


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


def test_hugging_face_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="an optional package")
    x = RNG.random((N, 3)).astype(np.float32)
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "label": LABELS}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "hub")
    result = read(tmp_path / "hub")
    assert torch.equal(result.x, torch.from_numpy(x))
    assert result.y is not None
    assert result.y.tolist() == LABELS.tolist()


def test_hugging_face_pictures_in_parts_and_text_as_labels(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="an optional package")
    image = pytest.importorskip("PIL.Image")
    pixels = RNG.integers(0, 256, (N, 6, 7), dtype=np.uint8)
    names = ["ant", "bee", "cat"]
    columns = {"image": [image.fromarray(p) for p in pixels], "label": [names[k] for k in LABELS]}
    kinds = {"image": datasets.Image(), "label": datasets.Value("string")}
    whole = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    parts = datasets.DatasetDict({"train": whole, "test": whole.select(range(N - 5, N))})
    parts.save_to_disk(tmp_path / "hub")
    result = read(tmp_path / "hub")
    assert result.kind == "image" and result.names == ("ant", "bee", "cat")
    assert torch.equal(result.x[:, 0], torch.from_numpy(pixels) / 255)
    assert result.y is not None and result.y.tolist() == LABELS.tolist()
    assert result.test is not None and torch.equal(result.test[0], result.x[-5:])
    assert result.test[1].tolist() == LABELS[-5:].tolist()


def test_hugging_face_folders_that_are_rejected(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="an optional package")
    ragged = {"x": [[1.0, 2.0], [1.0]] * 20, "label": [0, 1] * 20}
    datasets.Dataset.from_dict(ragged).save_to_disk(tmp_path / "ragged")
    with pytest.raises(ValueError, match="must have one shape"):
        read(tmp_path / "ragged")
    text = {"text": ["a", "b"] * 20, "label": [0, 1] * 20}
    datasets.Dataset.from_dict(text).save_to_disk(tmp_path / "text")
    with pytest.raises(ValueError, match="neither numbers nor images"):
        read(tmp_path / "text")


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
