"""Test data that other libraries hold: frames, data sets and loaders."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import symrazor as sr
from symrazor.data.arrays import as_arrays
from symrazor.discovery.api import as_dataset

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(40, 3))
Y = (X[:, 0] > 0).astype(np.int64)


def frames() -> list[Any]:
    found = []
    for name in ("pandas", "polars"):
        library = pytest.importorskip(name)
        found.append((library.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2]}), library))
    return found


def test_frames_are_arrays_with_names() -> None:
    for frame, library in frames():
        data = as_dataset(frame, library.Series(Y), None, None, None)
        assert data.columns == ("a", "b", "c")
        assert np.array_equal(data.x.numpy(), X) and np.array_equal(data.y, Y)
        text = as_dataset(frame, library.Series(np.where(Y, "yes", "no")), None, None, None)
        assert text.names == ("no", "yes")


class Frame:
    """A frame without its library, which the tests do not need."""

    columns = ("a", "b")

    def __getitem__(self, name: str) -> Any:
        return type("Column", (), {"to_numpy": lambda _: X[:, "ab".index(name)]})()


def test_frames_are_recognised_by_the_module_of_their_type() -> None:
    Frame.__module__ = "pandas.core.frame"
    x, y, columns, _ = as_arrays(Frame(), Y)
    assert np.array_equal(x, X[:, :2]) and y is Y and columns == ("a", "b")


def test_data_sets_and_loaders_have_their_labels() -> None:
    pairs = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    for source in (pairs, DataLoader(pairs, batch_size=7)):
        data = as_dataset(source, None, None, None, None)
        assert np.array_equal(data.x.numpy(), X) and np.array_equal(data.y, Y)
    found = sr.discover(pairs, epochs=1, starts=2)
    assert found.results[0].data.task == "classification"


def test_data_without_a_length_are_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from zip(X, Y, strict=True)

    with pytest.raises(ValueError, match="must have a length and an index"):
        as_arrays(Stream())
    data = as_dataset(DataLoader(Stream(), batch_size=8), None, None, None, None)
    assert len(data.x) == 40


def test_samples_that_belong_together_stay_on_one_side_of_every_split() -> None:
    patients = np.repeat([f"patient {k}" for k in range(20)], 4)
    x = DRAWS.normal(size=(80, 3))
    y = (x[:, 0] > 0).astype(np.int64)
    found = sr.discover(x, y, together=patients, epochs=1, starts=2)
    (result,) = found.results
    assert result.test is not None and result.data.together is not None
    held_out = {tuple(row) for row in result.test[0].tolist()}
    sides = [{tuple(row) in held_out for row in x[patients == p].tolist()} for p in set(patients)]
    assert all(len(side) == 1 for side in sides)
    assert 8 <= len(result.test[0]) <= 16
    with pytest.raises(ValueError, match=r"together must have one value per sample, \[80\]"):
        sr.discover(x, y, together=patients[:5], epochs=1)


def test_fit_takes_frames() -> None:
    for frame, library in frames():
        fit = sr.fit(torch.nn.Linear(3, 2), (frame, library.Series(Y)), epochs=1, progress=False)
        assert torch.equal(fit.data.x, torch.from_numpy(X).float())
        assert torch.equal(fit.data.y, torch.from_numpy(Y))


TOWNS = np.array(["Ulm", "Rome"] * 20, dtype=object)


class Table:
    """A frame with numbers and text, in an order of its columns."""

    def __init__(self, **columns: np.ndarray) -> None:
        self.columns, self.values = tuple(columns), columns

    def __getitem__(self, name: str) -> Any:
        return type("Column", (), {"to_numpy": lambda _: self.values[name]})()


Table.__module__ = "pandas.core.frame"


def test_text_becomes_a_column_per_value_in_any_order_of_the_columns() -> None:
    found = sr.discover(Table(a=X[:, 0], town=TOWNS), Y, epochs=1, held_out=0.0)
    data = found.results[0].data
    assert data.columns == ("a", "town = Rome", "town = Ulm")
    assert np.array_equal(data.x.numpy()[:, 1], TOWNS == "Rome")
    p = found.predict(np.stack([X[:, 0], TOWNS == "Rome", TOWNS == "Ulm"], 1)).mean
    assert torch.equal(found.predict(Table(other=TOWNS, town=TOWNS, A=X[:, 0])).mean, p)
    with pytest.raises(ValueError, match="x has no column 'town'"):
        found.predict(Table(a=X[:, 0]))
    with pytest.warns(UserWarning, match=r"1 values that .* data row 2 \('Paris'\)"):
        found.predict(Table(a=X[:2, 0], town=np.array(["Ulm", "Paris"], dtype=object)))


def test_text_with_many_values_is_an_error() -> None:
    names = np.array([f"name {number}" for number in range(40)], dtype=object)
    with pytest.raises(ValueError, match="Column 'name' of x holds text with more than 20 values"):
        as_arrays(Table(a=X[:, 0], name=names), Y)
    with pytest.raises(ValueError, match="Column 'when' of x holds neither numbers nor text"):
        as_arrays(Table(when=np.array([object()] * 40)), Y)


@pytest.mark.parametrize(
    "y",
    [
        np.where(Y == 1, "yes", "no").astype(object),
        Y.astype(object),
        Y.astype(float),
        X[:, :2],
    ],
)
def test_samples_without_a_label_are_left_out(y: np.ndarray) -> None:
    gaps = y.copy()
    gaps[3], gaps[7] = (None, float("nan")) if y.dtype == object else (np.nan, np.nan)
    kept = np.delete(np.arange(40), [3, 7])
    with pytest.warns(UserWarning, match="2 of 40 samples have no label and are left out"):
        data = as_dataset(X, gaps, None, None, None, np.arange(40))
    plain = as_dataset(X[kept], y[kept], None, None, None, kept)
    assert torch.equal(data.x, plain.x) and torch.equal(data.y, plain.y)
    assert data.names == plain.names
    assert data.together is not None and data.together.tolist() == kept.tolist()
