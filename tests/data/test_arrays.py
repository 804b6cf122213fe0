"""Data are standardised in float64 and rounded to float32 after: shifts and scales lose nothing."""

import csv
import json
import statistics
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import Dataset, dataset, read
from symrazor.data.arrays import MIN_LEVELS, moments, prepare
from symrazor.discovery.api import as_dataset
from symrazor.discovery.result import with_standardisation
from symrazor.discovery.trajectories import _warn_if_coarse
from symrazor.dynamics.network_result import formula
from symrazor.runs.predictions import predict

N = 40
EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
RNG = np.random.default_rng(0)
BASE = torch.from_numpy(RNG.standard_normal((N, 3)))
SCALES = torch.tensor([1e-200, 1.0, 1e200], dtype=torch.float64)
JULIAN = 2460000.5 + np.stack([np.arange(N) / 86400, 1e8 + np.arange(N) ** 2 / 64], 1)
"""Seconds as fractions of a day, and values whose spread is 1e-7 of their mean."""


def _standardised(values: np.ndarray) -> Tensor:
    """Return columns with mean 0 and variance 1, from Python's exact rational arithmetic."""
    columns = []
    for column in values.T.tolist():
        mean, spread = statistics.mean(column), statistics.pstdev(column)
        columns.append([(value - mean) / spread for value in column])
    return torch.tensor(columns).T


@given(
    exponent=st.floats(-12, 12),
    shift=st.floats(-1e12, 1e12),
    sign=st.sampled_from([-1.0, 1.0]),
    kind=st.sampled_from(["vector", "set", "series"]),
)
@settings(deadline=None)
def test_shift_and_scale_do_not_change_what_networks_see(
    exponent: float, shift: float, sign: float, kind: str
) -> None:
    factor = sign * 10**exponent
    x = BASE if kind == "vector" else BASE.reshape(N // 2, 2, 3)
    y = BASE[: len(x), :1]
    plain = dataset(x, y, kind=kind, task="regression")  # type: ignore[arg-type]
    moved = dataset(factor * x + shift * factor, factor * y + shift * factor, kind=kind)  # type: ignore[arg-type]
    before, after = prepare(plain), prepare(moved)
    assert plain.y is not None and moved.y is not None
    tolerance = 4 * EPS32 + 8 * EPS64 * abs(shift)
    for expected, result in (
        (before.inputs(plain.x), after.inputs(moved.x)),
        (before.targets(plain.y), after.targets(moved.y)),
    ):
        assert result.dtype == torch.float32
        torch.testing.assert_close(sign * result, expected, rtol=4 * EPS32, atol=tolerance)


def _read_all(x: np.ndarray, folder: Path) -> dict[str, Dataset]:
    """Return the same data, with x[:, 0] as target, from every reader."""
    y = x[:, 0]
    np.savez(folder / "a.npz", x=x, y=y)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["day", "metre", "y"], *np.column_stack([x, y]).tolist()])
    results = {name: read(folder / name) for name in ("a.npz", "x.npy", "a.csv")}
    results["array"] = as_dataset(x, y, None, None, None)
    results["lists"] = as_dataset(x.tolist(), y.tolist(), None, None, None)
    results["tensor"] = as_dataset(torch.from_numpy(x), torch.from_numpy(y), None, None, None)
    return results


def test_every_reader_keeps_julian_dates(tmp_path: Path) -> None:
    expected = _standardised(JULIAN)
    for name, data in _read_all(JULIAN, tmp_path).items():
        preparation = prepare(data)
        x, y = data.labelled
        torch.testing.assert_close(preparation.inputs(x), expected, rtol=0, atol=1e-5, msg=name)
        torch.testing.assert_close(preparation.targets(y), expected[:, :1], rtol=0, atol=1e-5)


def test_saved_hugging_face_folders_keep_julian_dates(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"day": JULIAN[:, 0], "metre": JULIAN[:, 1], "label": JULIAN[:, 0]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "hub")
    result = read(tmp_path / "hub")
    assert torch.equal(result.x, torch.from_numpy(JULIAN))
    assert result.y is not None
    assert torch.equal(result.y[:, 0], torch.from_numpy(JULIAN[:, 0]))


@pytest.mark.parametrize("value", [0.0, 0.1, 1e8 + 0.1, -1e300, 1e-300])
def test_constant_columns_become_zero(value: float) -> None:
    x = torch.cat([BASE, torch.full((N, 1), value, dtype=torch.float64)], 1)
    mean, spread = moments(x)
    assert mean[3] == value and spread[3] == 0
    result = prepare(dataset(x, BASE[:, 0])).inputs(x)
    assert (result[:, 3] == 0).all() and result.isfinite().all()


def test_moments_are_exact_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = BASE.repeat(1, 2).reshape(N, 3, 2) * SCALES[:, None]
    expected = [column.flatten().tolist() for column in x.transpose(0, 1)]
    monkeypatch.setattr("symrazor.data.batches.CHUNK_ELEMENTS", 20)
    mean, spread = moments(x)
    for k, column in enumerate(expected):
        assert float(mean[k]) == pytest.approx(statistics.mean(column), rel=1e-12)
        unit = float(np.abs(column).max())
        scaled = [value / unit for value in column]
        assert float(spread[k]) == pytest.approx(unit * statistics.pstdev(scaled), rel=1e-12)


def test_bytes_stay_bytes_over_255() -> None:
    x = torch.arange(N * 64, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(N, 8, 8)
    data = dataset(x, torch.arange(N) % 2)
    assert data.x.dtype == torch.float32
    assert torch.equal(data.x[:, 0], x.float() / 255)


def test_columns_that_are_rounded_away_are_named(tmp_path: Path) -> None:
    far = 1.0 / EPS64 / MIN_LEVELS
    rows = [f"{v},{16 * far + k},{v}" for k, v in enumerate(BASE[:, 0].tolist())]
    (tmp_path / "a.csv").write_text("\n".join(["length,stamp,y", *rows]))
    with pytest.warns(
        UserWarning, match=r"float64 rounds away .*column 'stamp'.*Subtract a"
    ) as said:
        prepare(read(tmp_path / "a.csv"))
    assert "length" not in str(said[0].message)
    x = (BASE + torch.tensor([0.0, 1e7, 0.0])).float()
    with pytest.warns(UserWarning, match=r"float32 rounds away .*x\[:, 1\].*as float64, or subtr"):
        prepare(dataset(x, BASE[:, 0]))
    with pytest.warns(UserWarning, match=r"y\[:, 0\] \(spread"):
        prepare(dataset(BASE, torch.arange(N).double() + 16 * far))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(dataset(BASE + 1e12, BASE[:, 0] + 1e12))


def test_times_and_coordinates_that_are_rounded_away_are_named() -> None:
    t = torch.arange(12).double() * 0.25
    states = torch.stack([torch.stack([(t + b).cos(), -(t + b).sin()], -1) for b in range(6)])
    gaps = t.diff()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_if_coarse(dataset(states + 1e8, kind="trajectory"), 1.7e9 + t, gaps)
    with pytest.warns(UserWarning) as said:
        _warn_if_coarse(dataset(states.float() + 1e7, kind="trajectory"), (1.7e6 + t).float(), gaps)
    text = "\n".join(str(entry.message) for entry in said)
    assert "the times" in text and "x[:, :, 0]" in text


@pytest.mark.slow
def test_steps_of_trajectories_do_not_depend_on_the_origin() -> None:
    t = torch.arange(16).double() * 0.25
    states = torch.stack([torch.stack([(t + b).cos(), -(t + b).sin()], -1) for b in range(6)])
    states = (states * 2**20).round() / 2**20  # exact, also beside 1e8
    results = []
    for shift, start in ((64.0, 0.0), (1e8, 1.7e9)):
        data = dataset(states + shift, kind="trajectory", times=t + start)
        network = sr.discover(data, epochs=2).network()
        results.append(network(states[0] + shift) - shift)
        assert results[-1].dtype == torch.float64
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-4)


def test_formulas_write_centres_to_a_hundredth_of_the_scale() -> None:
    A, b = torch.eye(2).double(), torch.zeros(2).double()
    centre = torch.tensor([2460000.51, 0.0], dtype=torch.float64)
    text = formula(A, b - A @ centre, centre, torch.ones(2).double())
    assert "(q1 - 2460000.51)^2" in text


def _exact(n: int = 60) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that a shift by 1e8 or 1e12 does not round."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = 2 * x[:, 0] - x[:, 1] + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return (x * 2**20).round() / 2**20, (y * 2**12).round() / 2**12


@pytest.mark.slow
def test_discover_gives_the_same_answer_far_from_zero(tmp_path: Path) -> None:
    x, y = _exact()
    near = sr.discover(x, y, epochs=8, held_out=0.2)
    far = sr.discover(x + 1e8, y + 1e12, epochs=8, held_out=0.2)
    assert far.chosen.name == near.chosen.name
    assert [c.name for c in far.candidates] == [c.name for c in near.candidates]
    for entry, other in zip(far.candidates, near.candidates, strict=True):
        assert entry.log_evidence == pytest.approx(other.log_evidence, abs=0.1)
    expected = near.predict(x).mean
    prediction = far.predict(x + 1e8).mean - 1e12
    torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-3)
    run = far.save(tmp_path / "run")
    np.savez(tmp_path / "x.npz", x=x + 1e8)
    loaded = predict(run, tmp_path / "x.npz").values
    torch.testing.assert_close(loaded - 1e12, expected, rtol=0, atol=1e-3)
    document = json.loads((run / "discover.json").read_text())
    assert document["data"]["dtype"] == "float64"
    assert "x: float64 [n, 3]" in (run / "README.txt").read_text()


def test_attached_networks_standardise_in_float64() -> None:
    x, y = _exact()
    far = dataset(x + 1e8, (y + 1e12)[:, None])
    near = dataset(x, y[:, None])
    inner = nn.Linear(3, 1)
    networks = [with_standardisation(inner, prepare(data), 2) for data in (near, far)]
    with torch.no_grad():
        expected, result = networks[0](near.x), networks[1](far.x) - 1e12
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-4)


def test_estimators_predict_far_from_zero() -> None:
    pytest.importorskip("sklearn")
    from symrazor.sklearn import SymmetryRegressor

    x, y = (part.numpy() for part in _exact(30))
    near = SymmetryRegressor(epochs=3, random_state=0).fit(x, y).predict(x)
    far = SymmetryRegressor(epochs=3, random_state=0).fit(x + 1e8, y + 1e12).predict(x + 1e8)
    np.testing.assert_allclose(far - 1e12, near, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        (2**53 + 1, 2**53 + 1, "x.npy needs 8,388,608.00 GiB"),
        (0, 2**53 + 1, "x.npy must have shape"),
        (0, 0, "x.npy must have shape"),
    ],
)
def test_arrays_without_values_have_a_budget(
    rows: int, labels: int, message: str, tmp_path: Path
) -> None:
    """An array [2^53, 0] takes no memory in the file, but a flag for each of its rows would."""
    for name, shape in (("x", (rows, 0)), ("y", (labels, 0))):
        header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
        (tmp_path / f"{name}.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + header.encode())
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "x.npy")
