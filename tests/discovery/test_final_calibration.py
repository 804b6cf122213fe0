"""Test how the delivered network predicts: its posterior, and the choice by left-out samples."""

import math

import pytest
import torch

import symrazor as sr
from symrazor.discovery.final import MIN_CALIBRATION_SAMPLES, Start, calibrate


def trained(n: int = 60, noise: float = 0.3) -> tuple[sr.Fit, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n + 200, 3, generator=generator)
    y = x[:, :1] - x[:, 1:2] + noise * torch.randn(n + 200, 1, generator=generator)
    torch.manual_seed(0)
    fit = sr.fit(torch.nn.Linear(3, 1), (x[:n], y[:n]), "gaussian", epochs=60, progress=False)
    return fit, x[n:], y[n:]


def test_few_left_out_samples_are_no_calibration() -> None:
    fit, x, y = trained()
    few = MIN_CALIBRATION_SAMPLES - 1
    assert calibrate([Start(fit, 1.0, (x[:few], y[:few]))]) is None


def test_the_variance_of_left_out_targets_is_right_on_average() -> None:
    fit, x, y = trained()
    found = calibrate([Start(fit, 1.0, (x[:100], y[:100])), Start(fit, 1.0, (x[100:], y[100:]))])
    assert found is not None and found.n == 200
    with torch.no_grad():
        spread = float((fit.model(x) - y).square().mean().sqrt())
    assert math.sqrt(found.noise[0]) == pytest.approx(spread, rel=0.1)
    assert found.averaged == (found.scores["averaged"] < found.scores["plug-in"])
    assert found.to_dict()["default"] == ("averaged" if found.averaged else "plug-in")


def test_the_document_says_how_the_network_predicts() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=generator)
    y = 100 + 10 * x[:, :1] + torch.randn(120, 1, generator=generator)
    found = sr.discover(x, y, epochs=40)
    predictions = found.to_dict()["questions"][0]["predictions"]
    assert predictions["n"] == 3 * 19
    assert set(predictions["nll"]) == {"plug-in", "averaged"}
    best = min(predictions["nll"], key=predictions["nll"].get)
    assert predictions["default"] == best
    new = torch.randn(500, 3, generator=generator)
    prediction = found.predict(new)
    target = 100 + 10 * new[:, :1] + torch.randn(500, 1, generator=generator)
    assert prediction.std is not None
    inside = ((prediction.mean - target).abs() < 1.96 * prediction.std).double().mean()
    assert 0.9 < float(inside) < 0.99
