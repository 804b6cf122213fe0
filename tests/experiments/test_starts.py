"""Starts that differ and end alike: what is compared, and how results merge."""

import json
from pathlib import Path
from typing import Any

import pytest

from symrazor.data import Tensors
from symrazor.discovery import digits
from symrazor.experiments import starts
from symrazor.experiments.__main__ import main


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the canvas."""
    whole = digits.digits_on_canvas

    def canvas(*of: Any) -> tuple[Tensors, Tensors]:
        (x, y), (xt, yt) = whole(*of)
        return (x[:300], y[:300]), (xt[:50], yt[:50])

    monkeypatch.setattr(digits, "digits_on_canvas", canvas)


@pytest.mark.usefixtures("few_digits")
def test_starts_that_differ_end_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs: `fit` makes the same start of a loose and of a tight prior."""
    short = digits.DIGIT_CONFIG.change(epochs=2, progress=False)
    monkeypatch.setattr(digits, "DIGIT_CONFIG", short)
    options = starts.Options()
    seed_and_data = (0, options, starts.data("digit", options, 0))
    near = [starts.train("digit", p, "near", *seed_and_data) for p in (1.0, 1e4)]
    given = [starts.train("digit", p, "given", *seed_and_data) for p in (1.0, 1e4)]
    assert near[0]["evidence"] == pytest.approx(near[1]["evidence"], rel=0.02)
    assert given[0]["evidence"] != pytest.approx(given[1]["evidence"], rel=0.1)
    assert "| digit | near | 10000 | 0 |" in starts.markdown(near)


def test_starts_are_compared_by_their_ends(tmp_path: Path) -> None:
    """Figures that pass, and one of each kind that does not."""

    def row(seed: int, evidence: float, accuracy: float, verdict: str) -> dict[str, Any]:
        return {
            **{"task": "digit", "start": "near", "precision": 1.0, "seed": seed},
            **{"evidence": evidence, "accuracy": accuracy, "verdicts": [verdict]},
            **{"free_shares": [1.0], "errors": [1.0]},
        }

    ends = [
        [row(0, 0.50, 99.0, "equivariant"), row(0, 0.54, 98.1, "equivariant")],
        [row(1, 0.50, 99.0, "equivariant"), row(1, 0.56, 98.1, "equivariant")],
        [row(2, 0.50, 99.0, "equivariant"), row(2, 0.50, 97.9, "equivariant")],
        [row(3, 0.50, 99.0, "equivariant"), row(3, 0.50, 99.0, "position")],
    ]
    rows = [row for pair in ends for row in pair]
    assert [c["passed"] for c in starts.compare(rows)] == [True, False, False, False]
    assert starts.markdown(rows).count("FAIL") == 3
    counted = [{**row, "tested": 360} for row in rows]
    assert [c["images_apart"] for c in starts.compare(counted)] == [3, 3, 4, 0]
    assert "| 1.1 (4 of 360) | FAIL |" in starts.markdown(counted)
    rival = {**row(0, 0.40, 99.0, "equivariant"), "start": "given"}  # found by another way
    assert not [c for c in starts.compare([*rows, rival]) if c["passed"] and c["start"] == "near"]


def test_one_start_or_two_settings_are_not_compared() -> None:
    """What a command leaves that was stopped, and one that was told other epochs."""
    row: dict[str, Any] = {"task": "digit", "start": "near", "precision": 1.0, "seed": 0}
    row |= {"evidence": 0.5, "accuracy": 99.0, "verdicts": ["equivariant"], "free_shares": [0.0]}
    longer = row | {"epochs": 50, "precision": 10.0}
    assert not starts.compare([row])[0]["passed"]
    assert "| one start only |" in starts.markdown([row])
    assert not starts.compare([row | {"epochs": 3}, longer])[0]["passed"]
    assert "| not equal: 2 settings |" in starts.markdown([row | {"epochs": 3}, longer])
    assert starts.compare([row | {"epochs": 50}, longer])[0]["passed"]


@pytest.mark.usefixtures("few_digits")
def test_starts_by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "DIGIT_CONFIG", digits.DIGIT_CONFIG.change(epochs=1))
    file = tmp_path / "starts.json"
    main(["starts", "--small", "--seed", "0", "--json", str(file), "--device", "cpu"])
    document = json.loads(file.read_text())
    assert len(document["runs"]) == 4 and len(document["comparisons"]) == 2


@pytest.mark.usefixtures("few_digits")
def test_starts_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One seed at a time, as several machines do, into one file; sizes are not mixed up."""
    monkeypatch.setattr(starts, "STARTS", (1.0, 10.0))
    monkeypatch.setattr(digits, "DIGIT_CONFIG", digits.DIGIT_CONFIG.change(epochs=1))
    file = tmp_path / "starts.json"
    common = ["--task", "digit", "--json", str(file), "--device", "cpu"]
    main(["starts", "--seed", "1", "--small", *common])
    main(["starts", "--seed", "1", *common])
    capsys.readouterr()
    main(["starts", "--seed", "0", *common])
    document = json.loads(file.read_text())
    keys = [(run["small"], run["seed"], run["precision"]) for run in document["runs"]]
    assert sorted(keys) == [(s, k, p) for s, k in ((0, 0), (0, 1), (1, 1)) for p in (1.0, 10.0)]
    pairs = [(pair["small"], pair["seed"]) for pair in document["comparisons"]]
    assert pairs == [(False, 0), (False, 1), (True, 1)]
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[2:4] for line in table[2:6]] == [
        [precision, seed] for seed in "01" for precision in ("1", "10")
    ]
    assert sum("pass" in line or "FAIL" in line for line in table) == 2
    main(["starts", "--seed", "0", "--limit", "40", *common])  # other data: rows of their own
    document = json.loads(file.read_text())
    assert sorted(run["images"] for run in document["runs"]) == 6 * ["digits"] + 2 * ["digits[:40]"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["starts", "--epochs", "0", *common])
    assert "epochs must be at least 1, got 0" in capsys.readouterr().err
