"""Test the figures of the invariant-weights paper."""

import json
from pathlib import Path

from symrazor.experiments import liw_figures
from symrazor.experiments.liw import Options
from symrazor.experiments.results import read_runs


def test_figures_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    liw_figures.run(Options(small=True, device="cpu", json=file, rows=("bank",), steps=6))
    assert (tmp_path / "figure3.png").read_bytes().startswith(b"\x89PNG")
    (run,) = read_runs("liw-figures", file)
    assert run["row"] == "bank/fully rotated/5/vi"
    json.dumps(run, allow_nan=False)
