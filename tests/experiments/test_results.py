"""Files that experiments read and write: results that cannot be used, events of the run alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from symrazor.experiments import ella_tables, starts
from symrazor.experiments.ella import Options
from symrazor.experiments.results import check_figures, markdown, read_runs
from symrazor.training.events import read_events

ROW = "digit/conv/map"


def _table(changes: Options) -> str:
    """A table of few images."""
    (x, y), (xt, yt) = ella_tables.data_1("digit", changes)
    subset = (x[:150], y[:150]), (xt[:50], yt[:50])
    return replace(ella_tables.TABLE_1, data=lambda *_: subset).run(changes)


def _options(**changes: Any) -> Options:
    return Options(**{"small": True, "device": "cpu", "rows": (ROW,), "epochs": 1, **changes})


def test_other_options_of_the_evidence_are_another_setting(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert _table(_options(json=file, seed=(0, 1))).endswith("| 2 |")
    same = ("prior_precision=1", "samples=1")  # as they are, whole numbers or not
    assert _table(_options(json=file, seed=(2,), set=same)).endswith("| 3 |")
    text = _table(_options(json=file, seed=(3,), set=("prior_precision=50",)))
    assert text.endswith("| 4, of 2 settings |")


def test_a_run_that_diverged_has_the_setting_of_the_others() -> None:
    figures = {"accuracy": 1.0, "nll": 1.0, "evidence": 1.0, "seconds": 1.0, "free_shares": []}
    base = {"row": "a", "small": True, "epochs": 1, "config": {"lr": 0.1}}
    finished = {**base, **figures, "seed": 0, "reading": {"config": {"damping": 0.5, "seed": 0}}}
    other = {**finished, "seed": 1, "reading": {"config": {"damping": 1.0, "seed": 1}}}
    older = {**finished, "seed": 2, "reading": {"config": {}}}
    diverged = {**base, "seed": 3, "error": "diverged"}
    assert markdown([diverged, finished, older], {"a": {}}).endswith("| 3, 1 diverged |")
    assert markdown([diverged, finished, other], {"a": {}}).endswith("1 diverged, of 2 settings |")


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (5, "its runs are a int, not a list"),
        ({}, "its runs are a dict, not a list"),
        ([{}], "seed 0 lacks epochs, accuracy, nll, evidence, free_shares, seconds, "),
        (
            [{"error": "diverged"}],
            "run of row .* lacks epochs",
        ),
    ],
)
@pytest.mark.parametrize("option", ["json", "merge"])
def test_incomplete_results_raise(runs: Any, message: str, option: str, tmp_path: Path) -> None:
    file, named = tmp_path / "a.json", {"row": ROW, "seed": 0, "small": True}
    listed = [named | run for run in runs] if isinstance(runs, list) else runs
    file.write_text(json.dumps({"experiment": "ella-table1", "runs": listed}))
    before = file.read_text()
    changes = (
        {"json": file} if option == "json" else {"merge": (file,), "json": tmp_path / "b.json"}
    )
    with pytest.raises(ValueError, match=message):
        ella_tables.TABLE_1.run(_options(rows=(), **changes))
    assert file.read_text() == before
    assert not (tmp_path / "b.json").exists()


def test_saved_results_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    _table(_options(json=file))
    _table(_options(json=file, seed=(1,), set=("lr=1e20",)))
    runs = read_runs("ella-table1", file)
    assert ["error" in run for run in runs] == [False, True]
    check_figures(runs)


def test_events_are_those_of_the_last_run(tmp_path: Path) -> None:
    """Else epochs of an earlier, longer run would stand behind those of this one."""
    file = tmp_path / "digit_conv_map-0.jsonl"
    for epochs in (3, 1):
        _table(_options(events=tmp_path, epochs=epochs))
        assert [event["epoch"] for event in read_events(file)] == list(range(1, epochs + 1))


def test_events_of_a_resumed_run_go_on(tmp_path: Path) -> None:
    run, file = f"resume={tmp_path / 'run'}", tmp_path / "digit_conv_map-0.jsonl"
    for _ in range(2):  # the second has nothing left to do
        _table(_options(events=tmp_path, epochs=2, set=(run,)))
        assert [event["epoch"] for event in read_events(file)] == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": ()}, "No seeds given"),
        ({"set": ("save=run",), "seed": (0, 1)}, "--set save=run allows one run"),
        (
            {"set": ("resume=run",), "rows": ("*/conv/map",)},
            "--set resume=run allows one run, but 2",
        ),
    ],
)
def test_no_seeds_and_shared_checkpoint_folders_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ella_tables.TABLE_1.run(_options(**change))


def test_folder_as_result_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder. Give the name of a file"):
        starts.run(starts.Options(small=True, json=tmp_path))
