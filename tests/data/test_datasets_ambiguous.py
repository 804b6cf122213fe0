"""Data that can be read in several ways: an error that names the options, or a question."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from symrazor.cli.terminal import ask
from symrazor.core.errors import AmbiguousDataError
from symrazor.data import dataset, read
from symrazor.data.sources import read_inputs

Y = torch.arange(30) % 2


@pytest.mark.parametrize(
    ("rows", "columns", "answers"),
    [
        (128, 6, {"series": (128, 6), "series-last": (6, 128)}),
        (12, 6, {"series": (12, 6), "series-last": (6, 12)}),
        (128, 3, {"set": (128, 3), "series-last": (3, 128)}),
        (65, 1, {"set": (65, 1), "series-last": (1, 65)}),
    ],
)
def test_long_samples_need_a_kind(
    rows: int, columns: int, answers: dict[str, tuple[int, int]]
) -> None:
    x = torch.randn(30, rows, columns, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        AmbiguousDataError, match=r"can be read in two ways\. Choose one: --kind"
    ) as e:
        dataset(x, Y)
    assert {value: option for option, value, _ in e.value.answers} == dict.fromkeys(answers, "kind")
    for kind, shape in answers.items():
        data = dataset(x, Y, kind=kind, test=(x, Y))
        assert data.kind == kind.removesuffix("-last") and tuple(data.x.shape[1:]) == shape
        assert data.test is not None and data.test[0].shape == data.x.shape


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((6, 128), "series"), ((1, 40), "series"), ((12, 2), "set"), ((64, 3), "set")],
)
def test_other_samples_are_recognised(shape: tuple[int, int], kind: str) -> None:
    x = torch.randn(30, *shape, generator=torch.Generator().manual_seed(0))
    assert dataset(x, Y).kind == kind
    assert dataset(torch.randn(30, 32, 32), Y).kind == "image"


def test_channels_last_needs_three_dimensions() -> None:
    with pytest.raises(ValueError, match=r"must have shape \[n, time, channels\]"):
        dataset(torch.randn(30, 4), Y, kind="series-last")


def table(path: Path, first: str, decimal: bool = True) -> Path:
    values = np.random.default_rng(0).normal(size=(30, 4))
    if not decimal:
        values = values.round(0) * 10
    rows = [",".join([*(f"{v:g}" for v in row), str(i % 2)]) for i, row in enumerate(values)]
    path.write_text("\n".join([first, *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    ("first", "decimal", "is_ambiguous"),
    [
        ("0,1,2,3,4", True, True),
        ("0,1,2,3,y", True, True),
        ("1,2,3,4,5", False, True),
        ("2001,2002,2004,2003,1", True, True),  # no other integer in the columns
        ("20,10,30,50,1", False, False),
        ("0.5,1,2,3,1", True, False),
        ("a,b,c,d,y", True, False),
        ("3,3,7,1,1", True, False),  # names differ
    ],
)
def test_a_header_of_numbers(first: str, decimal: bool, is_ambiguous: bool, tmp_path: Path) -> None:
    file = table(tmp_path / "a.csv", first, decimal)
    if is_ambiguous:
        with pytest.raises(AmbiguousDataError, match=r"names or data\? Choose one: --header yes"):
            read(file)
        with pytest.raises(ValueError, match="Give the columns names that are not numbers"):
            read_inputs(file, "vector", [4])
    else:
        read(file)
    if len(set(first.split(","))) == 5:
        assert len(read(file, header=True).x) == 30
    if first != "a,b,c,d,y" and not first.endswith("y"):
        assert len(read(file, header=False).x) == 31


def test_inputs_of_a_series_with_channels_last(tmp_path: Path) -> None:
    """A network that was trained with `--kind series-last` takes files of the same shape."""
    x = np.random.default_rng(0).normal(size=(30, 128, 6))
    np.savez(tmp_path / "x.npz", x=x)
    assert read_inputs(tmp_path / "x.npz", "series", [6, 128]).x.shape == (30, 6, 128)
    with pytest.raises(ValueError, match="takes series of shape"):
        read_inputs(tmp_path / "x.npz", "series", [6, 64])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_terminal_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [("header", "yes", "names"), ("header", "no", "data")]
    error = AmbiguousDataError("Names or data?", answers)
    with pytest.raises(AmbiguousDataError):  # no terminal
        ask(error)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setattr(sys, "stdin", Terminal("x\n3\n2\n"))
    assert ask(error) == ("header", "no")
    assert "1  names (--header yes)" in shown.getvalue()
    assert shown.getvalue().count("Which one? 1 to 2: ") == 3
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    with pytest.raises(AmbiguousDataError):  # Ctrl-D
        ask(error)
