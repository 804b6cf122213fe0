"""Test the figures of the ELLA paper."""

from dataclasses import replace
from pathlib import Path

import pytest

from symrazor.experiments import ella_figures, ella_tables
from symrazor.experiments.ella import Options
from symrazor.experiments.results import read_runs


def test_figures_show_the_shares_and_curves_of_a_run(tmp_path: Path) -> None:
    """A real run of two epochs: curves add up to the reading, files are pictures."""
    file, row = tmp_path / "runs.json", "digit/f-fc+conv/laplace"
    arguments = ("every=1", "burn_in=0", "switch_off=false")
    options = Options(small=True, rows=(row,), json=file, epochs=2, set=arguments)
    (x, y), test = ella_tables.data_1("digit", options)
    small_table = replace(ella_tables.TABLE_1, data=lambda *_: ((x[:150], y[:150]), test))
    small_table.run(replace(options, device="cpu", figure=tmp_path))
    run = read_runs("ella-table1", file)[0]
    result = ella_figures.shares([run, run])
    assert list(result) == ["Conv", "FFC"] and len(result["Conv"]) == 5
    assert [1 - conv[0] for conv in result["Conv"]] == pytest.approx(run["free_shares"])
    gamma = ella_figures.curves(run, "effective_parameters")
    assert gamma.keys() == {(kind, n) for kind in ("Conv", "FFC") for n in range(1, 6)}
    last = run["history"][-1]["effective_parameters"]
    heads = [value for name, value in last.items() if ".paths." not in name]
    assert sum(c[-1][1] for c in gamma.values()) + sum(heads) == pytest.approx(sum(last.values()))
    precision = ella_figures.curves(run, "precisions")["FFC", 1]
    assert precision[-1] == (2, run["history"][-1]["precisions"]["0.paths.1"])
    run["history"][-1]["off"] = ["0.paths.1"]
    assert ella_figures.curves(run, "precisions")["FFC", 1] == precision[:-1]
    assert ella_figures.curves(run, "effective_parameters") == gamma
    names = ("digit-f-fc_conv-laplace-shares", "digit-f-fc_conv-laplace-training")
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
