"""Test Muon: polar factors against the SVD, steps by hand, and its stationary point."""

from typing import Any

import pytest
import torch
from matrices import polar_by_svd
from torch import Tensor, nn

import symrazor as sr
from symrazor.layers import FFC, Conv, Relaxed
from symrazor.training.optimisers import MUON_BIAS_STEP, MUON_MOMENTUM, Stepper, matrix_forms
from symrazor.training.options import FitConfig


def test_vanishing_path_converges_to_zero() -> None:
    """Both factors and their gradients become too small for their squares to be represented."""
    torch.manual_seed(0)
    layer = Relaxed([Conv(1, 2, (4, 4)), FFC(1, 2, (4, 4))])
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    x, y = torch.randn(20, 1, 4, 4), torch.randint(0, 2, (20,))
    precision = {"0.paths.0": 1.0, "0.paths.1": 40.0, "3.weight": 1.0, "3.bias": 1.0}
    razor = sr.Razor(model, "categorical", 20, prior_precision=precision)
    stepper = Stepper(razor, FitConfig(optimizer="muon", lr=0.1, warmup=0.0), 10**9)
    with torch.no_grad():
        for weight in layer.path(1).parameters():
            weight.mul_(1e-15)
    for _ in range(300):
        stepper.step(x, y)
    assert all(float(p.detach().abs().max()) < 1e-18 for p in layer.path(1).parameters())
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_matrices_are_the_blocks_of_the_curvature() -> None:
    layer = Relaxed([Conv(2, 3, (4, 4)), FFC(2, 3, (4, 4))])
    depthwise = nn.Conv1d(6, 6, 3, groups=3)
    model = nn.Sequential(layer, nn.GroupNorm(1, 3), depthwise, nn.BatchNorm1d(6), nn.Linear(5, 7))
    named = sr.weights(model)
    forms = dict(zip(named, matrix_forms(model), strict=True))
    shapes = {name: tuple(forms[name].to_blocks(theta).shape) for name, theta in named.items()}
    assert shapes["0.paths.0.conv.weight"] == (1, 3, 18)
    assert shapes["0.paths.1.first.weight"] == (2, 3, 16)
    assert shapes["0.paths.1.second.weight"] == (3, 16, 2)
    assert shapes["1.weight"] == shapes["1.bias"] == (1, 1, 3)
    assert shapes["2.weight"] == (3, 2, 6)
    assert shapes["3.weight"] == (1, 1, 6)
    assert shapes["4.weight"] == (1, 7, 5)
    for name, theta in named.items():
        assert torch.equal(forms[name].from_blocks(forms[name].to_blocks(theta)), theta)


def _stepper(model: nn.Module, n: int, precision: Any, **options: Any) -> Stepper:
    razor = sr.Razor(model, "categorical", n, prior_precision=precision)
    return Stepper(razor, FitConfig(optimizer="muon", warmup=0.0, **options), 10**9)


@pytest.mark.parametrize("groups", ["path", "diagonal"])
def test_two_steps_match_the_formula(groups: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)).double()
    x, y = torch.randn(9, 1, 4, 4).double(), torch.randint(0, 2, (9,))
    razor = sr.Razor(model, "categorical", 9, prior_precision=2.0, prior_groups=groups)
    stepper = Stepper(razor, FitConfig(optimizer="muon", lr=0.3, warmup=0.0), 10**9)
    theta = list(model.parameters())
    value = [t.detach().clone() for t in theta]
    momenta = [torch.zeros_like(t) for t in theta]
    for _ in range(2):
        slopes = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), theta)
        stepper.step(x, y)
        for n, g in enumerate(slopes):
            momenta[n] = MUON_MOMENTUM * momenta[n] + (1 - MUON_MOMENTUM) * g
            D = MUON_MOMENTUM * momenta[n] + (1 - MUON_MOMENTUM) * g + 2 / 9 * value[n]
            if D.dim() == 1:
                step = 0.3 * MUON_BIAS_STEP * D / D.square().mean().sqrt()
            else:
                o, i = D.flatten(1).shape
                step = 0.3 * max(1, o / i) ** 0.5 * polar_by_svd(D.flatten(1)).reshape(D.shape)
            value[n] = value[n] - step / (1 + step.norm() / D.norm() * 2 / 9)
    for t, expected in zip(theta, value, strict=True):
        torch.testing.assert_close(t.detach(), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("precision", [0.3, 30.0, 1e8])
def test_converges_to_the_mode_of_a_linear_gaussian_model(precision: float) -> None:
    """The stationary point satisfies (X'X + precision) W = X'Y."""
    torch.manual_seed(0)
    x, truth = torch.randn(40, 6).double(), torch.randn(6, 3).double()
    y = x @ truth + 0.1 * torch.randn(40, 3).double()
    model = nn.Linear(6, 3, bias=False).double()
    fixed = {"burn_in": 10**9, "every": 600, "start": "given", "prior_precision": precision}
    options = {"optimizer": "muon", "lr": 0.1, "epochs": 600, "batch_size": 40, **fixed}
    sr.fit(model, (x, y), sr.Gaussian(1.0, outputs=3), **options)
    mode = torch.linalg.solve(x.T @ x + precision * torch.eye(6).double(), x.T @ y)
    torch.testing.assert_close(model.weight.detach(), mode.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", [1e2, 1e6, 1e12])
def test_stable_for_any_precision(precision: float) -> None:
    """Weights that only the prior acts on do not oscillate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(24, 3).double(), torch.randint(0, 2, (24,))
    stepper = _stepper(model, 24, precision, lr=0.1)
    for _ in range(100):
        stepper.step(x, y)
    largest = max(float(p.detach().abs().max()) for p in model.parameters())
    assert largest < 3 * 24 / precision


class Unused(nn.Module):
    """Two layers, of which the second is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y


def test_weight_without_gradient_follows_its_prior() -> None:
    torch.manual_seed(0)
    model = Unused().double()
    x, y = torch.randn(8, 3).double(), torch.randint(0, 2, (8,))
    before = model.second.weight.detach().clone()
    _stepper(model, 8, 2.0, lr=0.1).step(x, y)
    torch.testing.assert_close(model.second.weight.detach(), before / (1 + 0.1 * 2 / 8))
