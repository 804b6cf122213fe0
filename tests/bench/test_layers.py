"""Test the benchmark of layers on two samples."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from symrazor.bench import layers as layers_bench


def test_bench_layers_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two samples, and skip the processes that measure memory."""
    monkeypatch.setitem(layers_bench.COMPARISONS, "layers", lambda: layers_bench.layers(batch=2))
    monkeypatch.setattr(layers_bench, "fresh_peak", lambda *_: 1.0)
    file = tmp_path / "rows.json"
    rows = layers_bench.main(1, file, threads=1, only=["layers"])
    assert [(row.variant, row.goal) for row in rows[:2]] == [
        ("3 x 3 convolution", None),
        ("F-FC", 1.1),
    ]
    assert rows[0].ratio_cpu == rows[0].ratio_wall == 1
    assert json.loads(file.read_text()) == [asdict(row) for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bench_layers_as_a_command(tmp_path: Path) -> None:
    """F-FC needs less time and memory than FC."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "symrazor", "bench", "layers", "--rounds", "1"]
    subprocess.run([*command, "--json", str(file)], check=True)
    rows = {(r["comparison"], r["variant"]): r for r in json.loads(file.read_text())}
    layers = {v: r for (c, v), r in rows.items() if c == "forward+backward"}
    assert layers["F-FC"]["peak_mb"] < layers["FC"]["peak_mb"]
    assert layers["F-FC"]["ratio_cpu"] < layers["FC"]["ratio_cpu"]
