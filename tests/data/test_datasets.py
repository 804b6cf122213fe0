"""Test how data sets recognise their kind and task."""

from pathlib import Path

import numpy as np
import pytest
import torch

import symrazor as sr
from symrazor.data import dataset, read

RNG = np.random.default_rng(0)


N = 30


Y = np.arange(N) % 3


X = RNG.random((N, 4)).astype(np.float32)


TEXT = np.array(["ant", "bee", "cow"])[Y]


def test_text_labels_of_test_data_are_numbered_with_those_of_training(tmp_path: Path) -> None:
    late = Y > 0  # without the first class, whose number would otherwise be given to the second
    np.savez(tmp_path / "a.npz", x=X, y=TEXT, x_test=X[late], y_test=TEXT[late])
    result = read(tmp_path / "a.npz")
    assert result.test is not None
    assert result.test[1].tolist() == Y[late].tolist()
    given = sr.discover(X, TEXT.tolist(), test=(X[late], TEXT[late].tolist()), epochs=1)
    held = given.results[0].test
    assert held is not None
    assert held[1].tolist() == Y[late].tolist()
    with pytest.raises(ValueError, match="the class dog, which the training data do not have"):
        sr.discover(X, TEXT, test=(X[:2], ["dog", "ant"]))
    with pytest.raises(ValueError, match="labels .* have different types"):
        sr.discover(X, TEXT, test=(X[:2], [0, 1]))


@pytest.mark.parametrize(
    ("y", "described"),
    [
        (Y.astype(np.float64), "3 classes"),
        (Y + 0.5, "1 target (regression)"),
        (Y - 1.0, "1 target (regression)"),
        (100.0 * Y, "1 target (regression)"),
        (np.array([-7, 3, 2**40])[Y], "3 classes"),
        (Y > 0, "2 classes"),
    ],
)
def test_task_is_recognised_from_the_labels(y: np.ndarray, described: str) -> None:
    assert dataset(torch.from_numpy(X), torch.from_numpy(y)).describe().endswith(described)


def test_text_targets_are_rejected_for_regression() -> None:
    with pytest.raises(ValueError, match="numbers as targets.*the classes ant, bee, cow"):
        sr.discover(X, TEXT, task="regression")


def test_a_dataset_describes_itself() -> None:
    data = dataset(torch.from_numpy(X), torch.from_numpy(Y))
    assert repr(data) == "Dataset(data: 30 vectors of 4, 3 classes)"
    with pytest.raises(ValueError, match="have no effect together with a Dataset"):
        sr.discover(data, task="regression")


def test_errors_about_arrays_name_what_is_wrong() -> None:
    not_finite = np.where(np.arange(30)[:, None] == 3, np.nan, X)
    with pytest.raises(ValueError, match=r"^x and y in data must have .*\[30, 4\] and \[20\]"):
        sr.discover(X, Y[:20])
    with pytest.raises(ValueError, match=r"^x in data has 4 NaN.* the first in sample 3\."):
        sr.discover(not_finite, Y)
    with pytest.raises(ValueError, match=r"^data has no labels\. Pass them"):
        sr.discover(X)
