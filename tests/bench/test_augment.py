"""Test the benchmark of learned augmentation ranges."""

import json
from pathlib import Path

import pytest
import torch

from symrazor.bench import augment as augment_bench


def test_bench_of_widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment_bench, "SAMPLES", 2)
    monkeypatch.setattr(augment_bench, "fresh_peak", lambda *_: 1.0)
    file = tmp_path / "rows.json"
    rows = augment_bench.main(1, file, alpha=1, n=4, batch=2)
    assert [row["variant"] for row in json.loads(file.read_text())] == [r.variant for r in rows]
    assert rows[0].ratio_cpu == 1 and all(r.ratio_cpu > 0 and 0 < r.of_batch < 1 for r in rows)
    assert [r.variant for r in rows if r.goal] == [augment_bench.GOAL]
    assert 0 <= augment_bench.first_peak(1, "SGD epoch", 4, 2, torch.get_num_threads()) < 1000
