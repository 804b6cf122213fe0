"""Test the reader of CSV files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from symrazor.data import read

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
