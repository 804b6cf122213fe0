"""Run `discover` on all kinds of data; check verdicts, documents, run folders and networks."""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from discover_data import some_data

import symrazor as sr
from symrazor.cli import app as cli
from symrazor.core.files import BUDGET_VARIABLE
from symrazor.data import dataset
from symrazor.discovery import digits
from symrazor.discovery.api import _notes, fitting_memory
from symrazor.discovery.families import registered_kinds
from symrazor.discovery.question import Options
from symrazor.layers.relaxed import spatial_layers
from symrazor.runs import run as fit_run
from symrazor.runs.config import DataConfig, ModelConfig, RunConfig
from symrazor.runs.folder import export_network, load_network, read_document
from symrazor.runs.predictions import predict


@pytest.mark.parametrize(("minutes", "expected"), [(1.0, "1 minute,"), (2.0, "2 minutes,")])
def test_a_note_counts_the_minutes(minutes: float, expected: str) -> None:
    family = SimpleNamespace(structures=(), optional=())
    comparison = SimpleNamespace(question=SimpleNamespace(family=family))
    plan = SimpleNamespace(steps=10, costs={"a": 1.0})
    compared: Any = SimpleNamespace(plan=plan, comparison=comparison)
    assert f"fitted into {expected}" in _notes(compared, Options(minutes=minutes))[0]


@pytest.mark.parametrize("holds", [True, False, None])
def test_a_note_says_that_single_axes_were_not_tested(holds: bool | None) -> None:
    """Invariance to all shifts includes them. Too few training steps are noted as well."""
    family = SimpleNamespace(structures=(), optional=("x-invariant",))
    comparison = SimpleNamespace(question=SimpleNamespace(family=family))
    plan, claims = SimpleNamespace(steps=10, costs={"a": 1.0}), (SimpleNamespace(holds=holds),)
    compared: Any = SimpleNamespace(plan=plan, comparison=comparison, claims=claims)
    *first, last = _notes(compared, Options())
    assert [note.partition(":")[0] for note in first] == ["Shifts along one axis alone"] * (
        not holds
    )
    assert last.startswith("Provisional: only 10 training steps")


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("kind", registered_kinds())
def test_every_kind_gives_a_document_and_a_plain_network(kind: str, task: str) -> None:
    discovery = sr.discover(some_data(kind, task), epochs=1, starts=2)
    document = json.loads(json.dumps(discovery.to_dict(), allow_nan=False))
    assert (document["schema"], document["kind"], document["task"]) == (1, kind, task)
    (question,) = document["questions"]
    values = [c["log_evidence"] for c in question["candidates"]]
    assert values == sorted(values, reverse=True)
    for candidate in question["candidates"]:
        starts = [start["log_evidence"] for start in candidate["starts"]]
        assert len(starts) == 2
        assert candidate["log_evidence"] == pytest.approx(sum(starts) / 2)
        assert candidate["reading"]["evidence"]["log_evidence"] == pytest.approx(max(starts))
        assert candidate["left_out"]["n"] == 2 * 9  # a fifth of 48, for both starts
    assert question["margin"] == pytest.approx(values[0] - values[1])
    assert question["verdict"] == discovery.verdict
    assert "nats" in discovery.verdict
    assert len(question["candidates"][0]["history"]) == 2  # one epoch in each of two phases
    assert discovery.verdict.split(".")[0] in discovery._repr_html_()
    assert "\n" not in repr(discovery)
    network = discovery.network()
    assert not any(type(m).__module__.startswith("symrazor") for m in network.modules())
    # the plain network takes data as they came: against scaling by hand and the trained model
    data = discovery.results[0].data
    x = some_data(kind, task).x[:7]
    moved = x.transpose(1, 2) if kind == "set" else x
    train = data.x.transpose(1, 2) if kind == "set" else data.x
    over = [0, *range(2, train.ndim)]
    mean = train.double().mean(over, keepdim=True)
    std = train.double().std(over, correction=0, keepdim=True)
    with torch.no_grad():
        fit = discovery.results[0].answer.recommended_fit
        model = fit.collapse() if spatial_layers(fit.model) else fit.model
        f = model(((moved - mean) / std).float())
        if task == "regression":
            assert data.y is not None
            f = f * data.y.std(0, correction=0) + data.y.mean(0)
        else:
            f = f / discovery.results[0].answer.delivered.temperature
        torch.testing.assert_close(network(x), f, rtol=1e-3, atol=1e-3)
    prediction, posterior = discovery.predict(x.numpy()), discovery.results[0].posterior
    expected = f.softmax(1) if task == "classification" else f
    if posterior is None or task == "regression" or not posterior.averaged:
        torch.testing.assert_close(prediction.mean, expected.double(), rtol=1e-3, atol=1e-3)
    assert prediction.std is not None and prediction.epistemic is not None
    assert bool((prediction.std > 0).all() and (prediction.epistemic <= prediction.std).all())


def test_report_export_and_predict_read_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = some_data("image")
    file = tmp_path / "data.npz"
    np.savez(file, x=data.x.numpy(), y=data.y)
    run = tmp_path / "run"
    cli.run(
        ["discover", str(file), "--epochs", "1", "--out", str(run), "--json", str(tmp_path / "a")]
    )
    said = capsys.readouterr().out
    assert "60 images of 1 x 8 x 8, 2 classes" in said
    document = read_document(run)
    assert document == json.loads((tmp_path / "a").read_text())
    question = document["questions"][0]
    assert f"{question['headline']} {question['summary']['certainty']}" in said
    assert question["summary"]["recommendation"] in said
    assert (run / "evidence.png").read_bytes().startswith(b"\x89PNG")
    assert "torch.export.load" in (run / "README.txt").read_text()
    assert document["questions"][0]["calibration"]["on"] == "held-out data"
    assert document["questions"][0]["verdict"][:20] in (run / "report.html").read_text()
    assert not (run / "unfinished").exists()
    with torch.no_grad():
        expected = load_network(run)(data.x).softmax(1)
    cli.run(["predict", str(run), str(file), "--out", str(tmp_path / "p.csv"), "--quiet"])
    with (tmp_path / "p.csv").open() as opened:
        rows = list(csv.reader(opened))
    assert rows[0] == ["label", "p(0)", "p(1)", "epistemic"]
    table = torch.tensor([[float(v) for v in row[1:]] for row in rows[1:]])
    if document["questions"][0]["predictions"]["default"] == "averaged":
        expected = predict(run, file).values
    torch.testing.assert_close(table[:, :2].double(), expected.double(), rtol=1e-4, atol=1e-5)
    assert bool((table[:, 2] > 0).all())
    assert [row[0] for row in rows[1:]] == [str(k) for k in expected.argmax(1).tolist()]
    cli.run(["predict", str(run), str(file), "--out", str(tmp_path / "p.npz")])
    with np.load(tmp_path / "p.npz") as saved:
        np.testing.assert_allclose(saved["probabilities"], expected, rtol=1e-5, atol=1e-6)
    cli.run(
        ["export", str(run), "--format", "safetensors", "--out", str(tmp_path / "w.safetensors")]
    )
    assert (tmp_path / "w.safetensors").stat().st_size > 100
    with pytest.raises(ValueError, match=r"images of shape \[1, 8, 8\]"):
        np.savez(tmp_path / "b.npz", x=np.zeros((3, 1, 9, 9), np.float32))
        cli.run(["predict", str(run), str(tmp_path / "b.npz")])
    with pytest.raises(ValueError, match="is not the folder of a finished run"):
        cli.run(["report", str(tmp_path)])


def test_report_export_and_predict_read_run_folders_of_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare the commands with the trained network."""
    config = RunConfig(
        DataConfig(task="digit", limit=60),
        ModelConfig(width=2),
        sr.FitConfig(epochs=2, every=1, burn_in=0, batch_size=20).change(estimator="mc"),
    )
    run = tmp_path / "run"
    model = fit_run(config, run).model
    cli.run(["report", str(run)])
    assert "What did the network learn?\n" in capsys.readouterr().out
    assert "<html" in (run / "report.html").read_text()[:500]
    x, _ = digits.digits_on_canvas("digit")[1]
    np.savez(tmp_path / "x.npz", x=x[:5].numpy())
    cli.run(["predict", str(run), str(tmp_path / "x.npz"), "--out", str(tmp_path / "p.npz")])
    with torch.no_grad(), np.load(tmp_path / "p.npz") as saved:
        np.testing.assert_allclose(saved["probabilities"], model(x[:5]).softmax(1), atol=0.02)
    cli.run(["export", str(run), "--out", str(tmp_path / "n.pt2")])
    again = torch.export.load(tmp_path / "n.pt2").module()
    torch.testing.assert_close(again(x[:5]), load_network(run)(x[:5]))


@pytest.mark.slow
def test_onnx_export_matches_the_network(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    data = some_data("series", "regression")
    sr.discover(data, epochs=1).save(tmp_path)
    file = export_network(tmp_path, "onnx", tmp_path / "network.onnx")
    session = onnxruntime.InferenceSession(str(file))
    (got,) = session.run(None, {session.get_inputs()[0].name: data.x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(got, load_network(tmp_path)(data.x), rtol=1e-3, atol=1e-3)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    data = some_data("vector")
    options = {"epochs": 4, "starts": 2}
    whole = sr.discover(data, **options)

    def stop(text: str) -> None:
        if "phase 2 of 2 (2 epochs): 2 of 6, one hidden layer, start 1" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sr.discover(data, **options, out=tmp_path, tell=stop)
    kept = {p.name for p in (tmp_path / "unfinished" / "data").iterdir()}
    phases = {"one-hidden-layer-0-1", "linear-model-0-1"}
    names = ("linear-model", "one-hidden-layer", "two-hidden-layers")
    phases |= {f"{name}-{start}-0" for name in names for start in (0, 1)}
    assert kept == {"plan.json", "steps.json", *phases}
    told: list[str] = []
    again = sr.discover(data, **options, out=tmp_path, tell=told.append)
    assert any("resuming" in text for text in told)
    for before, after in zip(whole.candidates, again.candidates, strict=True):
        assert [m.log_evidence for m in before.members] == [m.log_evidence for m in after.members]
        assert torch.equal(before.left_out, after.left_out)
    for a, b in zip(whole.network().parameters(), again.network().parameters(), strict=True):
        assert torch.equal(a, b)
    told.clear()
    sr.discover(data, **options, seed=1, out=tmp_path, tell=told.append)  # from its start
    assert not any("resuming" in text for text in told)


def test_equivariance_is_measured_for_the_best_start_only() -> None:
    """The measurement took a fifth of a short training."""
    found = sr.discover(some_data("series", "classification"), epochs=2, starts=2)
    for candidate in found.candidates:
        assert all(not member.reading.equivariance_error for member in candidate.members)
    errors = {c.name: c.fit.reading.equivariance_error for c in found.candidates}
    assert errors["convolutional"]["translation"] < 1e-4
    assert errors["positional"]["translation"] > 1e-2


def test_data_beyond_the_memory_budget_are_reduced_at_random(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
    data = dataset(x, (x[:, 0] > 0).long())
    monkeypatch.setenv(BUDGET_VARIABLE, str(400 * 10 * 12))
    assert fitting_memory(data, 0).x is data.x
    monkeypatch.setenv(BUDGET_VARIABLE, str(400 * 10 * 12 - 1))
    with pytest.warns(UserWarning, match="using 200 of 400 samples, chosen at random"):
        half = fitting_memory(data, 0)
    rows = {tuple(row) for row in x.tolist()}
    assert len(half.x) == 200 and {tuple(row) for row in half.x.tolist()} <= rows
    monkeypatch.setenv(BUDGET_VARIABLE, "1")
    with pytest.warns(UserWarning, match="using 25 of 400"):
        fitting_memory(data, 0)


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_the_same_command_resumes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "symrazor",
        "discover",
        "--epochs",
        "40",
        "--out",
        str(tmp_path),
    ]
    with _running(command) as process:
        while not _later(tmp_path.glob("unfinished/*/relaxed-0-1/step-*")):
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert "run the same command to resume" in said
    assert "Traceback" not in said
    with _running(command) as again:
        assert again.stdout is not None
        lines = [again.stdout.readline() for _ in range(4)]
        again.send_signal(signal.SIGINT)
        again.communicate()
    assert any("resuming an unfinished run" in line for line in lines)


def _later(checkpoints: Iterable[Path]) -> list[Path]:
    """Return the checkpoints after the initial one; only the newest two are kept."""
    return [place for place in checkpoints if not place.name.endswith("epoch-0000")]


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process and end it with the test."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# Data with a known symmetry.


def _bumps(n: int = 500) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return series with one of three shapes at a random position, the shape and the position."""
    generator = torch.Generator().manual_seed(0)
    where = torch.randint(32, (n,), generator=generator)
    which = torch.randint(3, (n,), generator=generator)
    d = (torch.arange(32)[None] - where[:, None] + 16) % 32 - 16.0
    bump = (-(d**2) / 8).exp()
    shapes = torch.stack([bump, bump * d.sin(), -(-(d**2) / 30).exp()])
    x = shapes[which, torch.arange(n)] + 0.2 * torch.randn(n, 32, generator=generator)
    return x.unsqueeze(1), which, where // 8


@pytest.mark.slow
def test_series_with_and_without_shift_invariance() -> None:
    x, what, when = _bumps()
    kept = sr.discover(x, what, kind="series", epochs=40)
    assert kept.verdict.startswith("Invariant to shifts in time")
    assert kept.chosen.name == "convolutional"
    broken = sr.discover(x, when, kind="series", epochs=40)
    assert broken.verdict.startswith("Not invariant to shifts in time")
    assert broken.chosen.name != "convolutional"


@pytest.mark.slow
def test_sets_with_and_without_permutation_invariance() -> None:
    x = torch.randn(600, 8, 2, generator=torch.Generator().manual_seed(0))
    kept = sr.discover(x, x.square().sum(2).mean(1), kind="set", epochs=60)
    assert kept.verdict.startswith("Permutation-invariant: the order of the points does not")
    broken = sr.discover(x, (x[:, 0, 0] > x[:, 1, 0]).long(), kind="set", epochs=60)
    assert broken.verdict.startswith("Not permutation-invariant: the order of the points matters.")
    assert broken.chosen.name == "fully connected"


@pytest.mark.slow
def test_vectors_with_linear_and_nonlinear_targets() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=generator)
    noise = 0.1 * torch.randn(600, generator=generator)
    linear = sr.discover(x, x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + noise, epochs=80)
    assert linear.verdict.startswith("Linear: hidden layers do not improve the prediction.")
    assert "Recommended network: a linear model" in linear.verdict
    wave = sr.discover(x, (2 * x[:, 0]).sin() * x[:, 1] + noise, epochs=80)
    assert wave.verdict.startswith("Not linear: hidden layers improve the prediction.")
    assert wave.results[0].answer.recommended_fit.reading.test["mse"] < 0.2
