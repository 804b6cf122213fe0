"""ELLA's network and tables: counts, results files, and the tables themselves on the digits."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from symrazor.cli import app as cli
from symrazor.data import digits, flip_and_crop
from symrazor.experiments import ella, ella_tables
from symrazor.experiments.__main__ import main
from symrazor.experiments.ella import Options
from symrazor.experiments.images import validation_images
from symrazor.experiments.registry import EXPERIMENTS, options_type
from symrazor.experiments.results import add_runs, markdown, merged, read_runs
from symrazor.training.events import read_events

# --------------------------------------------------------------------------------------- network


# --------------------------------------------------------------------------------------- options


def test_only_experiments_on_official_data_have_the_option_data() -> None:
    with_data = {n for n in EXPERIMENTS if "data" in options_type(n).__dataclass_fields__}
    simulated = {n for n in EXPERIMENTS if n.startswith("noether")}
    assert set(EXPERIMENTS) - with_data == simulated | {
        "hidden-symmetry",
        "selection",
        "talk-basis",
    }


# --------------------------------------------------------------------------------------- results


def _run(row: str, seed: int, accuracy: float = 90.0, small: bool = True) -> dict[str, object]:
    figures = {"accuracy": accuracy, "nll": 0.5, "evidence": 1.0, "seconds": 2.0, "epochs": 3}
    return {"row": row, "seed": seed, "small": small, "free_shares": [0.0, 0.5], **figures}


def test_results_merge_by_row_seed_and_size(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.json"
    add_runs("t", file, [_run("b", 0), _run("a", 1)])
    add_runs("t", file, [_run("a", 1, 95.0), _run("a", 0), _run("a", 1, small=False)])
    result = read_runs("t", file)
    keys = [(run["small"], run["row"], run["seed"]) for run in result]
    assert keys == [(False, "a", 1), (True, "a", 0), (True, "a", 1), (True, "b", 0)]
    assert result[2]["accuracy"] == 95.0
    assert merged(result, []) == result
    assert [path.name for path in file.parent.iterdir()] == ["a.json"]


def test_no_result_is_lost_between_writers(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    threads = [
        threading.Thread(target=add_runs, args=("t", file, [_run("a", seed)])) for seed in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run["seed"] for run in read_runs("t", file)] == list(range(12))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"experiment": "other", "runs": []}',
            "has results of 'other', not of t",
        ),
        ("[]", "not of t"),
        ('{"experiment": "t", "schema": 99}', "has schema 99; this version reads 1"),
        ('{"experiment": "t", "runs": [3]}', "a run needs row, seed and small, but one has 3"),
        (
            '{"experiment": "t", "runs": [{"row": "a", "seed": "0", "small": true}]}',
            "a run needs row, seed and small",
        ),
        ('{"experiment": "t", "ru', "has no results of t: Unterminated"),
        ('{"experiment": "t", "runs": [{"task": 1}]}', "row, seed and small, but one has .'task'"),
    ],
)
def test_other_files_are_not_overwritten(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        add_runs("t", file, [_run("a", 0)])
    assert file.read_text() == content


def test_markdown_has_mean_and_spread_beside_the_paper() -> None:
    failed = {"row": "b", "seed": 0, "small": True, "epochs": 3, "error": "diverged"}
    runs = [_run("a", 0, 90.0), _run("a", 1, 92.0), failed]
    paper = {"b": {}, "a": {"accuracy": 99.0, "evidence": 1.25}, "c": {"accuracy": 1.0}}
    lines = markdown(runs, paper).splitlines()
    assert lines[2] == "| b | diverged |  | diverged |  | diverged |  |  | 3 |  | 1, 1 diverged |"
    assert lines[3] == (
        "| a | 91.00 ± 1.41 | 99.00 | 0.500 |  | 1.000 | 1.250 | 0 / 50 | 3 | 2 | 2 |"
    )
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    other = {**_run("a", 2, 91.0), "free_shares": [0.02, 0.5]}
    assert "| 91.00 ± 1.00 | 99.00 |" in markdown([*runs, other], paper)
    assert "| 1 (0-2) / 50 |" in markdown([*runs, other], paper)


def test_table_counts_different_settings() -> None:
    first = {**_run("a", 0), "config": {"optimizer": "adamw", "seed": 0, "device": "cpu"}}
    second = {**_run("a", 1), "config": {"optimizer": "adamw", "seed": 1, "device": "cuda"}}
    other = {**_run("a", 2), "config": {"optimizer": "sgd", "seed": 2, "device": "cuda"}}
    assert markdown([first, second], {"a": {}}).endswith("| 2 |")
    assert markdown([first, second, other], {"a": {}}).endswith("| 3, of 2 settings |")


# ---------------------------------------------------------------------------------------- tables


def test_rows_are_those_of_the_paper() -> None:
    assert len(ella_tables.TABLE_1.rows) == 10
    assert len(ella_tables.TABLE_2.rows) == 22
    for experiment in (ella_tables.TABLE_1, ella_tables.TABLE_2):
        assert len({row.name for row in experiment.rows}) == len(experiment.rows)
        assert all("accuracy" in row.paper for row in experiment.rows)
    by_name = {row.name: row for row in ella_tables.TABLE_2.rows}
    row = by_name["s-fc+s-conv-omega/laplace"]
    assert (row.paths, row.prior, row.method) == ("s-fc+s-conv", "omega", "laplace")
    assert row.paper == {"accuracy": 80.63, "nll": 0.564, "evidence": 1.067}


def test_map_rows_never_move_a_precision(tmp_path: Path) -> None:
    options = Options(small=True, device="cpu", rows=("f-fc+conv/map",), epochs=1)
    (row,) = (row for row in ella_tables.TABLE_2.rows if row.name == "f-fc+conv/map")
    data = ella_tables.data_2("images", options)
    result = ella.run_row(ella_tables.TABLE_2, row, options, 0, data)
    assert "error" not in result
    for layer in result["reading"]["layers"]:
        for path in layer["paths"]:
            assert set(path["precision"].values()) == {1.0}


def test_real_rows_of_table_2_are_augmented() -> None:
    row = ella_tables.TABLE_2.rows[0]
    assert ella_tables.config_2(row, small=False).augment is flip_and_crop
    assert ella_tables.config_2(row, small=True).augment is None


def test_both_tasks_of_table_1_have_the_same_images() -> None:
    options = Options(small=True)
    (digit, quadrants), tests = (
        ella_tables.data_1("digit", options),
        ella_tables.data_1("quadrant", options),
    )
    assert torch.equal(digit[0], tests[0][0])
    assert torch.equal(quadrants[0], tests[1][0])
    assert torch.equal(tests[0][1] % 10, digit[1])
    assert int(tests[0][1].max()) == 39
    assert torch.equal(digit[0] > 0, ella_tables.data_1("digit", options, 0)[0][0] > 0)
    assert not torch.equal(digit[0] > 0, ella_tables.data_1("digit", options, 1)[0][0] > 0)


def test_settings_are_chosen_on_training_images_that_are_left_out() -> None:
    (train, test), (x, y) = validation_images((torch.arange(12.0), torch.arange(12))), digits()
    assert train[1].tolist() == list(range(10)) and test[0].tolist() == [10.0, 11.0]
    options = Options(small=True, rows=("digit/conv/map",), epochs=1, validation=True)
    job = next(ella._jobs(ella_tables.TABLE_1, [ella_tables.TABLE_1.rows[1]], options))
    used, left_out = job.args[-1]  # type: ignore[attr-defined]
    assert len(used[1]) + len(left_out[1]) == len(y) and len(left_out[1]) == len(y) // 6
    assert torch.equal(left_out[1], y[len(used[1]) :]) and len(x) == len(y)


def test_diverged_run_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    options = Options(
        small=True, rows=("conv/*",), epochs=1, json=file, set=("lr=1e30", "optimizer=sgd")
    )
    text = ella_tables.TABLE_2.run(options)
    assert "diverged" in text
    assert "The training loss is nan" in read_runs("ella-table2", file)[0]["error"]


def test_run_that_diverges_in_its_last_step_is_saved() -> None:
    """No loss has seen it yet, but the evidence would."""
    arguments = ("batch_size=1437", "lr=1e20")
    options = Options(small=True, rows=("conv/laplace",), epochs=1, set=arguments)
    assert "1, 1 diverged" in ella_tables.TABLE_2.run(options)


def test_run_with_infinite_gradients_is_saved() -> None:
    """Outputs are finite, their gradients are not: diverged, and no fault of the layers."""
    arguments = ("lr=1e6", "optimizer=sgd", "every=1")
    options = Options(small=True, rows=("digit/conv/laplace",), epochs=3, set=arguments)
    assert "1, 1 diverged" in ella_tables.TABLE_1.run(options)


def test_epochs_may_be_set_either_way() -> None:
    """The burn-in follows: half of a short run."""
    row = ella_tables.TABLE_1.rows[2]
    base = ella_tables.config_1(row, small=True)
    config = ella._config(base, row, Options(small=True, epochs=4), 1437)
    assert config == ella._config(base, row, Options(small=True, set=("epochs=4",)), 1437)
    assert (config.epochs, config.burn_in) == (4, 2 * 23)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ("dense/*",)}, "No row matches dense/.*. Rows: digit/fc/map"),
        ({"small": False}, "Use --data DIR with the files of MNIST"),
        ({"set": ("lr",)}, "takes name=value, got 'lr'"),
        ({"set": ("speed=3",)}, "Unknown option 'speed'"),
        ({"set": ("batch_size=0",)}, "batch_size must be at least 1, got 0"),
        ({"set": ("batch_size=x",)}, "batch_size"),
        ({"set": ("seed=3",)}, "Use --seed 3 instead"),
        ({"rows": ("*/fc/map", "fcc/*")}, "No row matches fcc"),
        ({"figure": Path(__file__)}, "Cannot write to .*test_ella.py"),
        ({"events": Path(__file__) / "x"}, "Cannot write to"),
        ({"json": Path(__file__) / "x"}, "Cannot write to"),
        ({"merge": (Path("none.json"),)}, "No such result files: none"),
        ({"device": "cuda:99", "rows": ("*/fc/map",)}, "Device 'cuda:99' is not available"),
    ],
)
def test_options_that_match_nothing_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ella_tables.TABLE_1.run(Options(**{"small": True, **change}))  # type: ignore[arg-type]


def test_tiny_tables_as_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One epoch of two rows by each of the two ways in; the second only adds to the first."""
    arguments = ["--small", "--epochs", "1", "--json", str(tmp_path / "a.json")]
    arguments += ["--events", str(tmp_path), "--rows"]
    command = [sys.executable, "-m", "symrazor.experiments", "ella-table1", *arguments]
    process = subprocess.run(
        [*command, "quadrant/conv/map"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "| quadrant/conv/map | " in process.stdout
    (x, y), test = ella_tables.data_1("digit", Options(small=True))
    small_table = replace(ella_tables.TABLE_1, data=lambda *_: ((x[:150], y[:150]), test))
    monkeypatch.setattr(ella_tables, "TABLE_1", small_table)
    cli.run(["experiment", "ella-table1", *arguments, "digit/f-fc+conv/laplace"])
    text = capsys.readouterr().out
    assert "| quadrant/conv/map | " in text and "| digit/f-fc+conv/laplace | " in text
    runs = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert [run["row"] for run in runs] == ["digit/f-fc+conv/laplace", "quadrant/conv/map"]
    assert [len(run["free_shares"]) for run in runs] == [5, 5]
    assert runs[1]["free_shares"] == [0.0] * 5
    assert runs[0]["reading"]["train"]["epochs"] == 1
    (event,) = read_events(tmp_path / "digit_f-fc+conv_laplace-0.jsonl")
    assert event == runs[0]["history"][0]


def test_command_without_data_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["ella-table2"])
    assert stopped.value.code == 2
    assert "Use --data DIR with the files of CIFAR-10" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("table", [ella_tables.TABLE_1, ella_tables.TABLE_2], ids=["1", "2"])
def test_small_tables(table, tmp_path: Path) -> None:
    """Every row, minutes in all; what is learned on table 1 is what the paper says."""
    file = tmp_path / "a.json"
    text = table.run(Options(small=True, json=file))
    runs = {run["row"]: run for run in read_runs(table.name, file)}
    assert list(runs) == sorted(row.name for row in table.rows)
    assert not [run for run in runs.values() if "error" in run], text
    if table is ella_tables.TABLE_1:
        assert runs["quadrant/conv/laplace"]["accuracy"] < 35
        assert runs["digit/f-fc+conv/laplace"]["accuracy"] > 70
        assert runs["quadrant/f-fc+conv/laplace"]["accuracy"] > 50


# --------------------------------------------------------------------------------------- table 3
