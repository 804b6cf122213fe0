"""Train from a configuration, write a run folder and load the network from it."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import distributed_job as job
import numpy as np
import pytest
import torch
import torch.distributed as dist
from run_case import SMALL, reseal, small

from symrazor.cli import app as cli
from symrazor.cli.fit import initial_config
from symrazor.cli.run_folder import export
from symrazor.core.files import write_atomically
from symrazor.data import TensorLoader
from symrazor.runs import load_run, run
from symrazor.runs import records as runs
from symrazor.runs.config import ModelConfig, RunConfig, read_config
from symrazor.runs.records import fit_document
from symrazor.training.events import read_events


def test_a_run_is_loaded_from_its_folder(tmp_path: Path) -> None:
    config = small(tmp_path)
    fit = run(config, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    tensors = {"network.safetensors", "razor.safetensors", "plain"}
    text = {"README.txt", "config.toml", "events.jsonl", "reading.json", "run.json"}
    assert names == {"checkpoints", *text, *tensors}
    torch.manual_seed(7)  # load_run must not depend on it
    again = load_run(tmp_path / "run")
    (x, y), test = again.data()
    assert test is not None
    assert torch.equal(again.model(test[0]), fit.model(test[0]))
    assert again.reading == fit.reading
    assert str(again.reading) == str(fit.reading)
    assert again.config.model == config.model and again.config.fit.epochs == 2
    assert again.shape == (1, 16, 16)
    exact = replace(fit.razor.config, estimator="exact")
    values = []
    for razor in (again.razor, fit.razor):
        razor.method = exact.method
        values.append(float(razor.evidence(TensorLoader(x, y, 60)).log_evidence))
    assert values[0] == pytest.approx(values[1], rel=1e-12)  # precisions came back too
    assert [r["epoch"] for r in read_events(tmp_path / "run" / "events.jsonl")] == [1, 2]
    assert torch.equal(again.predict(x[:5]).mean, fit.predict(x[:5]).mean)
    assert again.predict(x[:5], "probit").mean.shape == (5, 10)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_record_that_cannot_be_written_ends_the_run_and_is_not_lost(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = small(tmp_path), tmp_path / "run"
    n_calls = 0

    def fsync(handle: int) -> None:
        nonlocal n_calls
        if os.readlink(f"/proc/self/fd/{handle}").endswith("events.jsonl"):
            n_calls += 1
            if n_calls == failing:
                os.ftruncate(handle, 0 if failing == 1 else os.fstat(handle).st_size - 3)
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"No space left on device: '.*events\.jsonl'"):
        run(config, out)
    run(config, out)
    assert {r["epoch"] for r in read_events(out / "events.jsonl")} == {1, 2}


def test_regression_with_a_user_function_and_an_archive(tmp_path: Path) -> None:
    """The learned noise is restored; relative paths start at the configuration file."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.savez(tmp_path / "some.npz", x=x.numpy(), y=x[:, :2].sin().numpy())
    config = small(
        tmp_path,
        """
        data = {name = "npz", path = "some.npz", likelihood = "gaussian", dtype = "float64"}
        model = {name = "run_case:perceptron", relax = false, arguments = {hidden = 6}}
        fit = {epochs = 3, every = 1, burn_in = 0}
        """,
    )
    assert config.data.path == tmp_path / "some.npz"
    fit = run(config, tmp_path / "run")
    again = load_run(tmp_path / "run", trust_code=True)
    noise = again.razor.likelihood.noise.value  # type: ignore[union-attr]
    assert torch.equal(noise, fit.razor.likelihood.noise.value)  # type: ignore[union-attr]
    assert float(noise.detach()) != 1.0
    assert again.model[0].weight.dtype == torch.float64  # type: ignore[index, union-attr]


def test_a_configuration_needs_the_suffix_toml(tmp_path: Path) -> None:
    """Otherwise the defaults would be trained."""
    (tmp_path / "small.cfg").write_text(SMALL)
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"small.cfg must have the suffix .toml"):
        cli.run(["fit", str(tmp_path / "small.cfg"), "--out", str(out), "--fit.epochs", "1"])
    assert not out.exists()


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    """The files have the permissions of other files."""
    config = small(tmp_path, SMALL.replace("epochs = 2", "epochs = 1"))
    for name in ("a", "b"):
        run(config, tmp_path / name)
    plain = (tmp_path / "small.toml").stat().st_mode
    for name in (runs.CONFIG, runs.NETWORK, runs.RAZOR):
        a, b = tmp_path / "a" / name, tmp_path / "b" / name
        assert a.read_bytes() == b.read_bytes()
        assert a.stat().st_mode == plain
    (tmp_path / "made").mkdir()
    (point, *_) = (tmp_path / "a" / runs.CHECKPOINTS).iterdir()
    assert point.stat().st_mode == (tmp_path / "made").stat().st_mode


def test_wrong_folders_raise_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the folder of a fit"):
        load_run(tmp_path)
    config = small(tmp_path)
    run(config, tmp_path / "run")
    with pytest.raises(ValueError, match="already has a finished run .*Add --resume"):
        run(config, tmp_path / "run")
    again = run(config, tmp_path / "run", resume=True)  # done already: nothing is trained
    assert len(again.history) == 2
    (tmp_path / "run" / runs.READING).unlink()
    with pytest.raises(ValueError, match="No such file: .*reading.json. It is part of the run"):
        load_run(tmp_path / "run")
    for place in (tmp_path / "small.toml", tmp_path / "small.toml" / "run"):
        with pytest.raises(ValueError, match=r"No run can be written to .* is a file"):
            run(config, place)
    bad = replace(config, model=ModelConfig(name="conv"))
    with pytest.raises(ValueError, match="model.name = 'conv' does not fit inputs"):
        run(bad, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_rejected_change_does_not_modify_the_run(tmp_path: Path) -> None:
    config, folder = small(tmp_path), tmp_path / "run"
    run(config, folder)
    before = (folder / "config.toml").read_text()
    with pytest.raises(ValueError, match="lr was 0.01 and is 0.5"):
        run(replace(config, fit=config.fit.change(lr=0.5)), folder, resume=True)
    assert (folder / "config.toml").read_text() == before
    run(replace(config, fit=config.fit.change(save_every=2)), folder, resume=True)  # is free
    assert read_config(folder / "config.toml").fit.save_every == 2


def test_repeated_epochs_count_once(tmp_path: Path) -> None:
    """A resumed run repeats epochs; a new run removes those of an older one."""
    config, folder = small(tmp_path), tmp_path / "run"
    run(config, folder)
    events = folder / runs.EVENTS
    first, second = events.read_text().splitlines(keepends=True)
    events.write_text(first + second + first + second)
    reseal(folder)
    (question,) = fit_document(folder)["questions"]
    assert [r["epoch"] for r in question["candidates"][0]["history"]] == [1, 2]
    shutil.rmtree(folder / runs.CHECKPOINTS)
    run(replace(config, fit=config.fit.change(epochs=1)), folder, resume=True)
    assert [record["epoch"] for record in read_events(events)] == [1]


def test_a_run_that_failed_to_start_leaves_no_files(tmp_path: Path) -> None:
    config, folder = small(tmp_path), tmp_path / "run"
    with pytest.raises(ValueError, match="is not available"):
        run(replace(config, fit=replace(config.fit, device="cuda:99")), folder)
    assert not folder.exists()
    folder.mkdir()
    (folder / "notes.txt").touch()
    with pytest.raises(ValueError, match="is not available"):
        run(replace(config, fit=replace(config.fit, device="cuda:99")), folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert len(run(config, folder).history) == 2


def test_a_process_group_of_the_user_is_not_closed(tmp_path: Path) -> None:
    with job.group_of_one("gloo", tmp_path / "store"):
        run(small(tmp_path), tmp_path / "run")
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize("arguments", [("--out", "RUN"), ("--out=RUN",)])
def test_resuming_uses_the_configuration_of_the_run(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    write_atomically(tmp_path / "config.toml", b"[fit]\nepochs = 7\n")
    given = [part.replace("RUN", str(tmp_path)) for part in arguments]
    assert initial_config(["--resume", *given]).fit.epochs == 7
    assert initial_config(given).fit.epochs == 60


def test_resuming_without_a_run_raises_an_error(tmp_path: Path) -> None:
    nothing = ["--resume", "--out", str(tmp_path / "typo")]
    with pytest.raises(ValueError, match="There is no run to resume in .*typo"):
        initial_config([*nothing, "--quiet"])
    for told in ("--fit.epochs=3", "--help"):  # a new run that may be stopped, or no run
        assert initial_config([*nothing, told]) == RunConfig()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "symrazor", "fit", *arguments]


@pytest.mark.slow
def test_the_command_stops_and_resumes(tmp_path: Path) -> None:
    """After Ctrl-C and --resume the weights equal those of an uninterrupted run."""
    small(tmp_path, SMALL.replace("epochs = 2", 'epochs = 6\naugment = "run_case:impatient"'))
    file, out = str(tmp_path / "small.toml"), tmp_path / "run [bold] one"

    def call(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command("--out", str(out), *arguments),
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[1] / "support",
            env={**os.environ, **more},
        )

    stopped = call(file, CTRL_C="8")
    assert stopped.returncode == 130, stopped.stderr
    assert "Stopped by SIGINT after step 8 of 18" in stopped.stderr
    assert f"to resume: symrazor fit --out '{out}' --resume --trust-code" in stopped.stderr
    assert call("--resume").returncode == 2  # the folder names code
    done = call("--resume", "--trust-code")
    assert done.returncode == 0, done.stderr
    assert "The whole network is" in done.stdout
    assert [record["epoch"] for record in read_events(out / runs.EVENTS)] == [1, 2, 3, 4, 5, 6]
    whole = run(read_config(tmp_path / "small.toml"), tmp_path / "whole")
    x = whole.data.x
    torch.testing.assert_close(load_run(out).model(x), whole.model(x))


@pytest.mark.slow
def test_torchrun_restarts_a_dead_process(tmp_path: Path) -> None:
    """The second of two processes kills itself in its third epoch; torchrun restarts both."""
    text = SMALL.replace("epochs = 2", 'epochs = 6\nsave_every = 1\naugment = "run_case:deadly"')
    small(tmp_path, text.replace('name = "digits"', 'name = "digits"\ndtype = "float64"'))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "symrazor", "fit"]
    arguments = [str(tmp_path / "small.toml"), "--out", str(tmp_path / "run"), "--quiet"]
    environment = {**os.environ, "DEATH": str(tmp_path / "died"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1] / "support",
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    again = load_run(tmp_path / "run")
    whole = run(read_config(tmp_path / "small.toml"), tmp_path / "whole")  # in one process
    x = whole.data.x
    torch.testing.assert_close(again.model(x), whole.model(x), rtol=1e-8, atol=1e-9)
    mine, theirs = (json.loads(r.to_json())["evidence"] for r in (again.reading, whole.reading))
    assert mine == pytest.approx(theirs, rel=1e-9)


def test_export_does_not_modify_the_run(tmp_path: Path) -> None:
    """The weights of the run have the default name of an export."""
    run(small(tmp_path), tmp_path / "run")
    before = {file: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
    export(tmp_path / "run", "safetensors", quiet=True)
    assert (tmp_path / "run" / "plain.safetensors").is_file()
    for name in ("network.safetensors", "razor.safetensors"):
        with pytest.raises(ValueError, match="would be overwritten. Use --out"):
            export(tmp_path / "run", "safetensors", tmp_path / "run" / name, quiet=True)
    assert all(file.read_bytes() == content for file, content in before.items())
    load_run(tmp_path / "run")
