"""Files and commands of the experiments on conserved quantities, with minimal training."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from symrazor.experiments import (
    noether,
    noether_controls,
    noether_discover,
    noether_systems,
)

KEYS = ("parallelness", "singular_values", "test_mse", "neg_elbo_per_datum")


def test_ratios_only_between_models_that_were_run() -> None:
    """Ratios over several seeds are ratios of means."""
    row = {"seed": 0, "neg_elbo_per_datum": 0.0, "nll_per_datum": 0.0, "kl_per_datum": 0.0}
    row |= {"seconds": 1.0}
    errors = {"learned": [1.0, 3.0], "hnn": [6.0, 4.0]}
    rows = [row | {"model": m, "test_mse": e} for m, pair in errors.items() for e in pair]
    text = noether.markdown(rows, [])
    assert text.splitlines()[-1] == "test MSE: hnn / learned 2.500"
    rows = [entry for entry in rows if entry["model"] == "learned"]
    assert "MSE:" not in noether.markdown(rows, [])


def _cells(table: str) -> list[str]:
    """Return the cells of the first row of a markdown table."""
    return [text.strip() for text in table.splitlines()[2].split("|")[1:-1]]


def test_tables_show_none_for_missing_values() -> None:
    """A plain network has no conserved quantities."""
    row = {"model": "hnn", "seed": 0, "seconds": 1.0, "dimension": 0, "conserved": 0}
    row |= {"singular_values": [], "parallelness": [], "drift": None, "test_mse": 0.5}
    row |= {"neg_elbo_per_datum": 0.1, "nll_per_datum": 0.2, "kl_per_datum": 0.3}
    row |= {"span": 0, "known": 1, "discovered": {"conserved": [], "n_data": 10}}
    row |= {"plain_neg_elbo_per_datum": 0.1}
    known = ["hnn", "0", "0.100", "0.200", "0.300", "0.5"]
    cells = _cells(noether.markdown([row], []))
    assert cells == [*known, "none", "none", "0", "none", "none", "1"]
    bare = {key: value for key, value in row.items() if key != "span"}
    assert _cells(noether.markdown([bare], []))[8] == "none"
    cells = _cells(noether_controls.markdown([row]))
    assert cells == ["hnn", "0", "0", "0", "none", "none", "none", "1"]


def test_table_of_discoveries() -> None:
    entry = {"name": "energy", "formula": "0.5 p^2 - cos q"}
    row = {"model": "pendulum", "seed": 0, "conserved": 1, "by": "noise test", "recovered": []}
    row |= {"simulator": "own", "rollouts": {"own": 0.1, "linear": 0.3, "sparse": 0.2}}
    row |= {"discovered": {"conserved": [entry]}, "seconds": 1.4}
    cells = _cells(noether_discover.markdown([row]))
    assert cells == ["pendulum", "0", "1", "noise test", "energy", "none", "0.1", "0.2", "1"]


def test_missing_drift_is_left_out_of_the_mean() -> None:
    rows = [{"model": "a", "seed": seed, "drift": d} for seed, d in enumerate((None, 0.5, 1.5))]
    assert noether.document(noether.Options(device="cpu"), "x", rows)["models"]["a"]["drift"] == 1.0


def test_quantity_drift_is_none_without_conserved_quantities() -> None:
    options = noether.Options(small=True, device="cpu", steps=2, set=("flows=2",))
    problem = noether_systems.oscillator(options, 0)
    trained = noether.train_model(problem, "hnn", noether.with_options(problem.config, options, 0))
    assert noether_controls.quantity_drift(trained, problem.held_out) is None


def test_oscillator_results_have_all_keys(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    options = noether.Options(small=True, device="cpu", json=file, steps=4)
    text = noether_systems.run_oscillator(options)
    document = json.loads(file.read_text())
    assert all(key in document for key in KEYS)
    assert set(document["models"]) == {"hnn", "learned", "oracle"}
    assert [run["model"] for run in document["runs"]] == ["hnn", "learned", "oracle"]
    for model in document["models"].values():
        assert all(key in model["seeds"]["0"] for key in KEYS)
    assert document["test_mse"] == document["models"]["learned"]["seeds"]["0"]["test_mse"]
    assert document["models"]["oracle"]["total_parallelness"] == pytest.approx(1.0)
    assert "learned / oracle" in text and "Paper" in text


@pytest.mark.slow
def test_other_experiments_run(tmp_path: Path) -> None:
    common: Any = {"small": True, "device": "cpu", "steps": 2, "set": ("draws=2", "flows=2")}
    noether_systems.run_n_oscillators(
        noether_systems.OscillatorsOptions(
            **common, models=("learned",), json=tmp_path / "n.json", n=(1, 2)
        )
    )
    document = json.loads((tmp_path / "n-2.json").read_text())
    assert len(document["runs"][0]["recovered"]) == 4
    bodies = noether_systems.BodiesOptions(
        **common, models=("oracle",), json=tmp_path / "b.json", noise=1e-2
    )
    assert "moved" in noether_systems.run_bodies(bodies)
    text = noether_controls.run(noether_controls.Options(**common, json=tmp_path / "c.json"))
    assert all(row in text for row in noether_controls.ROWS)
    document = json.loads((tmp_path / "c.json").read_text())
    assert set(document["models"]) == set(noether_controls.ROWS) and "test_mse" not in document


def test_single_control_has_its_results_at_the_top_level(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    common: Any = {"small": True, "device": "cpu", "steps": 2, "set": ("flows=2",)}
    noether_controls.run(noether_controls.Options(**common, json=file, rows=("likelihood",)))
    document = json.loads(file.read_text())
    assert all(key in document for key in KEYS)


def test_discover_experiment_has_a_row_per_system(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    options = noether_discover.Options(
        small=True, device="cpu", json=file, rows=("pendulum", "anisotropic"), seed=(0,)
    )
    text = noether_discover.run(options)
    document = json.loads(file.read_text())
    runs = {run["model"]: run for run in document["runs"]}
    assert "| pendulum | 0 | 1 | noise test | energy |" in text
    assert (runs["pendulum"]["known"], runs["anisotropic"]["known"]) == (0, 2)
    assert min(runs["anisotropic"]["recovered"]) > 0.99


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("noether-nbody", ("--models", "--noise")),
        ("noether-n-oscillators", ("--models", "--n")),
        ("noether-controls", ("--rows",)),
    ],
)
def test_help_lists_every_option(name: str, extra: tuple[str, ...]) -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "symrazor.experiments", name, "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for option in ("--small", "--device", "--seed", "--json", "--steps", "--set", *extra):
        assert f"{option} " in help_text or f"[{option}]" in help_text


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (
            noether_systems.run_oscillator,
            noether.Options(models=("gp",)),
            "Unknown model .gp.. Choose from",
        ),
        (
            noether_systems.run_oscillator,
            noether.Options(set=("lr",)),
            "--set takes name=value, got 'lr'",
        ),
        (
            noether_systems.run_oscillator,
            noether.Options(set=("speed=1",)),
            "--set speed: TrainConfig has no such option",
        ),
        (
            noether_controls.run,
            noether_controls.Options(rows=("planets",)),
            "No row matches planets. Rows: pendulum",
        ),
        (
            noether_discover.run,
            noether_discover.Options(rows=("planets",)),
            "No row matches planets. Rows: two-bodies",
        ),
    ],
)
def test_invalid_options_raise(run: Callable[..., str], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(replace(options, small=True, steps=1, device="cpu"))
