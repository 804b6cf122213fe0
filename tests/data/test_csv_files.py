"""Test the reader of CSV files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from symrazor.core.errors import AmbiguousDataError
from symrazor.data import read
from symrazor.data.sources import read_inputs

RNG = np.random.default_rng(0)


N = 24


LABELS = np.arange(N) % 3


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


TOWNS = ["Ulm", "Rome", "Ulm"] * 8


def write_houses(file: Path, names: str, rows: list[str]) -> Path:
    file.write_text(names + "\n" + "\n".join(rows) + "\n")
    return file


def test_text_becomes_a_column_per_value(tmp_path: Path) -> None:
    rows = [f"{k},{town},{k * k + 0.5}" for k, town in enumerate(TOWNS)]
    data = read(write_houses(tmp_path / "a.csv", "Area,Town,price", rows))
    assert data.columns == ("area", "town = Rome", "town = Ulm")
    assert data.x[:3].tolist() == [[0, 0, 1], [1, 1, 0], [2, 0, 1]]
    chosen = read(tmp_path / "a.csv", columns=["town"])
    assert chosen.columns == ("town = Rome", "town = Ulm")
    rows = ["9,x,Ulm", "8,y,Bonn", "7,z,"]  # other columns, and another order
    new = write_houses(tmp_path / "b.csv", "area,note,town", rows)
    with pytest.warns(UserWarning, match=r"'town': 1 values .* data row 2 \('Bonn'\)"):
        inputs = read_inputs(new, "vector", [3], data.columns)
    assert inputs.x.tolist() == [[9, 0, 1], [8, 0, 0], [7, 0, 0]]
    with pytest.raises(ValueError, match="no column 'area', which the network needs. Columns: to"):
        read_inputs(write_houses(new, "town", ["Ulm"] * 3), "vector", [3], data.columns)


def test_a_first_row_with_numbers_and_text_is_not_guessed(tmp_path: Path) -> None:
    rows = [f"{k},{town},{k * k + 0.5}" for k, town in enumerate(TOWNS)]
    file = write_houses(tmp_path / "a.csv", "33,Rome,7.5", rows)
    with pytest.raises(AmbiguousDataError, match=r"33, Rome, .* names or data"):
        read(file)
    assert len(read(file, header=False).x) == 25
    assert read(file, header=True).columns == ("33", "rome = Rome", "rome = Ulm")


def test_rows_without_a_label_are_left_out(tmp_path: Path) -> None:
    for name, label in (("text", "yes"), ("number", "0.5")):
        rows = [f"r{k},{k},{'' if k in (2, 5) else label + str(k % 3)}" for k in range(N)]
        file = write_houses(tmp_path / f"{name}.csv", "id,a,y", rows)
        with pytest.warns(UserWarning, match="2 of 24 samples have no label and are left out"):
            data = read(file)
        assert data.x[:4, 0].tolist() == [0, 1, 3, 4] and data.ids[2] == "r3"
        assert data.names == (("yes0", "yes1", "yes2") if name == "text" else ("y",))
        assert data.y is not None and len(data.y) == N - 2
