"""Test the writers of records: JSON lines that survive a kill, TensorBoard scalars."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor.data import digits
from symrazor.inference.evidence import record_of
from symrazor.training.events import JsonLines, TensorBoard, read_events, scalars

RECORD: dict[str, Any] = {"epoch": 3, "nll": 0.25, "precisions": {"0.weight": 2.0, "é": 1.0}}


@pytest.fixture(scope="module")
def fit() -> sr.Fit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    x, y = digits("train")
    return sr.fit(model, (x[:200], y[:200]), test=digits("test"), epochs=4, every=2)


def test_record_of_an_evidence_step(fit: sr.Fit) -> None:
    record = record_of(fit.razor, fit.evidence)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert set(record["precisions"]) == set(fit.razor.prior.names)
    assert record["precisions"]["1.weight"] == float(fit.razor.prior.precisions["1.weight"])
    assert record["effective_parameters"] == fit.evidence.effective_parameters
    parts = record["log_likelihood"] - record["complexity"]
    assert record["log_evidence"] == pytest.approx(parts, rel=1e-12)
    assert fit.evidence.to_dict().items() <= record.items()


def test_one_precision_per_weight_is_recorded_as_the_mean() -> None:
    razor = sr.Razor(nn.Linear(2, 2), "categorical", 5, structure="diag", prior_groups="diagonal")
    x, y = torch.eye(2).repeat(3, 1)[:5], torch.tensor([0, 1, 0, 1, 0])
    evidence = razor.step([(x, y)])
    expected = float(razor.prior.precisions["weight"].mean())
    assert record_of(razor, evidence)["precisions"]["weight"] == expected


def test_json_lines_contain_the_history(fit: sr.Fit, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "events.jsonl"
    write = JsonLines(path)
    assert read_events(path) == []
    for record in fit.history:
        write(record)
    assert read_events(path) == fit.history
    JsonLines(path)({"epoch": 5})  # another process goes on
    assert [record["epoch"] for record in read_events(path)] == [1, 2, 3, 4, 5]


def test_writers_as_callbacks_of_fit(tmp_path: Path) -> None:
    x, y = digits("train")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    write = JsonLines(tmp_path / "events.jsonl")
    fit = sr.fit(model, (x[:100], y[:100]), epochs=3, every=2, callbacks=[write])
    assert read_events(write.path) == fit.history


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    JsonLines(path)({"epoch": 1, "nll": math.nan, "tensor": torch.tensor(2.0), "path": tmp_path})
    assert read_events(path) == [{"epoch": 1, "nll": None, "tensor": 2.0, "path": str(tmp_path)}]


def test_truncated_line_is_completed_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    JsonLines(path)({"epoch": 2})
    first = path.read_bytes()
    JsonLines(path)(RECORD)
    whole = path.read_bytes()
    for cut in range(len(first), len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = [{"epoch": 2}, RECORD] if cut >= len(whole) - 1 else [{"epoch": 2}]
        assert read_events(path) == kept  # before it is repaired
        write = JsonLines(path)
        assert path.read_bytes() in (first, whole)
        path.write_bytes(whole[:cut])  # cut behind the back of an open writer: a full disk
        write({"epoch": 4})
        assert read_events(path) == [*kept, {"epoch": 4}]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_killed_writer_loses_no_finished_record(tmp_path: Path) -> None:
    path, done = tmp_path / "events.jsonl", tmp_path / "done"
    script = (
        "import itertools, pathlib; from symrazor.training.events import JsonLines\n"
        f"write, done = JsonLines({str(path)!r}), pathlib.Path({str(done)!r})\n"
        "for epoch in itertools.count(1):\n"
        "    write({'epoch': epoch, 'ballast': 'x' * 10000}); done.write_text(f'{epoch} ')\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], env={**os.environ})
    try:
        while not done.exists() and child.poll() is None:
            time.sleep(0.01)
        time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    JsonLines(path)({"epoch": 0})
    epochs = [record["epoch"] for record in read_events(path)]
    assert epochs[:-1] == list(range(1, len(epochs)))
    assert epochs[-1] == 0
    finished = done.read_text().split(" ")[0]  # empty if killed between truncating and writing it
    assert len(epochs) > 1
    assert not finished or len(epochs) - 1 >= int(finished)


def test_invalid_line_is_reported_by_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"epoch": 1}\n[2]\n{"epoch": 3}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        read_events(path)
    with pytest.raises(OSError):
        JsonLines(tmp_path)


def test_tags_of_scalars(fit: sr.Fit) -> None:
    result = scalars({**fit.history[-1], **record_of(fit.razor, fit.evidence), "note": "text"})
    assert result["evidence/fit"] == float(fit.evidence.log_likelihood)
    assert result["evidence/complexity"] == float(fit.evidence.complexity)
    assert result["train/nll"] == fit.history[-1]["nll"]
    assert result["test/accuracy"] == fit.history[-1]["test_accuracy"]
    assert result["precision/1.bias"] == float(fit.razor.prior.precisions["1.bias"])
    assert result["effective_parameters/1.weight"] > 0
    assert not {"train/epoch", "train/note", "train/log_det", "train/log_prior"} & set(result)
    bare = scalars(fit.evidence.to_dict())
    assert bare["evidence/complexity"] == pytest.approx(float(fit.evidence.complexity))


def test_tensorboard_reads_the_scalars(fit: sr.Fit, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path / "run")
    first.close()  # before any record: nothing to do
    for record in fit.history:
        first(record)
    first.close()
    time.sleep(1.1)  # event files are ordered by the second in their name
    resumed = TensorBoard(tmp_path / "run")
    resumed({"epoch": 4, "nll": 7.0})
    resumed.close()
    board = EventAccumulator(str(tmp_path / "run")).Reload()
    assert "evidence/log_evidence" in board.Tags()["scalars"]
    points = [(event.step, event.value) for event in board.Scalars("train/nll")]
    assert points == [(r["epoch"], pytest.approx(r["nll"])) for r in fit.history[:3]] + [(4, 7.0)]
    accuracy = [event.value for event in board.Scalars("test/accuracy")]
    measured = [r["test_accuracy"] for r in fit.history[:3] if "test_accuracy" in r]
    assert measured
    assert accuracy == pytest.approx(measured)


def test_missing_tensorboard_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install symrazor\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_unwritable_tensorboard_directory_fails_before_training(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.touch()
    with pytest.raises(ValueError, match="Cannot write to .*a.txt"):
        TensorBoard(file)
