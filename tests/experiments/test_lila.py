"""Experiments on learned invariances: their small versions run, merge and refuse."""

import json
from pathlib import Path

import pytest
import torch

from symrazor.bench import augment as augment_bench
from symrazor.cli import app as cli
from symrazor.experiments import lila, lila_recovery, lila_resnet, lila_small_data
from symrazor.experiments.__main__ import main


def _command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cli.run(["experiment", *arguments])
    return capsys.readouterr().out


def test_recovery_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    small = ("lila-recovery", "--small", "--n", "40", "--epochs", "2", "--json", str(file))
    text = _command(capsys, *small, "--rows", "flip 1/*", "--average", "probabilities")
    assert [line.split(" | ")[1] for line in text.splitlines()[2:]] == [*lila_recovery.METHODS]
    second_text = _command(capsys, *small, "--rows", "rotation 0/none")
    assert "| flip 1 | learned | left-right flip (probability)" in second_text
    runs = json.loads(file.read_text())["runs"]
    assert [r["average"] for r in runs if r["row"] == "flip 1/learned"] == ["probabilities"]
    assert len(runs) == 5 and all(len(r["starts"]) == 2 for r in runs if "starts" in r)


def test_small_data_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    options = ("--small", "--epochs", "1", "--rows", "mnist/100/a*", "--json", str(file))
    text = _command(capsys, "lila-small-data", *options)
    assert "| mnist | 100 | augerino |" in text
    assert file.with_suffix(".png").is_file()


def test_resnet_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    options = ("--small", "--n", "24", "--epochs", "1", "--json", str(file))
    text = _command(capsys, "lila-resnet", *options)
    assert "| learned | rotation" in text and "| none |" in text
    narrow, wide, none = json.loads(file.read_text())["runs"]
    assert set(narrow["widths"]) == {*lila_resnet.STARTS["learned/narrow"]} and not none["widths"]
    best = min(narrow, wide, key=lambda r: r["evidence"])
    (learned,) = [line for line in text.splitlines() if line.startswith("| learned |")]
    assert f" {best['nll']:.4g} | {best['evidence']:.4g} |" in learned


@pytest.mark.parametrize("name", ["lila_recovery", "lila_resnet"])
def test_unknown_rows_raise(name: str) -> None:
    module = {"lila_recovery": lila_recovery, "lila_resnet": lila_resnet}[name]
    with pytest.raises(ValueError, match="No row matches"):
        module.run(lila.Options(small=True, rows=("nonsense",)))


def test_missing_data_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="Use --data DIR"):
        lila_small_data.run(lila.Options(rows=("mnist/312/none",)))
    with pytest.raises(SystemExit, match="2"):
        main(["lila-resnet", "--rows", "none"])
    assert "Use --data DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["lila-resnet", "--average", "medians"])


def test_bench_of_widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment_bench, "SAMPLES", 2)
    monkeypatch.setattr(augment_bench, "fresh_peak", lambda *_: 1.0)
    file = tmp_path / "rows.json"
    rows = augment_bench.main(1, file, alpha=1, n=4, batch=2)
    assert [row["variant"] for row in json.loads(file.read_text())] == [r.variant for r in rows]
    assert rows[0].ratio_cpu == 1 and all(r.ratio_cpu > 0 and 0 < r.of_batch < 1 for r in rows)
    assert [r.variant for r in rows if r.goal] == [augment_bench.GOAL]
    assert 0 <= augment_bench.first_peak(1, "SGD epoch", 4, 2, torch.get_num_threads()) < 1000
