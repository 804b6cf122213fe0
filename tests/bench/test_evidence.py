"""Test the benchmark of evidence estimates on a few samples."""

import json
from pathlib import Path

import pytest
from command import Call

from symrazor.bench import evidence as evidence_bench


def test_bench_evidence_writes_its_rows(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use few samples, and skip the processes that measure memory."""
    monkeypatch.setattr(evidence_bench, "data", lambda n, data=evidence_bench.data: data(n // 16))
    monkeypatch.setattr(evidence_bench, "fresh_peak", lambda *_: 1.0)
    file = tmp_path / "rows.json"
    sizes = ["--alphas", "1", "--rounds", "1", "--paddings", "circular"]
    process = call("bench", "evidence", *sizes, "--json", str(file))
    assert process.returncode == 0, process.stderr
    rows = json.loads(file.read_text())
    keys = ["net", "alpha", "padding", "estimator", "ratio_cpu", "ratio_wall", "peak_mb"]
    assert all(list(row) == [*keys, "log_evidence"] for row in rows)
    values = {row["estimator"]: row["log_evidence"] for row in rows}
    assert values["one probe"] == pytest.approx(values["exact"], rel=0.01)
