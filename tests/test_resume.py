"""Runs that are stopped and go on: bit for bit, or refused with a reason."""

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
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import symrazor as sr
from resume_job import CASES, Interrupted, jitter, run
from symrazor.checkpoint import Checkpoints, fingerprint

JOB = Path(__file__).parent / "resume_job.py"
STEPS = 60  # of a whole run: 12 epochs of 5


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _outcome(fit: sr.Fit) -> dict[str, Any]:
    """Everything that has to be equal to the last bit; seconds are not."""
    return {
        "history": [{k: v for k, v in r.items() if k != "seconds"} for r in fit.history],
        "weights": {k: v.tolist() for k, v in fit.model.state_dict().items()},
        "precisions": {k: v.tolist() for k, v in fit.razor.prior.precisions.items()},
        "likelihood": {k: v.tolist() for k, v in fit.razor.likelihood.state_dict().items()},
        "evidence": fit.evidence.to_dict(),
        "effective": fit.evidence.effective_parameters,
        "test": fit.reading.test,
    }


@cache
def _uninterrupted(case: str) -> dict[str, Any]:
    return _outcome(run(case))


def _stop(case: str, directory: Path, number: int, step: int, **options: Any) -> None:
    """Run in this process until a signal ends it."""
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(expected) as error:
        run(case, resume=directory, augment=Interrupted(number, step), **options)
    if number == signal.SIGTERM:
        assert error.value.code == 143


# Bit for bit.


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_killed_process_goes_on_bit_for_bit(case: str, name: str, tmp_path: Path) -> None:
    """A real process and a real signal at a random step; what is lost is done again."""
    step = random.Random(f"{case} {name}").randrange(16, STEPS)
    command = [sys.executable, str(JOB), case, str(tmp_path), name, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    saved = Checkpoints(tmp_path).load()
    assert saved is not None
    if name == "SIGTERM":
        assert done.returncode == 143, done.stderr
        assert f"stopped by SIGTERM after step {step} of 60" in done.stderr
        assert f"fit(..., resume='{tmp_path}')" in done.stderr
        assert saved["step"] == step
    else:
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert step - 15 <= saved["step"] < step  # at most the last interval, 3 epochs
    assert _outcome(run(case, resume=tmp_path)) == _uninterrupted(case)


def test_kill_in_the_middle_of_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    command = [sys.executable, str(JOB), "adamw", str(tmp_path), "SIGKILL", "-3"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".unfinished-")]
    saved = Checkpoints(tmp_path).load()
    assert saved is not None
    assert saved["epoch"] == 3
    assert _outcome(run("adamw", resume=tmp_path)) == _uninterrupted("adamw")
    assert all(p.name.startswith("step-") for p in tmp_path.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_stopped_again_and_again(case: str, tmp_path: Path) -> None:
    """Every third step of the first 30, at the end and in the middle of epochs."""
    for number in 5 * [signal.SIGTERM, signal.SIGINT]:
        _stop(case, tmp_path, number, 3)
    saved = Checkpoints(tmp_path).load()
    assert saved is not None
    assert saved["step"] == 30
    assert _outcome(run(case, resume=tmp_path)) == _uninterrupted(case)


def test_saving_changes_nothing_and_a_finished_run_comes_back(tmp_path: Path) -> None:
    calls: list[dict[str, float]] = []
    first = run("sgd", save=tmp_path, callbacks=[calls.append])
    assert _outcome(first) == _uninterrupted("sgd")
    assert [record["epoch"] for record in calls] == list(range(1, 13))
    again = run("sgd", resume=tmp_path, callbacks=[calls.append])
    assert _outcome(again) == _uninterrupted("sgd")
    assert len(calls) == 12
    assert again.history == first.history
    assert str(again.reading) == str(first.reading)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weights_in_channels_last_go_on_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    def train(**options: Any) -> dict[str, Any]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        x, y = torch.randn(40, 3, 6, 6), torch.randint(0, 2, (40,))
        body = [nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        model = nn.Sequential(*body, nn.Linear(5, 2)).to(memory_format=torch.channels_last)
        options = {"epochs": 8, "batch_size": 8, "every": 2, "optimizer": optimizer} | options
        return _outcome(sr.fit(model, (x, y), **options))

    def stop(x: Tensor, generator: torch.Generator) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return x

    same = {"augment": lambda x, generator: x}
    with pytest.raises(SystemExit):
        train(save=tmp_path, augment=stop)
    assert train(resume=tmp_path, **same) == train(**same)


# What is on disk.


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    run("adamw", save=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000045-epoch-0009", "step-00000060-epoch-0012"]
    newest = tmp_path / names[-1]
    assert sorted(p.name for p in newest.iterdir()) == ["state.json", "tensors.safetensors"]
    document = json.loads((newest / "state.json").read_text())
    assert document["schema"] == 1
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


def test_states_come_back_as_they_were(tmp_path: Path) -> None:
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


def test_fingerprint_sees_every_value_and_the_order() -> None:
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


# Refusals.


def _short(directory: Path, **options: Any) -> sr.Fit:
    return _small_fit(directory, **({"epochs": 2} | options))


def _small_fit(
    directory: Path | None, width: int = 4, shift: float = 0.0, n: int = 20, **options: Any
) -> sr.Fit:
    torch.manual_seed(0)
    x = torch.randn(30, 3)[:n]
    data = (x + shift, (x[:, :1] > 0).long().squeeze(1))
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
    options = {"batch_size": 8, "every": 1, "resume": directory} | options
    return sr.fit(model, data, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 3}, r"expected epochs=2 .* got 3: the learning rate of every step depends"),
        ({"lr": 0.1}, r"expected the options .*lr: expected None, got 0.1"),
        ({"optimizer": "sam"}, "optimizer: expected adamw, got sam"),
        ({"damping": 0.3}, "razor.damping: expected 0.5, got 0.3"),
        ({"prior_groups": "layer"}, "razor.prior_groups: expected path, got layer"),
        ({"augment": jitter}, "augment: expected False, got True"),
        ({"seed": 1}, "seed: expected 0, got 1"),
        ({"width": 5}, r"the model of the checkpoint.*0.bias: expected \[4\] float32, got \[5\]"),
        ({"shift": 0.5}, "the data of the checkpoint.*fingerprint"),
        ({"n": 19}, r"the data .*x: expected \[20, 3\] float32, got \[19, 3\]"),
    ],
)
def test_checkpoint_of_another_run_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _short(tmp_path)
    with pytest.raises(ValueError, match=message):
        _short(tmp_path, **change)


def test_refused_checkpoint_leaves_the_model_untouched(tmp_path: Path) -> None:
    _short(tmp_path)
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="expected the data"):
        sr.fit(model, (x, y), epochs=2, batch_size=8, every=1, resume=tmp_path)
    assert torch.equal(model.weight, before)


def test_other_likelihood_is_refused(tmp_path: Path) -> None:
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20, 1)).float()
    sr.fit(nn.Linear(3, 1), (x, y), "bernoulli", epochs=1, save=tmp_path)
    with pytest.raises(ValueError, match="class: expected Bernoulli, got Poisson"):
        sr.fit(nn.Linear(3, 1), (x, y), "poisson", epochs=1, resume=tmp_path)


def test_what_may_change(tmp_path: Path) -> None:
    expected = _outcome(_small_fit(None, epochs=6, warmup=0.2))
    options = {"epochs": 6, "warmup": 0.2}

    def stop(record: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        _small_fit(tmp_path, callbacks=[stop], save_every=2, **options)
    free = {"device": "cpu", "progress": False, "save_every": 1, "patience": 50}
    assert _outcome(_small_fit(tmp_path, **free, **options)) == expected


def test_augmentation_need_not_be_copied(tmp_path: Path) -> None:
    class Flip:
        lock, own = threading.Lock(), torch.Generator()  # neither can be deep-copied or pickled

        def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return -x

    _short(tmp_path, augment=Flip())
    _short(tmp_path, augment=Flip())


def test_mappings_of_prior_options_go_through_json(tmp_path: Path) -> None:
    options = {
        "prior_groups": MappingProxyType({"in": ("0.*",), "out": "2.*"}),
        "prior_precision": MappingProxyType({"in": 1.0, "out": torch.tensor(2.0)}),
    }
    first = _short(tmp_path, **options)
    assert _outcome(_short(tmp_path, **options)) == _outcome(first)
    with pytest.raises(ValueError, match="razor.prior_precision: expected {'in': 1.0, 'out': 2.0}"):
        _short(tmp_path, **options | {"prior_precision": {"in": 2.0, "out": 2.0}})


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("state.json", lambda b: b[: len(b) // 2], "a whole state.json"),
        ("state.json", lambda b: b"[]", "expected schema 1 .* got None"),
        ("state.json", lambda b: b.replace(b'"schema": 1', b'"schema": 9'), "schema 1 .* got 9"),
        ("state.json", lambda b: b"\xff\xfe\x00", "a whole state.json"),
        ("tensors.safetensors", lambda b: b[:-7], "a whole tensors.safetensors .* checksum"),
        ("tensors.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1]), "checksum"),
        ("tensors.safetensors", lambda b: b"", "a whole tensors.safetensors"),
    ],
)
def test_damaged_checkpoint_is_refused(
    file: str, damage: Any, message: str, tmp_path: Path
) -> None:
    _short(tmp_path, save_every=1)
    newest = Checkpoints(tmp_path).found()[-1]
    (newest / file).write_bytes(damage((newest / file).read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        _short(tmp_path)
    assert f"do: remove {newest}, to continue from step-00000003-epoch-0001" in str(error.value)
    (newest / file).unlink()
    with pytest.raises(ValueError, match="expected a whole"):
        _short(tmp_path)


def test_wrong_directories(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="checkpoints, or an empty one, .*notes.txt"):
        _short(tmp_path)
    with pytest.raises(ValueError, match="expected a directory for checkpoints, got the file"):
        _short(tmp_path / "notes.txt")
    _short(tmp_path / "run")
    with pytest.raises(ValueError, match="checkpoints of another run; do: resume="):
        _short(tmp_path / "run", resume=None, save=tmp_path / "run")
    with pytest.raises(ValueError, match="expected one directory"):
        _short(tmp_path / "run", save=tmp_path / "other")
    (tmp_path / "run" / "events.jsonl").write_text("")
    _short(tmp_path / "run", save=tmp_path / "run")


def test_place_that_cannot_be_written_to_costs_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        _short(tmp_path / "file" / "run")


def test_full_disk_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: Path, target: Path) -> None:
        if "step-00000000" not in str(target):
            raise OSError("no space left on device")
        os.replace(source, target)

    monkeypatch.setattr("symrazor.checkpoint.os.rename", full)
    fit = _short(tmp_path, save_every=1)
    assert len(fit.history) == 2
    assert "no checkpoint of step 3" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000-epoch-0000"]


def test_other_torch_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _short(tmp_path)
    path = Checkpoints(tmp_path).found()[-1] / "state.json"
    path.write_text(path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.0"'))
    _short(tmp_path)
    assert "saved by torch 2.0" in caplog.text


# Signals.


def test_handlers_are_put_back(tmp_path: Path) -> None:
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


def test_second_sigint_does_not_wait(tmp_path: Path) -> None:
    def impatient(x: Tensor, generator: torch.Generator) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("never reached")

    with pytest.raises(KeyboardInterrupt):
        run("sgd", save=tmp_path, augment=impatient)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000-epoch-0000"]


def test_without_a_directory_signals_are_left_alone() -> None:
    seen = []

    def look(record: dict[str, float]) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    _small_fit(None, epochs=1, callbacks=[look])
    assert seen == [signal.default_int_handler]


def test_fit_in_another_thread_saves_without_handlers(tmp_path: Path) -> None:
    done = []
    thread = threading.Thread(target=lambda: done.append(_short(tmp_path)))
    thread.start()
    thread.join()
    assert len(done) == 1
    assert Checkpoints(tmp_path).load() is not None


def test_sigterm_in_the_last_epoch_still_ends_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def last(record: dict[str, float]) -> None:
        if record["epoch"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit):
        _short(tmp_path, callbacks=[last])
    assert "after step 6 of 6" in caplog.text
    assert len(_short(tmp_path).history) == 2
