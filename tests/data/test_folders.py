"""Test the readers of folders."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from symrazor.data import read

RNG = np.random.default_rng(0)


N = 24


LABELS = np.arange(N) % 3


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
