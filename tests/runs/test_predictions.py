"""Predict and export with run folders."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from run_case import reseal
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import symrazor as sr
from symrazor.inference.last_layer import UNCERTAINTY
from symrazor.runs import run
from symrazor.runs.config import DataConfig, ModelConfig, RunConfig
from symrazor.runs.folder import export_network
from symrazor.runs.predictions import predict, write_predictions
from symrazor.symmetry.export import SUFFIXES

MEANS = {"poisson": torch.exp, "bernoulli": torch.sigmoid, "gaussian": torch.clone}
"""Likelihood -> mean of y as a function of the outputs."""


def _run(folder: Path, likelihood: str, dtype: str) -> tuple[sr.Fit, Tensor]:
    """Train on ten images with targets that are valid for every likelihood."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(10, 1, 8, 8)).astype(np.float32)
    y = (np.arange(10)[:, None] % 2).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=y)
    np.savez(folder / "new.npz", x=x)
    data = DataConfig("npz", folder / "data.npz", likelihood=likelihood, dtype=dtype)  # type: ignore[arg-type]
    config = RunConfig(data, ModelConfig(relax=False, width=2), sr.FitConfig(epochs=2, every=1))
    return run(config, folder / "run"), torch.from_numpy(x)


@pytest.mark.parametrize("likelihood", MEANS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_predictions_are_means(tmp_path: Path, likelihood: str, dtype: str) -> None:
    """Predictions are neither log rates nor log odds."""
    fit, x = _run(tmp_path, likelihood, dtype)
    expected = MEANS[likelihood](fit.model(x.to(getattr(torch, dtype))).detach())
    predictions = predict(tmp_path / "run", tmp_path / "new.npz")
    torch.testing.assert_close(predictions.values, expected.double(), check_dtype=False)


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_export_in_double_precision(tmp_path: Path, form: str) -> None:
    fit, x = _run(tmp_path, "gaussian", "float64")
    out = tmp_path / f"plain{SUFFIXES[form]}"
    file = export_network(tmp_path / "run", form, out)  # type: ignore[arg-type]
    assert file.stat().st_size > 0
    if form == "torch":
        network = torch.export.load(file).module()
        torch.testing.assert_close(network(x.double()), fit.model(x.double()).detach())


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, sr.Discovery, Tensor]:
    x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
    y = 10 * x[:, :1] + torch.randn(80, 1, generator=torch.Generator().manual_seed(1))
    discovery = sr.discover(x, y, epochs=20)
    return discovery.save(tmp_path_factory.mktemp("regression") / "run"), discovery, x


def test_a_run_folder_predicts_like_the_discovery(
    regression: tuple[Path, sr.Discovery, Tensor], tmp_path: Path
) -> None:
    run, discovery, x = regression
    np.savez(tmp_path / "x.npz", x=x.numpy())
    read, direct = predict(run, tmp_path / "x.npz"), discovery.predict(x)
    for name, own in (("values", "mean"), ("std", "std"), ("epistemic", "epistemic")):
        torch.testing.assert_close(getattr(read, name), getattr(direct, own), rtol=1e-6, atol=1e-9)
    write_predictions(read, tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as saved:
        np.testing.assert_allclose(saved["std"], direct.std)


def test_rows_keep_their_names(
    regression: tuple[Path, sr.Discovery, Tensor], tmp_path: Path
) -> None:
    run, discovery, x = regression
    lines = [f"patient {n},{a},{b}" for n, (a, b) in enumerate(x[:5].tolist())]
    (tmp_path / "new.csv").write_text("\n".join(["id,a,b", *lines]))
    write_predictions(predict(run, tmp_path / "new.csv"), tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert list(rows[0]) == ["id", "target 1", "target 1 std", "target 1 epistemic"]
    assert [row["id"] for row in rows] == [f"patient {n}" for n in range(5)]
    std = discovery.predict(x[:5]).std
    assert std is not None
    assert [float(row["target 1 std"]) for row in rows] == pytest.approx(
        std[:, 0].tolist(), rel=1e-4
    )


def test_images_keep_their_file_names(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "train" / ("light" if number % 2 else "dark")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(100 * (number % 2), 100 + 100 * (number % 2), (8, 8))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    run = sr.discover(tmp_path / "train", epochs=1, starts=2).save(tmp_path / "run")
    write_predictions(predict(run, tmp_path / "train"), tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert [row["file"] for row in rows][:2] == ["dark/0.png", "dark/10.png"]
    write_predictions(predict(run, tmp_path / "train" / "light"), tmp_path / "p.csv")
    assert [row["file"] for row in rows_of(tmp_path / "p.csv")][:2] == ["1.png", "11.png"]


def test_a_posterior_that_does_not_fit_the_network_is_refused(
    regression: tuple[Path, sr.Discovery, Tensor], tmp_path: Path
) -> None:
    run, _, x = regression
    copy = tmp_path / "run"
    copy.mkdir()
    for file in run.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    np.savez(tmp_path / "x.npz", x=x.numpy())
    tensors = load_file(copy / UNCERTAINTY)
    about = {"head": ["another"], "averaged": True}
    save_file(tensors, copy / UNCERTAINTY, {"posterior": json.dumps(about)})
    reseal(copy)
    with pytest.raises(ValueError, match="the posterior of 'another' does not fit"):
        predict(copy, tmp_path / "x.npz")


def test_runs_without_a_posterior_predict_without_uncertainty(
    regression: tuple[Path, sr.Discovery, Tensor], tmp_path: Path
) -> None:
    run, discovery, x = regression
    copy = tmp_path / "run"
    copy.mkdir()
    for file in run.iterdir():
        if file.name != UNCERTAINTY:
            (copy / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((copy / "run.json").read_text())
    del manifest["files"][UNCERTAINTY]
    (copy / "run.json").write_text(json.dumps(manifest))
    np.savez(tmp_path / "x.npz", x=x.numpy())
    predictions = predict(copy, tmp_path / "x.npz")
    assert predictions.std is None and predictions.epistemic is None
    torch.testing.assert_close(predictions.values, discovery.predict(x).mean)


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_exports_can_have_the_uncertainty_as_second_output(
    regression: tuple[Path, sr.Discovery, Tensor], tmp_path: Path, form: str
) -> None:
    run, discovery, x = regression
    file = tmp_path / ("n.pt2" if form == "torch" else "n.onnx")
    if form == "torch":
        export_network(run, "torch", file, uncertainty=True)
        about = {"network.json": ""}
        got = torch.export.load(file, extra_files=about).module()(x)
        described = json.loads(about["network.json"])
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        export_network(run, "onnx", file, uncertainty=True)
        session = onnxruntime.InferenceSession(str(file))
        assert [value.name for value in session.get_inputs()] == ["input"]
        assert [value.name for value in session.get_outputs()] == ["mean", "std"]
        got = map(torch.from_numpy, session.run(None, {"input": x.numpy()}))
        described = json.loads(session.get_modelmeta().custom_metadata_map["network"])
    mean, std = got
    expected = discovery.predict(x)
    torch.testing.assert_close(mean, expected.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(std, expected.std, rtol=1e-4, atol=1e-4)
    assert described["outputs"] == ["mean", "std"]
    assert described["inputs"] == "vector, float32 [n, 2]"


def test_files_carry_class_names_and_have_the_permissions_of_their_neighbours(
    tmp_path: Path,
) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    labels = np.array(["cat", "dog"])[(x[:, 0] > 0).long()]
    run = sr.discover(x, labels, epochs=1, starts=2).save(tmp_path / "run")
    about = {"network.json": ""}
    torch.export.load(run / "network.pt2", extra_files=about)
    assert json.loads(about["network.json"])["classes"] == ["cat", "dog"]
    assert json.loads(about["network.json"])["outputs"] == ["logits"]
    with safe_open(run / "network.safetensors", "pt") as file:
        assert json.loads(file.metadata()["network"])["classes"] == ["cat", "dog"]
    modes = {path.name: path.stat().st_mode for path in run.iterdir()}
    assert modes["network.safetensors"] == modes["uncertainty.safetensors"] == modes["run.json"]
