"""Each run folder has one owner and one writer, and its parts belong together."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from run_case import SMALL, reseal, small

import symrazor as sr
from symrazor.cli import app as cli
from symrazor.core.files import LOCK
from symrazor.runs import load_run, run, writing
from symrazor.runs.folder import export_network, read_document
from symrazor.runs.predictions import predict
from symrazor.runs.records import verify
from symrazor.runs.writing import (
    MANIFEST,
    Owner,
    choose_folder,
    inside,
    owned_folder,
    read_manifest,
    seal,
)

FIT, DISCOVER = Owner("fit", {"config": "a"}), Owner("discover", {"seed": 0})


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_fit_and_discover_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small(tmp_path, SMALL.replace("epochs = 2", "epochs = 1"))
    cli.run(["fit", "small.toml"])
    assert "Run folder: run\n" in capsys.readouterr().out
    before = _files(Path("run"))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    np.savez("table.npz", x=x, y=x[:, 0])
    cli.run(["discover", "table.npz", "--epochs", "1", "--quiet"])
    cli.run(["discover", "table.npz", "--epochs", "1", "--quiet", "--seed", "1"])
    assert _files(Path("run")) == before
    assert read_document(Path("run-2"))["kind"] == "vector" and Path("run-3").is_dir()
    for arguments in (["discover", "table.npz", "--epochs", "1"], ["fit", "small.toml"]):
        with pytest.raises(ValueError, match=r"run-2 already has a finished run of symrazor disc"):
            cli.run([*arguments, "--out", "run-2"])
    (Path("run-2") / "network.onnx").write_bytes(b"of the first network")
    cli.run(["fit", "small.toml", "--out", "run-2", "--overwrite", "--quiet"])
    assert set(_files(Path("run-2"))) == set(before)  # nothing of the discovery is left
    load_run("run-2")


def test_parts_of_two_runs_are_not_read_together(tmp_path: Path) -> None:
    """A kill while the files of B replace those of A leaves a folder that says so."""
    for name, seed in (("a", 0), ("b", 1)):
        text = SMALL.replace("epochs = 2", f"epochs = 1\nseed = {seed}")
        run(small(tmp_path, text), tmp_path / name)
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 1, 16, 16), np.float32))
    plain = "plain/network.safetensors"
    shutil.copyfile(tmp_path / "b" / plain, tmp_path / "a" / plain)
    with pytest.raises(ValueError, match=f"{plain} does not belong to the run"):
        predict(tmp_path / "a", tmp_path / "new.npz")
    with pytest.raises(ValueError, match=f"{plain} does not belong to the run"):
        export_network(tmp_path / "a", "torch", tmp_path / "n.pt2")
    learned = tmp_path / "a" / "razor.safetensors"
    learned.write_bytes(learned.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="razor.safetensors does not belong"):
        load_run(tmp_path / "a")
    document = json.loads((tmp_path / "b" / MANIFEST).read_text())
    (tmp_path / "b" / MANIFEST).write_text(json.dumps(document | {"state": "unfinished"}))
    with pytest.raises(ValueError, match=r"b is not finished. Run symrazor fit --out .*b --resume"):
        read_document(tmp_path / "b")


def test_links_do_not_lead_out_of_a_run_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "run"
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    sr.discover(x, x[:, 0], epochs=1).save(folder)
    (folder / "report.html").unlink()
    (folder / "report.html").symlink_to(outside / "page.html")
    (folder / "network.onnx").symlink_to(outside / "network.onnx")
    with pytest.raises(ValueError, match=r"report.html leads out of the run folder"):
        cli.run(["report", str(folder)])
    with pytest.raises(ValueError, match=r"network.onnx leads out of the run folder"):
        cli.run(["export", str(folder), "--format", "onnx"])
    document = json.loads((folder / "discover.json").read_text())
    question = document["questions"][0]
    document["questions"] = [question | {"name": "a"}, question | {"name": str(outside)}]
    (folder / "discover.json").write_text(json.dumps(document))
    reseal(folder)
    with pytest.raises(ValueError, match="is not the name of a folder"):
        cli.run(["export", str(folder), "--question", str(outside)])
    (folder / "a").symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of the run folder"):
        cli.run(["export", str(folder), "--question", "a"])
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("link", ["unfinished", "unfinished/data/linear-0-0", "checkpoints"])
def test_a_run_is_not_resumed_through_a_link(link: str, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    with owned_folder(folder, DISCOVER):
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).symlink_to(outside)
    with pytest.raises(ValueError, match=f"{link} leads out of"), owned_folder(folder, DISCOVER):
        pass
    (folder / link).unlink()
    (folder / "data").symlink_to(outside)  # of the user
    with owned_folder(folder, DISCOVER):
        pass


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x"])
def test_names_outside_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leads out of the run folder"):
        inside(tmp_path, name)


HOLD = """
import sys
from pathlib import Path
from symrazor.runs.writing import Owner, owned_folder
with owned_folder(Path(sys.argv[1]), Owner("fit", {"config": "a"})):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    """A lock names its process, ends with it even after a kill, and protects finished runs too."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        message = rf"run is in use: process {holder.pid} on .* is writing to it"
        for owner in (FIT, DISCOVER):
            with pytest.raises(ValueError, match=message), owned_folder(folder, owner, True):
                pass
        holder.kill()
    assert (folder / LOCK).exists()  # stale
    with owned_folder(folder, FIT):
        assert json.loads((folder / LOCK).read_text())["process"] == os.getpid()
        (folder / "checkpoints").mkdir()
    assert not (folder / LOCK).exists()


def test_an_owner_resumes_and_others_do_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with owned_folder(folder, DISCOVER):
        (folder / "discover.json").write_text("{}")
    with owned_folder(folder, DISCOVER):  # the same command resumes
        seal(folder, DISCOVER, ["discover.json"])
    with (
        pytest.raises(ValueError, match="already has a finished run"),
        owned_folder(folder, DISCOVER),
    ):
        pass
    changed = Owner("discover", {"seed": 1})
    with pytest.raises(ValueError, match="Add --overwrite"), owned_folder(folder, changed):
        pass
    assert verify(folder, "discover.json").owner == DISCOVER
    (folder / "notes.txt").touch()
    with owned_folder(folder, changed, overwrite=True):
        names = {path.name for path in folder.iterdir()}
    assert names == {"notes.txt", MANIFEST, LOCK}


def test_the_next_process_removes_temporary_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "plain").mkdir(parents=True)
    for name in (".config.toml.0123456789abcdef", "plain/.network.pt2.0123456789abcdef"):
        (folder / name).touch()
    (folder / ".network.pt2.0123456789abcdef").mkdir()
    (folder / ".network.pt2.0123456789abcdef" / "network.pt2").touch()
    (folder / ".config.toml.mine").touch()
    with owned_folder(folder, FIT):
        assert {path.name for path in folder.iterdir()} == {
            *("plain", ".config.toml.mine", MANIFEST, LOCK)
        }
        assert list((folder / "plain").iterdir()) == []


def test_a_kill_while_a_run_is_deleted_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with owned_folder(folder, DISCOVER):
        for name in ("discover.json", "config.toml", "a/network.safetensors", "a/network.pt2"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        seal(folder, DISCOVER, ["discover.json", "a/network.safetensors"])
    delete, left = writing.remove, 3

    def interrupted(path: Path) -> None:
        nonlocal left
        left -= path.exists()
        if left == 0:
            raise KeyboardInterrupt
        delete(path)

    monkeypatch.setattr(writing, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt), owned_folder(folder, FIT, overwrite=True):
        pass
    monkeypatch.undo()
    assert len(_files(folder)) > 1
    with pytest.raises(ValueError, match="not finished"):
        verify(folder)
    with owned_folder(folder, FIT):  # the same command again, without overwrite
        assert {path.name for path in folder.iterdir()} == {MANIFEST, LOCK}


def test_a_killed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(small(tmp_path, SMALL.replace("epochs = 2", "epochs = 1")), folder)
    (folder / ".plain.pt2.0123456789abcdef").mkdir()
    cli.run(["export", str(folder), "--format", "safetensors", "--quiet"])
    assert not list(folder.glob(".*"))


def test_damaged_documents_and_networks_are_named(tmp_path: Path) -> None:
    """Their sums are right: a stranger made them."""
    folder = tmp_path / "run"
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    sr.discover(x, x[:, 0], epochs=1).save(folder)
    np.savez(tmp_path / "new.npz", x=x.numpy())
    text = (folder / "discover.json").read_text()
    for old, new, message in (
        ('"name": "relaxed"', '"nam": 1', "damaged|Cannot read .*run"),
        ('"questions": [', '"questions": [3, ', "discover.json is damaged"),
        ('"history": [', '"history": [3, ', "Cannot read .*run"),
    ):
        if old in text:
            (folder / "discover.json").write_text(text.replace(old, new, 1))
            reseal(folder)
            with pytest.raises(ValueError, match=message):
                cli.run(["report", str(folder)])
    (folder / "discover.json").write_text(text)
    steps = (folder / "architecture.json").read_text()
    (folder / "architecture.json").write_text(steps.replace('{"step":0}', '[{"step":0}]', 1))
    reseal(folder)
    with pytest.raises(ValueError, match="Cannot read .*run"):
        predict(folder, tmp_path / "new.npz")


def test_without_a_folder_the_first_free_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_folder(None, FIT, False) == Path("run")
    with owned_folder(Path("run"), DISCOVER):
        Path("run/unfinished").mkdir()
    assert choose_folder(None, DISCOVER, False) == Path("run")  # resumes
    assert choose_folder(None, FIT, False) == Path("run-2")
    assert choose_folder(None, FIT, True) == Path("run")
    assert choose_folder(Path("mine"), FIT, False) == Path("mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ("[" * 10_000, "is damaged"),
        ("[]", "is damaged"),
        ('{"schema": 1}', "is damaged"),
        ('{"schema": 99, "symrazor": "7.0"}', "written by symrazor 7.0; .*Update symrazor"),
        ('{"schema": 1, "command": "rm", "state": "finished", "files": {}}', "is damaged"),
    ],
)
def test_damaged_manifests(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_manifest(tmp_path)
    with pytest.raises(ValueError, match=message):
        cli.run(["report", str(tmp_path)])
