"""The experiments of Learning Invariant Weights, a few steps of each on the embedded digits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from symrazor.data import rings
from symrazor.experiments import liw_figures, liw_table1, liw_tables
from symrazor.experiments.__main__ import main
from symrazor.experiments.liw import Options, load, save
from symrazor.experiments.results import read_runs
from symrazor.invariance import AffineLie


def test_table_1_shows_the_papers_figures(tmp_path: Path) -> None:
    file = tmp_path / "table1.json"
    rows = ("regular/learned", "regular/fixed 45")
    options = Options(small=True, device="cpu", json=file, rows=rows, steps=12)
    text = liw_table1.run(options)
    assert "| learned |" in text
    assert "| 96.40 |" in text
    fixed, learned = read_runs("liw-table1", file)
    assert fixed["widths"]["rotation (degrees)"] == pytest.approx(45, abs=1e-3)
    start = learned["degrees"][0]
    assert any(start == pytest.approx(angle, abs=0.01) for angle in liw_table1.ANGLES)
    assert learned["degrees"][-1] != pytest.approx(start, abs=0.1)
    assert learned["elbo_per_datum"] < learned["fit_per_datum"] < 0


def test_table_2_opens_only_the_generators_of_a_row(tmp_path: Path) -> None:
    file = tmp_path / "table2.json"
    rows = ("scaled/MLP", "scaled/translation")
    text = liw_tables.TABLE_2.run(Options(small=True, device="cpu", json=file, rows=rows, steps=6))
    assert "| translation |" in text
    plain, moving = read_runs("liw-table2", file)
    assert plain["widths"]["x-translation (px)"] == 0
    assert moving["widths"]["x-translation (px)"] > 0
    assert moving["widths"]["rotation (degrees)"] == 0
    assert liw_tables.masks(["MLP", "scale", "affine"]).sum(1).tolist() == [0, 2, 6]
    assert set(liw_tables.TABLE_3.paper) == set(liw_tables.ROWS)
    assert AffineLie("affine").algebra.names == liw_tables.NAMES


def test_interrupted_table_1_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "table1.json"
    saved_steps: list[int] = []

    def cut(name: str, options: Options, runs: list[dict[str, object]]) -> None:
        save(name, options, runs)
        saved_steps.append(int(str(runs[0]["trained_steps"])))
        if len(saved_steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(liw_table1, "save", cut)
    rows = ("regular/learned",)
    options = Options(
        small=True, device="cpu", json=file, rows=rows, steps=12, batch=20, average="probs"
    )
    with pytest.raises(KeyboardInterrupt):
        liw_table1.run(options)
    (run,) = read_runs("liw-table1", file)
    assert saved_steps == [4, 7]
    assert run["row"] == "regular/learned (probs)"
    assert run["trained_steps"] == 7
    assert run["elbo_per_datum"] < run["fit_per_datum"] < 0


def test_fixed_scales(tmp_path: Path) -> None:
    file = tmp_path / "table1.json"
    arguments = ["--small", "--device", "cpu", "--rows", "regular/fixed 5", "--steps", "8"]
    arguments += ["--average", "probs", "--kept-scale", "3", "--sigma", "0.4", "--json", str(file)]
    main(["liw-table1", *arguments])
    (run,) = read_runs("liw-table1", file)
    assert run["row"] == "regular/fixed 5 (probs, kept scale 3, sigma 0.4)"
    assert run["scale"] == pytest.approx(3.0)
    assert run["sigma"] == pytest.approx(0.4)


@pytest.mark.slow
def test_learned_widths_are_no_worse_than_the_best_fixed_one(tmp_path: Path) -> None:
    """From 5 degrees alone this one stops half way; see `choose_starts`."""
    file = tmp_path / "table1.json"
    rows = ("fully rotated/fixed 175", "fully rotated/learned")
    arguments = Options(small=True, device="cpu", json=file, rows=rows, steps=100)
    liw_table1.run(replace(arguments, average="probs", learn_scales=True))
    best, learned = (run["elbo_per_datum"] for run in read_runs("liw-table1", file))
    assert learned >= best - 0.01


@pytest.mark.slow
def test_the_best_fixed_angle_is_the_papers(tmp_path: Path) -> None:
    """90 degrees on partially rotated digits, 45 on regular ones: neither less nor more."""
    file = tmp_path / "table1.json"
    rows = ("partially rotated/fixed *", "regular/fixed *")
    liw_table1.run(Options(small=True, device="cpu", json=file, rows=rows, steps=80))
    runs = read_runs("liw-table1", file)
    for version, angle in (("partially rotated", 90), ("regular", 45)):
        bounds = {r["row"]: r["elbo_per_datum"] for r in runs if r["row"].startswith(version)}
        assert len(bounds) == len(liw_table1.ANGLES)
        assert max(bounds, key=bounds.__getitem__) == f"{version}/fixed {angle}"


@pytest.mark.slow
def test_table_2_opens_the_rotation_of_rotated_digits_and_nothing_else(tmp_path: Path) -> None:
    """From a little of everything alone it stops at 89 degrees."""
    file = tmp_path / "table2.json"
    liw_tables.TABLE_2.run(
        Options(small=True, device="cpu", json=file, rows=("fully rotated/affine",))
    )
    (run,) = read_runs("liw-table2", file)
    assert max(run["tried"]) == run["tried"][2]
    widths = run["widths"]
    assert widths.pop("rotation (degrees)") > 150
    assert all(value < 0.1 for name, value in widths.items() if "px" in name)
    assert all(value < 1.05 for name, value in widths.items() if "factor" in name)


@pytest.mark.slow
def test_a_start_is_chosen_where_the_gradient_does_not_escape(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    liw_figures.run(Options(small=True, device="cpu", json=file, rows=("escape",)))
    chosen, alone = read_runs("liw-figures", file)
    assert alone["degrees"][-1] > 150
    assert chosen["degrees"][-1] < 120
    assert chosen["elbo_per_datum"] > alone["elbo_per_datum"]


@pytest.mark.slow
def test_rings_tell_the_bound_from_maximum_likelihood(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    liw_figures.run(Options(small=True, device="cpu", json=file, rows=("rings",)))
    ends = {run["row"]: run["degrees"][-1] for run in read_runs("liw-figures", file)}
    assert ends["rings/rings/5/vi"] > 90
    assert ends["rings/rings/5/ml"] < 30
    assert (tmp_path / "rings.png").exists()


def test_diverged_run_is_saved_with_null(tmp_path: Path) -> None:
    file = tmp_path / "table1.json"
    run = {"row": "a", "seed": 0, "small": True, "accuracy": float("nan"), "degrees": [1.0]}
    save("liw-table1", Options(json=file), [run])
    assert read_runs("liw-table1", file) == [run | {"accuracy": None}]


def test_versions_of_the_data() -> None:
    train, test = load("mnist", ("fully rotated", "regular"), Options(small=True, device="cpu"))
    assert train.x.shape[2:] == test.x.shape[2:] == (1, 14, 14)
    assert torch.equal(train.y[0], train.y[1])
    assert not torch.equal(train.x[0], train.x[1])


def test_rings_have_their_radii() -> None:
    x, y = rings(400, 120, noise=0.0, seed=3)
    radius, angle = x.norm(dim=1), torch.atan2(x[:, 1], x[:, 0]).rad2deg()
    assert torch.allclose(radius[y == 0], torch.tensor(0.5))
    outer = radius > 0.7
    assert torch.allclose(radius[outer], torch.tensor(1.0))
    assert float(angle[outer | (y == 0)].abs().max()) <= 60
    with pytest.raises(ValueError, match="degrees <= 360"):
        rings(10, 400)


def test_wrong_options_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["liw-table1", "--rows", "regular/fixed 7", "--small"])
    assert stop.value.code == 2
    assert "Rows: fully rotated/fixed 5, " in capsys.readouterr().err
    with pytest.raises(ValueError, match="--kept-scale and --sigma have an effect on Table 1"):
        liw_tables.TABLE_2.run(Options(small=True, device="cpu", kept_scale=3.0))
    with pytest.raises(ValueError, match="must be positive, got 0"):
        Options(kept_scale=0.0)
    with pytest.raises(ValueError, match="--kept-scale and --learn-scales exclude each other"):
        Options(kept_scale=3.0, learn_scales=True)
    with pytest.raises(ValueError, match="Use --data DIR"):
        liw_tables.TABLE_2.run(Options(device="cpu"))
    with pytest.raises(ValueError, match="Rows: rings, recovery"):
        liw_figures.run(Options(small=True, rows=("figure 9",)))
