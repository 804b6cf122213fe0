"""Test rejected checkpoints, and the options that may change when a run is resumed."""

import json
import os
import resource
import signal
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from resume_job import jitter, outcome, short_fit, small_fit
from torch import Tensor, nn

import symrazor as sr
from symrazor.training.checkpoint import Checkpoints


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 3}, r"started with epochs=2, got epochs=3. The learning rate of every step"),
        ({"lr": 0.1}, r"differ in the options: lr was None and is 0.1"),
        ({"optimizer": "sgd"}, "optimizer was adamw and is sgd"),
        ({"sam_radius": 0.05}, "sam_radius was None and is 0.05"),
        ({"damping": 0.3}, "razor.damping was 0.5 and is 0.3"),
        ({"prior_groups": "layer"}, "razor.prior_groups was path and is layer"),
        ({"augment": jitter}, "augment was False and is True"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"width": 5}, r"differ in the model: 0.bias was \[4\] float32 and is \[5\]"),
        ({"shift": 0.5}, "differ in the data: fingerprint"),
        ({"n": 19}, r"the data: .*x was \[20, 3\] float32 and is \[19, 3\]"),
    ],
)
def test_checkpoint_of_another_run_is_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    short_fit(tmp_path)
    with pytest.raises(ValueError, match=message):
        short_fit(tmp_path, **change)


def test_rejected_checkpoint_leaves_the_model_unchanged(tmp_path: Path) -> None:
    short_fit(tmp_path)
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="differ in the data"):
        sr.fit(model, (x, y), epochs=2, batch_size=8, every=1, resume=tmp_path)
    assert torch.equal(model.weight, before)


def test_another_likelihood_is_rejected(tmp_path: Path) -> None:
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20, 1)).float()
    sr.fit(nn.Linear(3, 1), (x, y), "bernoulli", epochs=1, save=tmp_path)
    with pytest.raises(ValueError, match="class was Bernoulli and is Poisson"):
        sr.fit(nn.Linear(3, 1), (x, y), "poisson", epochs=1, resume=tmp_path)


def test_options_that_may_change_on_resume(tmp_path: Path) -> None:
    expected = outcome(small_fit(None, epochs=6, warmup=0.2))
    options = {"epochs": 6, "warmup": 0.2}

    def stop(record: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        small_fit(tmp_path, callbacks=[stop], save_every=2, **options)
    free = {"device": "cpu", "progress": False, "save_every": 1, "patience": 50}
    assert outcome(small_fit(tmp_path, **free, **options)) == expected


def test_augmentation_is_not_copied(tmp_path: Path) -> None:
    class Flip:
        lock, actual = threading.Lock(), torch.Generator()  # neither can be deep-copied or pickled

        def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return -x

    short_fit(tmp_path, augment=Flip())
    short_fit(tmp_path, augment=Flip())


def test_mappings_in_prior_options_are_stored_as_json(tmp_path: Path) -> None:
    options = {
        "prior_groups": MappingProxyType({"in": ("0.*",), "out": "2.*"}),
        "prior_precision": MappingProxyType({"in": 1.0, "out": torch.tensor(2.0)}),
    }
    first = short_fit(tmp_path, **options)
    assert outcome(short_fit(tmp_path, **options)) == outcome(first)
    with pytest.raises(ValueError, match="razor.prior_precision was {'in': 1.0, 'out': 2.0}"):
        short_fit(tmp_path, **options | {"prior_precision": {"in": 2.0, "out": 2.0}})


def test_checkpoint_of_a_newer_version_is_not_to_be_removed(tmp_path: Path) -> None:
    short_fit(tmp_path, save_every=1)
    file = Checkpoints(tmp_path).paths()[-1] / "state.json"
    file.write_bytes(file.read_bytes().replace(b'"schema": 2', b'"schema": 9'))
    with pytest.raises(ValueError, match=r"written by symrazor .* Update symrazor") as error:
        short_fit(tmp_path)
    assert "Remove" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("state.json", lambda b: b[: len(b) // 2], "state.json is damaged"),
        ("state.json", lambda b: b"[]", "has the schema None; .* schema 2"),
        ("state.json", lambda b: b"\xff\xfe\x00", "state.json is damaged"),
        ("state.json", lambda b: b.replace(b'"batches_done": 0', b'"batches_done": 1'), "checksum"),
        ("state.json", lambda b: b.replace(b'"optimiser": {', b'"optimizer": {'), "checksum"),
        ("tensors.safetensors", lambda b: b[:-7], "tensors.safetensors is damaged: wrong checksum"),
        ("tensors.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1]), "checksum"),
        ("tensors.safetensors", lambda b: b"", "tensors.safetensors is damaged"),
    ],
)
def test_damaged_checkpoint_is_rejected(
    file: str, damage: Any, message: str, tmp_path: Path
) -> None:
    short_fit(tmp_path, save_every=1)
    newest = Checkpoints(tmp_path).paths()[-1]
    (newest / file).write_bytes(damage((newest / file).read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        short_fit(tmp_path)
    assert f"Remove {newest} to continue from step-00000003-epoch-0001." in str(error.value)
    (newest / file).unlink()
    with pytest.raises(ValueError, match="Cannot read|is damaged"):
        short_fit(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["state"].pop("trials"), r"The checkpoint lacks \['trials'\]"),
        (lambda d: d["state"].clear(), r"The checkpoint lacks \['at_bound'"),
        (lambda d: d.pop("state"), "state.json is incomplete: 'state' is missing"),
        (lambda d: d.pop("versions"), "state.json is incomplete: 'versions' is missing"),
        (lambda d: d.update(state=[1]), "state.json is incomplete"),
    ],
)
def test_checkpoint_with_another_content_is_rejected(
    change: Any, message: str, tmp_path: Path
) -> None:
    """The files are intact but do not contain the state of a run."""
    short_fit(tmp_path)
    file = Checkpoints(tmp_path).paths()[-1] / "state.json"
    document = json.loads(file.read_text())
    change(document)
    document.pop("state_blake2b")
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        short_fit(tmp_path)


def test_options_missing_in_a_checkpoint_have_their_defaults(tmp_path: Path) -> None:
    """A checkpoint without a newer option resumes only with the default of that option."""
    short_fit(tmp_path)
    file = Checkpoints(tmp_path).paths()[-1] / "state.json"
    document = json.loads(file.read_text())
    assert document["state"]["belongs_to"]["options"].pop("sam_radius", 1) is None
    document.pop("state_blake2b")
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="sam_radius was None and is 0.05"):
        short_fit(tmp_path, sam_radius=0.05)
    short_fit(tmp_path)


class Noted(nn.Linear):
    """A module with extra state besides its tensors."""

    def __init__(self, note: Any) -> None:
        super().__init__(3, 2)
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_extra_state_of_a_module_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = (torch.randn(20, 3), torch.arange(20) % 2)
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8}
    note = {"tokens": ["a", 1, None], "scale": torch.tensor(2.0)}
    sr.fit(nn.Sequential(Noted(note)), data, resume=tmp_path / "fine", **options)
    again = nn.Sequential(Noted({"tokens": [], "scale": torch.tensor(0.0)}))
    sr.fit(again, data, resume=tmp_path / "fine", **options)
    assert again[0].note == note  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="Cannot save model/0._extra_state .* of type object"):
        sr.fit(nn.Sequential(Noted(object())), data, resume=tmp_path / "not", **options)


def test_unsuitable_directories_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="notes.txt.* and no checkpoints"):
        short_fit(tmp_path)
    with pytest.raises(ValueError, match="notes.txt is a file"):
        short_fit(tmp_path / "notes.txt")
    short_fit(tmp_path / "run")
    with pytest.raises(ValueError, match="checkpoints of another run. Use resume="):
        short_fit(tmp_path / "run", resume=None, save=tmp_path / "run")
    with pytest.raises(ValueError, match="are different directories"):
        short_fit(tmp_path / "run", save=tmp_path / "other")
    (tmp_path / "run" / "events.jsonl").write_text("")
    short_fit(tmp_path / "run", save=tmp_path / "run")


def test_unwritable_directory_fails_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        short_fit(tmp_path / "file" / "run")


def test_full_disk_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: Path, target: Path) -> None:
        if "step-00000000" not in str(target):
            raise OSError("no space left on device")
        os.replace(source, target)

    monkeypatch.setattr("symrazor.training.checkpoint.os.rename", full)
    fit = short_fit(tmp_path, save_every=1)
    assert len(fit.history) == 2
    assert "Could not write a checkpoint at step 3 of 6" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000-epoch-0000"]


def test_file_size_limit_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The system rejects large files, for which safetensors raises its own error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(record: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))

    try:
        fit = short_fit(tmp_path, save_every=1, callbacks=[limit])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(fit.history) == 2
    assert "Could not write a checkpoint at step 3 of 6" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000-epoch-0000"]


def test_another_torch_version_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short_fit(tmp_path)
    path = Checkpoints(tmp_path).paths()[-1] / "state.json"
    path.write_text(path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.0"'))
    short_fit(tmp_path)
    assert "saved by torch 2.0" in caplog.text
