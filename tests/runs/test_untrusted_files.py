"""Files of a stranger run no code: configurations, networks and run folders."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from architecture_document import graph_document
from run_case import SMALL, reseal, small
from safetensors.torch import save_file

import symrazor as sr
from symrazor.cli import app as cli
from symrazor.runs import load_run, run
from symrazor.runs.config import CodeName, read_config
from symrazor.runs.folder import export_network, load_network
from symrazor.runs.predictions import predict
from symrazor.symmetry.architecture import (
    ARCHITECTURE,
    WEIGHTS,
    read_network,
)

ORDINARY = 'name = "run_case:ordinary"\nrelax = false'


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a finished run folder whose configuration was then changed to run a command."""
    folder = tmp_path / "run"
    run(small(tmp_path), folder)
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 1, 16, 16), np.float32))
    (tmp_path / "evil.py").write_text("open('imported', 'w').close()\ndef f(x, g): return x\n")
    text = (folder / "config.toml").read_text()
    text = text.replace('name = "convolutional"', 'name = "os:system"')
    text = text.replace("arguments = {}", 'arguments = {command = "touch ran"}')
    text = text.replace("[fit]", '[fit]\naugment = "evil:f"')
    (folder / "config.toml").write_text(text)
    reseal(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def _refused(*command: str) -> None:
    """Check that a command names the code, the file and the flag, and runs nothing."""
    with pytest.raises(ValueError, match=r"config.toml: .*'(os:system|evil:f)'.* --trust-code"):
        cli.run(list(command))
    assert not Path("ran").exists() and not Path("imported").exists()


def test_a_run_folder_runs_no_command(stranger: Path) -> None:
    plain = stranger / "plain" / ARCHITECTURE
    expected = predict(stranger, Path("new.npz")).values
    cli.run(["report", str(stranger), "--quiet"])
    cli.run(["predict", str(stranger), "new.npz", "--out", "p.csv"])
    cli.run(["export", str(stranger), "--quiet"])
    assert expected.shape == (3, 10) and not Path("ran").exists()
    plain.unlink()
    reseal(stranger)  # now the network can only be rebuilt from the configuration
    cli.run(["report", str(stranger), "--quiet"])
    _refused("predict", str(stranger), "new.npz")
    _refused("export", str(stranger))
    _refused("fit", "--resume", "--out", str(stranger))
    with pytest.raises(ValueError, match="'os:system'"):
        load_run(stranger)
    assert not Path("ran").exists() and not Path("imported").exists()
    with pytest.raises(ValueError, match="os:system must return a torch module, got int"):
        load_run(stranger, trust_code=True)
    assert Path("ran").exists()


def test_reading_a_configuration_imports_nothing(stranger: Path) -> None:
    config = read_config(stranger / "config.toml")
    assert config.code() == {"model.name": "os:system", "fit.augment": "evil:f"}
    assert config.fit.augment == CodeName("evil:f")
    assert not Path("imported").exists() and "evil" not in sys.modules


def test_code_in_a_file_that_the_user_gave_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its network then predicts without the code, if it is made of torch modules."""
    small(tmp_path, SMALL.replace("width = 2", ORDINARY))
    folder = tmp_path / "run"
    cli.run(["fit", str(tmp_path / "small.toml"), "--out", str(folder), "--quiet"])
    expected = load_run(folder, trust_code=True).model
    monkeypatch.setattr("symrazor.runs.building.import_function", None)
    x = torch.rand(4, 1, 16, 16)
    torch.testing.assert_close(load_network(folder)(x), expected(x))
    assert "plain/architecture.json" in (folder / "README.txt").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os:system", "the call with the arguments {} failed (TypeError: system() missing"),
        ("broken:f", "Cannot import 'broken:f'"),
    ],
)
def test_code_that_fails_is_a_user_error(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = small(tmp_path, SMALL.replace("width = 2", f'name = "{name}"'))
    with pytest.raises(ValueError, match=re.escape(message)):
        run(config, tmp_path / "run")


def test_a_network_of_an_own_class_needs_its_code(tmp_path: Path) -> None:
    config = small(tmp_path, SMALL.replace("width = 2", ORDINARY.replace("ordinary", "Own")))
    fit = run(config, tmp_path / "run")
    text = (tmp_path / "run" / "README.txt").read_text()
    assert "run_case.Own" in text and "need --trust-code" in text
    with pytest.raises(ValueError, match=r"'run_case:Own'.* --trust-code"):
        load_network(tmp_path / "run")
    x = torch.rand(4, 1, 16, 16)
    torch.testing.assert_close(load_network(tmp_path / "run", trust_code=True)(x), fit.model(x))


def test_a_program_in_a_run_folder_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.export.load` unpickles."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    discovery = sr.discover(x, x.sum(1, keepdim=True).sin(), epochs=1)
    folder = discovery.save(tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=x.numpy())
    (folder / "network.pt2").write_bytes(b"a pickle of a stranger")
    with monkeypatch.context() as patch:
        patch.setattr(torch.export, "load", None)
        patch.setattr(torch, "load", None)
        values = predict(folder, tmp_path / "new.npz").values
        export_network(folder, "safetensors", tmp_path / "n.safetensors")
    torch.testing.assert_close(values, discovery.predict(x).mean)
    file = export_network(folder, "torch", folder / "network.pt2")
    torch.testing.assert_close(torch.export.load(file).module()(x), discovery.predict(x).mean)
    assert "symrazor never reads a .pt2 file" in (folder / "README.txt").read_text()
    (folder / ARCHITECTURE).unlink()
    with pytest.raises(ValueError, match=r"No such file: .*architecture.json"):
        load_network(folder)


def test_a_document_that_does_not_fit_the_network_is_refused(tmp_path: Path) -> None:
    x = torch.randn(40, 3)
    run = sr.discover(x, x[:, 0] > 0, epochs=1).save(tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=x.numpy())
    document = json.loads((run / "discover.json").read_text())
    document["questions"][0]["classes"] = ["one"]
    document["data"]["shape"] = [4]
    (run / "discover.json").write_text(json.dumps(document))
    reseal(run)
    with pytest.raises(ValueError, match="Cannot read .*run: RuntimeError: "):
        export_network(run, "torch", tmp_path / "network.pt2")
    document["data"]["shape"] = [3]
    (run / "discover.json").write_text(json.dumps(document))
    reseal(run)
    with pytest.raises(ValueError, match="run has 1 classes, but its network 2 outputs"):
        predict(run, tmp_path / "new.npz")


def test_a_posterior_for_other_outputs_is_refused(tmp_path: Path) -> None:
    """A stranger may return the output of another layer than the last one."""
    x = torch.randn(40, 3)
    run = sr.discover(x, x[:, :1], epochs=1).save(tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=x.numpy())
    predict(run, tmp_path / "new.npz")
    document = json.loads((run / ARCHITECTURE).read_text())
    steps = document["network"]["children"]["0"]["steps"]
    hidden = next(k for k, step in enumerate(steps) if step["call"] == "module")
    steps[-1]["arguments"] = [{"step": hidden}]
    (run / ARCHITECTURE).write_text(json.dumps(document))
    reseal(run)
    with pytest.raises(ValueError, match="Cannot read .*run: the posterior does not fit"):
        predict(run, tmp_path / "new.npz")


def test_a_pipe_in_a_run_folder_is_refused(tmp_path: Path) -> None:
    x = torch.randn(40, 3)
    run = sr.discover(x, x[:, 0] > 0, epochs=1).save(tmp_path / "run")
    (run / "report.html").unlink()
    os.mkfifo(run / "report.html")
    with pytest.raises(ValueError, match="report.html is a pipe or a device, not a file"):
        cli.run(["report", str(run), "--quiet"])


def test_a_question_is_no_path(tmp_path: Path) -> None:
    questions = [{"name": name, "question": "?", "verdict": ""} for name in ("../elsewhere", "b")]
    document = {"schema": 1, "kind": "vector", "data": {"shape": [3]}, "questions": questions}
    (tmp_path / "discover.json").write_text(json.dumps(document))
    reseal(tmp_path, "discover.json")
    with pytest.raises(ValueError, match="is not the name of a folder"):
        load_network(tmp_path, "../elsewhere")


def test_a_quoted_string_stays_a_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments reach the generated code of a graph as literals."""
    monkeypatch.chdir(tmp_path)
    text = "'),__import__('os').system('touch ran'"
    step = {"call": "function", "target": "einsum", "arguments": [text, {"step": 0}]}
    network = graph_document(step)
    save_file({}, tmp_path / WEIGHTS)
    (tmp_path / ARCHITECTURE).write_text(json.dumps({"schema": 1, "network": network}))
    with pytest.raises(Exception, match="einsum"):
        read_network(tmp_path)(torch.ones(2))
    assert not Path("ran").exists()


def test_sizes_that_a_run_declares_are_bounded(tmp_path: Path) -> None:
    run(small(tmp_path), tmp_path / "run")
    about = {"input": "[1, 16, 16]", "outputs": "10", "width": str(10**12), "n_data": "60"}
    save_file({"a": torch.zeros(1)}, tmp_path / "run" / WEIGHTS, about)
    reseal(tmp_path / "run")
    with pytest.raises(ValueError, match="1000000000000 outputs in network.safetensors"):
        cli.run(["report", str(tmp_path / "run")])
