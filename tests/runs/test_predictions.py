"""Predict and export with the run folder of a fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import symrazor as sr
from symrazor.runs import run
from symrazor.runs.config import DataConfig, ModelConfig, RunConfig
from symrazor.runs.folder import export_network
from symrazor.runs.predictions import predict

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
    torch.testing.assert_close(predictions.values, expected)


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_export_in_double_precision(tmp_path: Path, form: str) -> None:
    fit, x = _run(tmp_path, "gaussian", "float64")
    file = export_network(tmp_path / "run", form, tmp_path / f"plain.{form}")  # type: ignore[arg-type]
    assert file.stat().st_size > 0
    if form == "torch":
        network = torch.export.load(file).module()
        torch.testing.assert_close(network(x.double()), fit.model(x.double()).detach())
