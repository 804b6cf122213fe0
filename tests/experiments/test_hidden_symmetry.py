"""The experiment on sets, rings and a hidden group."""

import json
from pathlib import Path

import pytest
import torch

from symrazor.experiments import hidden_symmetry
from symrazor.experiments.hidden_symmetry import ROWS, Options, make_task, markdown, ring, run


@pytest.mark.parametrize("row", ROWS)
def test_targets_have_the_symmetry_they_claim(row: str) -> None:
    task = make_task(row, 3)
    repeated = make_task(row, 3)
    assert torch.equal(task.x, repeated.x) and torch.equal(task.y, repeated.y)
    assert task.y.shape == (512, 1) and 0.9 < float(task.y.std()) < 1.1
    names = [group.name for group in task.candidates]
    assert (task.truth in names) == (row not in ("order", "position"))
    for group in task.candidates:
        group.check()


def test_a_ring_visits_its_places_in_order() -> None:
    group = ring([2, 0, 3, 1], "r")
    assert group.permutations is not None
    assert group.permutations.tolist() == [[3, 2, 0, 1]]
    assert group.finite().order == 4


def test_results_merge_and_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_symmetry, "CONFIG", hidden_symmetry.CONFIG.change(epochs=3))
    file = tmp_path / "r.json"
    text = run(Options(seed=(0,), json=file, rows=("set",), small=True))
    assert text.splitlines()[0].startswith("| row | truth | right |")
    text = run(Options(seed=(1,), json=file, rows=("set",), small=True))
    runs = json.loads(file.read_text())["runs"]
    assert [result["seed"] for result in runs] == [0, 1]
    assert markdown(runs) == text and "of 2 |" in text
    assert set(runs[0]["shares"]) == {"S8"} and len(runs[0]["free_shares"]) == 2
    with pytest.raises(ValueError, match="Rows: set, order"):
        run(Options(rows=("sets",)))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_the_symmetry_is_found_in_five_of_five_seeds(row: str) -> None:
    runs = [hidden_symmetry.run_row(row, seed, Options(device="cpu")) for seed in range(5)]
    assert [result["right"] for result in runs] == [True] * 5
    if row in ("set", "periodic"):
        assert max(share for result in runs for share in result["free_shares"]) < 0.4
    elif row in ("order", "position"):
        assert min(max(result["free_shares"]) for result in runs) > 0.6
    elif row == "hidden":
        assert min(result["margin"] for result in runs) > 100
