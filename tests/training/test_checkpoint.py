"""Test that interrupted runs continue bit for bit, the checkpoint files, and signals."""

import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_job import CASES, Interrupted, outcome, run, short_fit, small_fit
from safetensors.torch import load_file
from torch import Tensor, nn

import symrazor as sr
from symrazor.training.checkpoint import Checkpoints, fingerprint

JOB = Path(__file__).parents[1] / "support" / "resume_job.py"
STEPS = 60  # of a whole run: 12 epochs of 5


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def _uninterrupted(case: str) -> dict[str, Any]:
    return outcome(run(case))


def _stop(case: str, directory: Path, number: int, step: int, **options: Any) -> None:
    """Run in this process until a signal stops it."""
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(expected) as error:
        run(case, resume=directory, augment=Interrupted(number, step), **options)
    if number == signal.SIGTERM:
        assert error.value.code == 143


# Resumed runs.


QUICK = [("relaxed", "SIGTERM"), ("adamw", "SIGKILL"), ("augmented", "SIGKILL")]
"""Cases in separate processes; `test_repeatedly_stopped_run` covers all cases in this process."""


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow])
        for pair in itertools.product(CASES, ("SIGTERM", "SIGKILL"))
    ],
)
def test_killed_process_resumes_bit_for_bit(case: str, name: str, tmp_path: Path) -> None:
    """Send a real signal to a real process at a random step."""
    step = random.Random(f"{case} {name}").randrange(16, STEPS)
    command = [sys.executable, str(JOB), case, str(tmp_path), name, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    saved = Checkpoints(tmp_path).load()
    assert saved is not None
    if name == "SIGTERM":
        assert done.returncode == 143, done.stderr
        assert f"Stopped by SIGTERM after step {step} of 60" in done.stderr
        assert f"resume='{tmp_path}'" in done.stderr
        assert saved["step"] == step
    else:
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert step - 15 <= saved["step"] < step  # at most the last interval, 3 epochs
    assert outcome(run(case, resume=tmp_path)) == _uninterrupted(case)


def test_kill_while_saving_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(JOB), "adamw", str(tmp_path), "SIGKILL", "-3"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".unfinished.")]
    saved = Checkpoints(tmp_path).load()
    assert saved is not None
    assert saved["epoch"] == 3
    assert outcome(run("adamw", resume=tmp_path)) == _uninterrupted("adamw")
    assert all(p.name.startswith("step-") for p in tmp_path.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_repeatedly_stopped_run(case: str, tmp_path: Path) -> None:
    """Stop at every third of the first 30 steps, at the end and within epochs."""
    for number in 5 * [signal.SIGTERM, signal.SIGINT]:
        _stop(case, tmp_path, number, 3)
    saved = Checkpoints(tmp_path).load()
    assert saved is not None
    assert saved["step"] == 30
    assert outcome(run(case, resume=tmp_path)) == _uninterrupted(case)


def test_saving_changes_nothing_and_a_finished_run_is_restored(tmp_path: Path) -> None:
    calls: list[dict[str, float]] = []
    first = run("sgd", save=tmp_path, callbacks=[calls.append])
    assert outcome(first) == _uninterrupted("sgd")
    assert [record["epoch"] for record in calls] == list(range(1, 13))
    again = run("sgd", resume=tmp_path, callbacks=[calls.append])
    assert outcome(again) == _uninterrupted("sgd")
    assert len(calls) == 12
    assert again.history == first.history
    assert str(again.reading) == str(first.reading)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_channels_last_weights_resume_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    def train(**options: Any) -> dict[str, Any]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        x, y = torch.randn(40, 3, 6, 6), torch.randint(0, 2, (40,))
        body = [nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        model = nn.Sequential(*body, nn.Linear(5, 2)).to(memory_format=torch.channels_last)
        options = {"epochs": 8, "batch_size": 8, "every": 2, "optimizer": optimizer} | options
        return outcome(sr.fit(model, (x, y), **options))

    def stop(x: Tensor, generator: torch.Generator) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return x

    same = {"augment": lambda x, generator: x}
    with pytest.raises(SystemExit):
        train(save=tmp_path, augment=stop)
    assert train(resume=tmp_path, **same) == train(**same)


# Files.


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    run("adamw", save=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000045-epoch-0009", "step-00000060-epoch-0012"]
    newest = tmp_path / names[-1]
    assert sorted(p.name for p in newest.iterdir()) == ["state.json", "tensors.safetensors"]
    document = json.loads((newest / "state.json").read_text())
    assert document["schema"] == 2
    assert document["versions"]["torch"] == torch.__version__
    assert document["state"]["step"] == 60
    assert len(document["state"]["history"]) == 12
    tensors = load_file(newest / "tensors.safetensors")
    assert {
        "model/inner.weight",
        "model/frequency.raw",
        "optimiser/state/0/exp_avg",
        "razor/prior/log_precision.0",
        "razor/likelihood/noise.raw",
        "razor/best_state/model/inner.weight",
        "razor/generator",
        "rng/shuffle",
        "rng/augment_cpu",
        "rng/torch",
    } <= set(tensors)


def test_states_are_restored_exactly(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    state = {
        "views": {"a": shared, "b": shared.T, "empty": torch.zeros(0, 2), "scalar": shared[0, 1]},
        "kinds": [torch.tensor([True]), torch.tensor(1, dtype=torch.int64), None, "text", 0.1],
        "by number": {3: {"x": torch.ones(1, dtype=torch.bfloat16)}, 0: {}},
        "nothing": {},
    }
    Checkpoints(tmp_path / "new" / "run").save(state, 7, 1)
    again = Checkpoints(tmp_path / "new" / "run").load()
    assert again is not None
    for name, value in state["views"].items():
        assert torch.equal(again["views"][name], value)
        assert again["views"][name].dtype == value.dtype
    assert [type(v) for v in again["kinds"]] == [type(v) for v in state["kinds"]]
    assert again["kinds"][2:] == state["kinds"][2:]
    assert again["by number"][3]["x"].dtype == torch.bfloat16
    assert set(again["by number"]) == {0, 3}
    assert again["nothing"] == {}


def test_fingerprint_depends_on_every_value_and_the_order() -> None:
    x, y = torch.randn(2000, 3), torch.randint(0, 2, (2000,))
    same = fingerprint(x, y)
    assert fingerprint(x.clone(), y.clone()) == same
    assert fingerprint(x.T.contiguous().T, y) == same
    changed = x.clone()
    changed[1999, 2] += 1e-3
    assert fingerprint(changed, y) != same
    assert fingerprint(x.flip(0), y.flip(0)) != same
    assert fingerprint(x.reshape(1000, 6), y) != same
    assert fingerprint(x, y.int()) != same


# Signals.


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        _stop("sgd", tmp_path, signal.SIGTERM, 2)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        run("sgd", resume=tmp_path)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_second_sigint_takes_effect_at_once(tmp_path: Path) -> None:
    def impatient(x: Tensor, generator: torch.Generator) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("never reached")

    with pytest.raises(KeyboardInterrupt):
        run("sgd", save=tmp_path, augment=impatient)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000-epoch-0000"]


def test_signals_are_unchanged_without_checkpoints() -> None:
    seen = []

    def look(record: dict[str, float]) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    small_fit(None, epochs=1, callbacks=[look])
    assert seen == [signal.default_int_handler]


def test_fit_in_another_thread_saves_without_signal_handlers(tmp_path: Path) -> None:
    done = []
    thread = threading.Thread(target=lambda: done.append(short_fit(tmp_path)))
    thread.start()
    thread.join()
    assert len(done) == 1
    assert Checkpoints(tmp_path).load() is not None


def test_sigterm_in_the_last_epoch_ends_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def last(record: dict[str, float]) -> None:
        if record["epoch"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit):
        short_fit(tmp_path, callbacks=[last])
    assert "after step 6 of 6" in caplog.text
    assert len(short_fit(tmp_path).history) == 2
