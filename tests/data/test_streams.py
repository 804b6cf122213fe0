"""Train on data that are read batch by batch, and compare with the same data in memory."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import symrazor as sr
from symrazor.data.streams import Column, Samples


def _data(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0)


class Counting(TensorDataset):
    """A data set that counts how many samples were read."""

    n_read = 0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.n_read += 1
        return super().__getitem__(index)


class Named(Dataset[Mapping[str, Any]]):
    """Rows with names, as data sets of Hugging Face have them."""

    column_names = ("pixel_values", "label")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"pixel_values": self.x[index], "label": int(self.y[index])}


def _arrays(x: Tensor, y: Tensor, folder: Path) -> tuple[Any, Any]:
    np.save(folder / "x.npy", x.numpy())
    return np.load(folder / "x.npy", mmap_mode="r"), y.numpy()


@pytest.mark.parametrize("kind", ["arrays", "mapped", "loader", "dataset", "named"])
def test_fit_gives_the_numbers_of_tensors_in_memory(kind: str, tmp_path: Path) -> None:
    x, y = _data()
    sources = {
        "arrays": (x.numpy(), y.numpy()),
        "mapped": _arrays(x, y, tmp_path),
        "loader": DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True),
        "dataset": TensorDataset(x, y),
        "named": Named(x, y),
    }
    fits = []
    for data in ((x, y), sources[kind]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        fits.append(
            sr.fit(model, data, epochs=3, batch_size=16, every=1, test=data, progress=False)
        )
    expected, got = fits
    assert isinstance(got.data.x, Tensor) == (kind == "arrays")
    assert float(got.evidence.log_evidence) == pytest.approx(
        float(expected.evidence.log_evidence), rel=1e-6
    )
    for record, reference in zip(got.history, expected.history, strict=True):
        assert record["nll"] == pytest.approx(reference["nll"], rel=1e-5)
        assert record["test_accuracy"] == reference["test_accuracy"]
    assert got.predict(x).mean.shape == (40, 3)
    assert got.report(tmp_path / "report.html").exists()


def test_a_run_on_a_stream_continues_from_its_checkpoint(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 3)

    options = {"epochs": 4, "batch_size": 16, "save_every": 2, "progress": False}
    whole = sr.fit(model(), TensorDataset(*_data()), save=tmp_path / "a", **options)
    resumed = sr.fit(model(), TensorDataset(*_data()), resume=tmp_path / "a", **options)
    assert [r["nll"] for r in resumed.history] == [r["nll"] for r in whole.history]
    x, y = _data()
    with pytest.raises(ValueError, match="differ in the data"):
        sr.fit(model(), TensorDataset(x + 1, y), resume=tmp_path / "a", **options)


def test_only_what_is_asked_for_is_read() -> None:
    dataset = Counting(*_data())
    column = Column(Samples(dataset, torch.device("cpu")), 0)
    assert column.shape == (40, 3)
    assert dataset.n_read == 1
    index = torch.tensor([5, 3, 3])
    assert torch.equal(column[index], _data()[0][index])
    assert torch.equal(column[-2:], _data()[0][-2:])
    assert torch.equal(column[4], _data()[0][4])
    assert column[:0].shape == (0, 3)
    assert dataset.n_read == 7


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([])


class TwoInputs(Named):
    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {**super().__getitem__(index), "mask": torch.ones(3)}


@pytest.mark.parametrize(
    ("data", "message"),
    [(Endless(), "needs a length"), (TwoInputs(*_data()), "inputs that are one tensor")],
)
def test_streams_that_fit_cannot_read(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sr.fit(nn.Linear(3, 3), data, epochs=1)


class Masked(nn.Module):
    """A model with named inputs, whose output has several fields."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, pixel_values: Tensor, mask: Tensor) -> Any:
        class Output:
            logits = self.layer(pixel_values * mask)

        return Output()


class Fields(nn.Module):
    """A model of one input whose output has several fields."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        class Output:
            logits = self.layer(x)

        return Output()


def test_fit_trains_models_whose_output_has_the_field_logits() -> None:
    torch.manual_seed(0)
    fit = sr.fit(Fields(), Named(*_data()), test=_data(), epochs=3, every=1, progress=False)
    assert fit.history[-1]["test_accuracy"] > 0.3
    assert fit.predict(_data()[0]).mean.shape == (40, 3)


def test_razor_reads_named_fields_and_arrays() -> None:
    x, y = _data()
    torch.manual_seed(0)
    model = Masked()
    named = sr.Razor(model, "categorical", 40).evidence(DataLoader(TwoInputs(x, y), 16))
    plain = sr.Razor(model.layer, "categorical", 40).evidence([(x.numpy(), y.numpy())])
    assert float(named.log_evidence) == pytest.approx(float(plain.log_evidence), rel=1e-6)
    with pytest.raises(ValueError, match="needs a field 'labels'"):
        sr.Razor(model, "categorical", 40).evidence([{"x": x}])
