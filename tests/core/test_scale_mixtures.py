"""Scale mixtures against quadrature, autograd and known sparse problems."""

import math

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.scale_mixtures import ScaleMixturePrior

F64 = torch.float64
FAMILIES = ("student", "laplace", "horseshoe")


def _prior(family: str, sizes: tuple[int, ...] = (3,), **options: float) -> ScaleMixturePrior:
    theta = {f"w{i}": torch.linspace(0.2, 0.9, size, dtype=F64) for i, size in enumerate(sizes)}
    return ScaleMixturePrior(theta, family, **options)


def _grid() -> Tensor:
    return torch.linspace(-60, 60, 200_001, dtype=F64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_mixing_densities_integrate_to_one(family: str, scale: float) -> None:
    grid = _grid()
    total = torch.trapezoid(_prior(family, scale=scale).log_mixing_density(grid).exp(), grid)
    assert float(total) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("family", ["student", "laplace"])
def test_marginals_are_the_named_densities(family: str) -> None:
    """Integrate the joint density of three weights and their scale over the scale."""
    prior, grid, scale, nu = _prior(family, scale=0.7, degrees=4.0), _grid(), 0.7, 4.0
    log_values = []
    for theta in (
        torch.tensor([0.1, 0.2, -0.3], dtype=F64),
        torch.tensor([1.0, -2.0, 0.5], dtype=F64),
    ):
        gaussian = 1.5 * (grid - math.log(2 * math.pi)) - 0.5 * grid.exp() * theta.square().sum()
        joint = (gaussian + prior.log_mixing_density(grid)).exp()
        log_values.append(float(torch.trapezoid(joint, grid).log()))
        if family == "student":
            constant = math.lgamma((nu + 3) / 2) - math.lgamma(nu / 2)
            constant -= 1.5 * math.log(nu * math.pi * scale**2)
            ratio = float(theta.square().sum()) / (nu * scale**2)
            expected = constant - (nu + 3) / 2 * math.log1p(ratio)
            assert log_values[-1] == pytest.approx(expected, abs=1e-6)
        else:  # proportional to exp(-|theta| / s)
            log_values[-1] += float(theta.norm()) / scale
    if family == "laplace":
        assert log_values[0] == pytest.approx(log_values[1], abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fixed_point_is_stationary(family: str) -> None:
    """There, evidence plus log mixing density do not change with the log precisions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(40, 3, dtype=F64), torch.arange(40) % 3
    prior = ScaleMixturePrior(sr.weights(model), family, scale=0.5)
    razor = sr.Razor(model, "categorical", 40, prior=prior, inner_steps=200, damping=0.3)
    razor.step([(x, y)])
    value = razor.evidence([(x, y)], differentiable=True).log_evidence
    slopes = torch.autograd.grad(value, list(prior.log_precision))
    assert max(abs(float(slope)) for slope in slopes) < 1e-5


def test_shrinkage_of_useless_and_useful_groups() -> None:
    """The horseshoe closes useless inputs and leaves useful ones nearly free."""
    torch.manual_seed(0)
    x = torch.randn(200, 6, dtype=F64)
    y = 3 * x[:, :1] - 2 * x[:, 1:2] + 0.3 * torch.randn(200, 1, dtype=F64)

    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.columns = nn.ParameterList(torch.zeros(1, 1, dtype=F64) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            return sum(x[:, i : i + 1] * w for i, w in enumerate(self.columns))

    model = Inputs()
    prior = ScaleMixturePrior(sr.weights(model), "horseshoe", scale=0.1)
    razor = sr.Razor(model, sr.Gaussian(0.3), 200, prior=prior, structure="full")
    for _ in range(30):
        delta = torch.stack([prior.precision_of(f"columns.{i}") for i in range(6)]).detach()
        P = x.T @ x / 0.09 + torch.diag(delta)
        mode = torch.linalg.solve(P, x.T @ y / 0.09)
        with torch.no_grad():
            for w, value in zip(model.columns, mode, strict=True):
                w.fill_(float(value))
        razor.step([(x, y)])
    precisions = [float(prior.precision_of(f"columns.{i}").detach()) for i in range(6)]
    assert max(precisions[:2]) < 1
    assert min(precisions[2:]) > 50


def test_invalid_options() -> None:
    with pytest.raises(ValueError, match="family"):
        _prior("cauchy")
    with pytest.raises(ValueError, match="must be positive"):
        _prior("student", scale=0.0)
    with pytest.raises(ValueError, match="groups='diagonal'"):
        ScaleMixturePrior({"w": torch.ones(2)}, groups="diagonal")
