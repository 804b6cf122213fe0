"""From data to a verdict, a document, a run folder and a plain network."""

import csv
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor import cli
from symrazor.data import Dataset, dataset
from symrazor.discover import Answer, Candidate, Options, digits, maps
from symrazor.discover.api import held_out
from symrazor.discover.budget import Cost, batch_size, every, plan
from symrazor.discover.folder import export_network, load_network, read_document
from symrazor.discover.kinds import CANDIDATES, candidates
from symrazor.discover.preparation import prepare
from symrazor.discover.structures import Family, Structure
from symrazor.runs.config import DataConfig, ModelConfig, RunConfig
from symrazor.runs.run import run as fit_run

N = 60


def _data(kind: str, task: str = "classification", n: int = N) -> Dataset:
    """Noise of some kind, and labels that depend on it."""
    shapes = {
        "image": (1, 8, 8),
        "volume": (1, 4, 4, 4),
        "series": (2, 16),
        "set": (6, 2),
        "vector": (5,),
    }
    x = torch.randn(n, *shapes[kind], generator=torch.Generator().manual_seed(0)) * 3 + 1
    size = x.flatten(1).mean(1)
    y = (size > size.median()).long() if task == "classification" else 100 + 10 * size
    return dataset(x, y, kind=kind, task=task)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("kind", [*CANDIDATES])
def test_every_kind_gives_a_document_and_a_plain_network(kind: str, task: str) -> None:
    found = sr.discover(_data(kind, task), epochs=1)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (document["schema"], document["kind"], document["task"]) == (1, kind, task)
    (question,) = document["questions"]
    values = [c["reading"]["evidence"]["log_evidence"] for c in question["candidates"]]
    assert values == sorted(values, reverse=True)
    assert question["margin"] == pytest.approx(values[0] - values[1])
    assert question["verdict"] == found.verdict
    assert "nats" in found.verdict
    assert len(question["candidates"][0]["history"]) == 1
    assert found.verdict.split(".")[0] in found._repr_html_()
    network = found.network()
    assert not any(type(m).__module__.startswith("symrazor") for m in network.modules())
    # the plain network takes data as they came: against scaling by hand and the trained model
    data = found.found[0].data
    x = _data(kind, task).x[:7]
    moved = x.transpose(1, 2) if kind == "set" else x
    train = data.x.transpose(1, 2) if kind == "set" else data.x
    over = [0, *range(2, train.ndim)]
    mean = train.double().mean(over, keepdim=True)
    std = train.double().std(over, correction=0, keepdim=True)
    with torch.no_grad():
        f = found.best.fit.model(((moved - mean) / std).float())
        if task == "regression":
            assert data.y is not None
            f = f * data.y.std(0, correction=0) + data.y.mean(0)
        torch.testing.assert_close(network(x), f, rtol=1e-3, atol=1e-3)
    p = found.predict(x.numpy())
    expected = f.softmax(1) if task == "classification" else f
    torch.testing.assert_close(p, expected, rtol=1e-3, atol=1e-3)


def test_the_run_folder_and_what_can_be_done_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _data("image")
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
    assert document["questions"][0]["verdict"] in said
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
    assert rows[0] == ["label", "p(0)", "p(1)"]
    table = torch.tensor([[float(v) for v in row[1:]] for row in rows[1:]])
    torch.testing.assert_close(table, expected, rtol=1e-4, atol=1e-5)
    assert [row[0] for row in rows[1:]] == [str(k) for k in expected.argmax(1).tolist()]
    cli.run(["predict", str(run), str(file), "--out", str(tmp_path / "p.npz")])
    with np.load(tmp_path / "p.npz") as saved:
        np.testing.assert_allclose(saved["probabilities"], expected, rtol=1e-5, atol=1e-6)
    cli.run(
        ["export", str(run), "--format", "safetensors", "--out", str(tmp_path / "w.safetensors")]
    )
    assert (tmp_path / "w.safetensors").stat().st_size > 100
    with pytest.raises(ValueError, match=r"expected images of shape \[1, 8, 8\]"):
        np.savez(tmp_path / "b.npz", x=np.zeros((3, 1, 9, 9), np.float32))
        cli.run(["predict", str(run), str(tmp_path / "b.npz")])
    with pytest.raises(ValueError, match="expected a run folder with discover.json"):
        cli.run(["report", str(tmp_path)])


def test_runs_of_fit_are_taken_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report, export and predict, against the network as it was trained."""
    config = RunConfig(
        DataConfig(task="digit", limit=60),
        ModelConfig(width=2),
        sr.FitConfig(epochs=2, every=1, burn_in=0, batch_size=20).change(estimator="mc"),
    )
    run = tmp_path / "run"
    model = fit_run(config, run).model
    cli.run(["report", str(run)])
    assert "What did the network learn?" in capsys.readouterr().out
    assert "<html" in (run / "report.html").read_text()[:500]
    x, _ = digits.canvas("digit")[1]
    np.savez(tmp_path / "x.npz", x=x[:5].numpy())
    cli.run(["predict", str(run), str(tmp_path / "x.npz"), "--out", str(tmp_path / "p.npz")])
    with torch.no_grad(), np.load(tmp_path / "p.npz") as saved:
        np.testing.assert_allclose(saved["probabilities"], model(x[:5]).softmax(1), atol=0.02)
    cli.run(["export", str(run), "--out", str(tmp_path / "n.pt2")])
    again = torch.export.load(tmp_path / "n.pt2").module()
    torch.testing.assert_close(again(x[:5]), load_network(run)(x[:5]))


@pytest.mark.slow
def test_a_run_as_an_onnx_file(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    data = _data("series", "regression")
    sr.discover(data, epochs=1).save(tmp_path)
    file = export_network(tmp_path, "onnx", tmp_path / "network.onnx")
    session = onnxruntime.InferenceSession(str(file))
    (got,) = session.run(None, {session.get_inputs()[0].name: data.x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(got, load_network(tmp_path)(data.x), rtol=1e-3, atol=1e-3)


def test_a_stopped_run_is_taken_up_and_ends_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    data = _data("vector")
    whole = sr.discover(data, epochs=3)

    def stop(text: str) -> None:
        if "2 of 3" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sr.discover(data, epochs=3, out=tmp_path, tell=stop)
    kept = {p.name for p in (tmp_path / "unfinished" / "x-and-y").iterdir()}
    assert kept == {"plan.json", "linear-model", "one-hidden-layer"}
    told: list[str] = []
    again = sr.discover(data, epochs=3, out=tmp_path, tell=told.append)
    assert any("going on" in text for text in told)
    assert [c.log_evidence for c in again.candidates] == [c.log_evidence for c in whole.candidates]
    told.clear()
    sr.discover(
        data, epochs=3, seed=1, out=tmp_path, tell=told.append
    )  # another run: from its start
    assert not any("going on" in text for text in told)


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_the_same_command_goes_on(tmp_path: Path) -> None:
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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("unfinished/*/relaxed/step-*-epoch-0005")):
        assert time.monotonic() < until
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert "Traceback" not in said
    again = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert again.stdout is not None
    lines = [again.stdout.readline() for _ in range(4)]
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert any("going on with an unfinished run" in line for line in lines)


# What verdicts say.


class _Known(Candidate):
    """A candidate of known evidence."""

    values: ClassVar[dict[str, float]] = {}

    @property
    def log_evidence(self) -> float:
        return self.values[self.name]


@pytest.fixture(scope="module")
def fitted() -> dict[str, sr.Fit]:
    torch.manual_seed(0)
    (x, y), _ = digits.canvas("digit")
    family = digits.family("digit")
    data = (x[:64], y[:64])
    return {s.name: sr.fit(s.make(), data, epochs=1, estimator="mc") for s in family.structures}


@pytest.mark.parametrize(
    ("values", "spread", "said", "not_said"),
    [
        ((0, 0, 0), 0, "does not separate it from a plain CNN and a fully", "take that"),
        ((0, -400, -900), 0, "+400 nats against a plain CNN, +900 nats against", "separate"),
        ((0, -10, -900), 0, "+10 nats against a plain CNN", "separate"),
        (
            (0, -10, -900),
            9,
            "The evidence does not separate it from a plain CNN.",
            "fully connected network and",
        ),
        ((0, 50, -900), 0, "A plain CNN says the same with less: take that.", "separate"),
        (
            (0, -50, 70),
            0,
            "A fully connected network has the highest evidence, so take that;",
            "less",
        ),
        (
            (0, 0, 70),
            0,
            "A fully connected network has the highest evidence, so take that;",
            "less",
        ),
    ],
)
def test_verdicts(
    fitted: dict[str, sr.Fit], values: tuple[float, ...], spread: float, said: str, not_said: str
) -> None:
    names = ("relaxed", "convolutional", "fully connected")
    known = type("K", (_Known,), {"values": dict(zip(names, values, strict=True))})
    found = sorted((known(n, fitted[n], spread) for n in names), key=lambda c: -c.log_evidence)
    answer = Answer("digit", "?", digits.family("digit"), found)
    assert said in answer.verdict
    assert not_said not in answer.verdict
    assert "Position does not matter." in answer.verdict


@pytest.mark.parametrize("error", [0.1, 1.06])
def test_a_verdict_does_not_contradict_itself(fitted: dict[str, sr.Fit], error: float) -> None:
    """Of a network that was hardly trained: no share in free paths, and yet a large error."""
    fit = fitted["relaxed"]
    layers = [
        replace(layer, equivariance_error={"translation": error}) if layer.relaxed else layer
        for layer in fit.reading.layers
    ]
    assert all(layer.free_share < 0.01 for layer in layers if layer.relaxed)
    known = replace(fit, reading=replace(fit.reading, layers=layers))
    answer = Answer("digit", "?", digits.family("digit"), [Candidate("relaxed", known)])
    if error < 1:
        assert answer.symmetric
        assert "Position does not matter. Layers 1 to 3 are nearly translation-" in answer.verdict
    else:
        assert answer.symmetric is None
        assert "not trained enough to tell. Layers 1 to 3 are not settled" in answer.verdict
        assert "Position" not in answer.verdict
    assert "use position" not in answer.verdict


def test_one_candidate_and_an_early_verdict(fitted: dict[str, sr.Fit]) -> None:
    only = [Candidate("relaxed", fitted["relaxed"])]
    answer = Answer("digit", "?", digits.family("digit"), only, ("Early.",))
    assert answer.margin is None
    assert answer.verdict.endswith("no time to train another network to compare with. Early.")


# Time, splits, networks.


@pytest.mark.parametrize("seconds", [0.1, 5.0, 60.0, 1e4])
@pytest.mark.parametrize("n", [30, 1000, 60_000])
def test_the_plan_is_the_longest_that_fits(n: int, seconds: float) -> None:
    costs = {"a": Cost(1e-4, 2e-4, 0.5), "b": Cost(5e-5, 1e-4, 0.1)}
    found = plan(costs, n, seconds)

    def total(epochs: int) -> float:
        return sum(c.total(found.data, epochs) for c in costs.values())

    assert 1 <= found.epochs <= 400
    assert found.seconds == {name: c.total(found.data, found.epochs) for name, c in costs.items()}
    if found.epochs > 1:
        assert total(found.epochs) <= 0.8 * seconds
    most = n if n < 1000 else int(0.8 * n)  # the rest is to be predicted
    if found.data < most:  # fewer data only where thirty passes over them would be too long
        assert sum(c.total(most, 30) for c in costs.values()) > 0.8 * seconds
    assert min(n, 500) <= found.data <= most


def test_time_is_kept() -> None:
    """A short time, on few data: all is done within it, tries included."""
    started = time.perf_counter()
    found = sr.discover(_data("vector", n=200), minutes=0.05)
    assert time.perf_counter() - started < 40  # without a limit it would be minutes
    assert found.candidates


def test_batches_and_evidence_steps() -> None:
    assert [batch_size(n) for n in (10, 400, 1437, 60_000)] == [16, 16, 64, 128]
    assert [every(epochs) for epochs in (1, 9, 50, 400)] == [1, 1, 5, 40]


def test_every_class_is_in_both_parts_and_no_datum_in_two() -> None:
    y = torch.tensor([0] * 50 + [1] * 20 + [2] * 10)
    data = dataset(torch.arange(80.0).reshape(-1, 1), y)
    train, test = held_out(data, 0.2, seed=0)
    assert test is not None
    assert test[1].bincount().tolist() == [10, 4, 2]
    both = torch.cat([train.x, test[0]]).flatten().sort().values
    assert torch.equal(both, torch.arange(80.0))
    assert held_out(data, 0.0, seed=0)[1] is None


@pytest.mark.parametrize(
    "shape", [(1, 4), (3, 100), (1, 5, 7), (3, 32, 32), (1, 1, 9), (2, 4, 5, 6)]
)
def test_convolutional_networks_of_any_shape_are_equivariant(shape: tuple[int, ...]) -> None:
    model = maps.convolutional(shape, 3)
    x = torch.randn(4, *shape)
    assert model(x).shape == (4, 3)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    assert sr.equivariance_error(convs[0], x) < 1e-5


def test_scaling_of_constants_and_of_bytes() -> None:
    x = torch.ones(30, 2)
    x[:, 1] = torch.arange(30)
    prepared = prepare(dataset(x, torch.arange(30) % 2)).inputs(x)
    assert torch.equal(prepared[:, 0], torch.zeros(30))
    assert float(prepared[:, 1].std(correction=0)) == pytest.approx(1)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="expected minutes above 0, got 0"):
        sr.discover(_data("vector"), minutes=0)
    with pytest.raises(ValueError, match="expected options among"):
        sr.discover(_data("vector"), minute=1)
    with pytest.raises(ValueError, match="expected no groups for vectors"):
        sr.discover(_data("vector"), groups=["translation"])
    with pytest.raises(ValueError, match="groups"):
        sr.discover(_data("image"), groups=["rotations of a teapot"])
    with pytest.raises(ValueError, match="with at least 4 positions"):
        sr.discover(torch.randn(30, 1, 1, 2), torch.arange(30) % 2)
    with pytest.raises(ValueError, match="expected labels in"):
        sr.discover(torch.randn(30, 4))
    assert Options().change(groups=["a"], out="b").out == Path("b")


def test_family_names_its_members() -> None:
    family = Family([Structure("a", nn.Identity, "an a")])
    assert family.label("a") == "an a"
    assert [s.name for s in candidates(_data("set")).structures][1] == "shared"


# What is found where the truth is known.


def _bumps(n: int = 500) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Series with one of three shapes somewhere: the series, which shape, where."""
    generator = torch.Generator().manual_seed(0)
    where = torch.randint(32, (n,), generator=generator)
    which = torch.randint(3, (n,), generator=generator)
    d = (torch.arange(32)[None] - where[:, None] + 16) % 32 - 16.0
    bump = (-(d**2) / 8).exp()
    shapes = torch.stack([bump, bump * d.sin(), -(-(d**2) / 30).exp()])
    x = shapes[which, torch.arange(n)] + 0.2 * torch.randn(n, 32, generator=generator)
    return x.unsqueeze(1), which, where // 8


@pytest.mark.slow
def test_series_what_and_when() -> None:
    x, what, when = _bumps()
    kept = sr.discover(x, what, kind="series", epochs=40)
    assert "When it happens does not matter." in kept.verdict
    broken = sr.discover(x, when, kind="series", epochs=40)
    assert "When it happens matters." in broken.verdict
    assert broken.best.name != "convolutional"


@pytest.mark.slow
def test_sets_with_and_without_order() -> None:
    x = torch.randn(600, 8, 2, generator=torch.Generator().manual_seed(0))
    kept = sr.discover(x, x.square().sum(2).mean(1), kind="set", epochs=60)
    assert "The order of the points does not matter." in kept.verdict
    broken = sr.discover(x, (x[:, 0, 0] > x[:, 1, 0]).long(), kind="set", epochs=60)
    assert "The order of the points matters." in broken.verdict
    assert broken.best.name != "shared"


@pytest.mark.slow
def test_vectors_linear_and_not() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=generator)
    noise = 0.1 * torch.randn(400, generator=generator)
    linear = sr.discover(x, x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + noise, epochs=80)
    assert linear.best.name == "linear model"
    assert "The data ask for a linear model." in linear.verdict
    wave = sr.discover(x, (2 * x[:, 0]).sin() * x[:, 1] + noise, epochs=80)
    assert wave.best.name != "linear model"
    assert wave.best.fit.reading.test["mse"] < 0.2
