"""Posterior draws and predictions against closed forms and brute-force sampling."""

import math

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.likelihood import calibration_error
from symrazor.inference.posterior import laplace_bridge
from symrazor.testing import assert_close

F64 = torch.float64


def _classifier(structure: str, n: int = 30) -> tuple[sr.Razor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(n, 2, dtype=F64)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    razor = sr.Razor(model, "categorical", n, structure=structure, prior_precision=0.5)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        (razor.likelihood.nll(model(x), y).mean() + razor.penalty()).backward()
        optimiser.step()
    return razor, x, y


@pytest.mark.parametrize("structure", ["full", "block", "kron"])
def test_linear_gaussian_predictive_is_exact(structure: str) -> None:
    """Mean, variance and weight covariance of Bayesian linear regression."""
    torch.manual_seed(0)
    n, m, delta, sigma = 12, 4, 2.0, 0.3
    phi, y, new = (
        torch.randn(n, m, dtype=F64),
        torch.randn(n, dtype=F64),
        torch.randn(5, m).double(),
    )
    exact = sr.exact_evidence(phi, y, delta, sigma)
    model = nn.Linear(m, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(exact.mean.unsqueeze(0))
    razor = sr.Razor(model, sr.Gaussian(sigma), n, structure=structure, prior_precision=delta)
    posterior = razor.posterior([(phi, y)])
    covariance = torch.linalg.inv(phi.T @ phi / sigma**2 + delta * torch.eye(m, dtype=F64))
    expected = (new @ covariance * new).sum(1, keepdim=True) + sigma**2
    prediction = posterior.predict(new)
    assert_close(prediction.mean, new @ exact.mean.unsqueeze(1), 1e-10)
    assert prediction.variance is not None
    assert_close(prediction.variance, expected, 1e-10)
    draws = posterior.sample(20_000, torch.Generator().manual_seed(0))["weight"].squeeze(1)
    assert_close(torch.cov(draws.T), covariance, 0.05)
    for how in ("mc", "sampling"):
        sampled = posterior.predict(new, how, 4000, torch.Generator().manual_seed(0))
        assert_close(sampled.variance, expected, 0.1)


@pytest.mark.parametrize("structure", ["full", "block", "kron", "diag"])
def test_functional_covariance_is_that_of_linearised_draws(structure: str) -> None:
    """J Sigma J' against draws of weights pushed through the exact linearisation."""
    razor, x, y = _classifier(structure)
    posterior = razor.posterior([(x, y)])
    new = torch.randn(3, 2, dtype=F64)
    _, covariance = posterior.functional(new)
    draws = posterior.sample(30_000, torch.Generator().manual_seed(0))
    mean = posterior.mean

    def outputs(theta: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(razor.model, theta, (new,))

    tangents = {name: draws[name] - mean[name] for name in mean}
    push = torch.vmap(lambda t: torch.func.jvp(outputs, (mean,), (t,))[1])
    moved = push(tangents)
    empirical = torch.einsum("snk,snl->nkl", moved, moved) / len(moved)
    assert_close(covariance, empirical, 0.06)


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_predictives_agree_for_classification(structure: str) -> None:
    razor, x, y = _classifier(structure)
    posterior = razor.posterior([(x, y)])
    new = 2 * torch.randn(20, 2, dtype=F64)
    reference = posterior.predict(new, "mc", 20_000, torch.Generator().manual_seed(0)).mean
    assert_close(reference.sum(1), torch.ones(20, dtype=F64), 1e-9)
    for how, tolerance in (("probit", 0.12), ("bridge", 0.15)):
        p = posterior.predict(new, how).mean
        assert_close(p.sum(1), torch.ones(20, dtype=F64), 1e-9)
        assert float((p - reference).abs().mean()) < tolerance / 2, how
        assert float((p - reference).abs().max()) < 3 * tolerance, how
    sampled = posterior.predict(new, "sampling", 200, torch.Generator().manual_seed(0)).mean
    assert_close(sampled.sum(1), torch.ones(20, dtype=F64), 1e-9)


def test_uncertainty_grows_away_from_the_data() -> None:
    razor, x, y = _classifier("kron")
    posterior = razor.posterior([(x, y)])
    near, far = posterior.functional(x[:5])[1], posterior.functional(20 * x[:5])[1]
    assert far.diagonal(dim1=1, dim2=2).mean() > near.diagonal(dim1=1, dim2=2).mean()


def test_bridge_follows_the_mean_and_flattens_with_variance() -> None:
    f = torch.tensor([[2.0, 0.0, -2.0]], dtype=F64)
    eye = torch.eye(3, dtype=F64).unsqueeze(0)
    sharp, flat = laplace_bridge(f, 0.5 * eye), laplace_bridge(f, 20 * eye)
    assert sharp[0].argsort(descending=True).tolist() == [0, 1, 2]
    assert float(flat.max()) < float(sharp.max())


def test_closed_forms_of_bernoulli_and_poisson() -> None:
    torch.manual_seed(0)
    for name, target in (("bernoulli", torch.randint(0, 2, (20, 1))), ("poisson", None)):
        model = nn.Linear(2, 1).double()
        x = torch.randn(20, 2, dtype=F64)
        y = target if target is not None else torch.poisson(torch.full((20, 1), 3.0))
        razor = sr.Razor(model, name, 20)
        posterior = razor.posterior([(x, y)])
        generator = torch.Generator().manual_seed(0)
        closed, drawn = posterior.predict(x), posterior.predict(x, "mc", 20_000, generator)
        assert_close(closed.mean, drawn.mean, 0.03)
        if closed.variance is not None:
            assert_close(closed.variance, drawn.variance, 0.1)


def test_bad_requests() -> None:
    razor, x, y = _classifier("diag")
    posterior = razor.posterior([(x, y)])
    with pytest.raises(ValueError, match="how must be 'probit', 'bridge', .* got 'magic'"):
        posterior.predict(x, "magic")
    with pytest.raises(ValueError, match="number of samples must be at least 1"):
        posterior.sample(0)
    regression = sr.Razor(nn.Linear(2, 1).double(), "gaussian", 30)
    with pytest.raises(ValueError, match="categorical likelihood"):
        regression.posterior([(x, x[:, :1])]).predict(x, "bridge")


def test_calibration_error_by_hand() -> None:
    p = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.4, 0.6], [0.3, 0.7]])
    y = torch.tensor([0, 1, 1, 1])
    # Bins of 0.1: two at 0.95 (accuracy 0.5), one at 0.6 and one at 0.7 (both right).
    expected = (2 * 0.45 + 0.4 + 0.3) / 4
    assert calibration_error(p, y, bins=10) == pytest.approx(expected, abs=1e-6)
    assert math.isclose(calibration_error(torch.eye(2), torch.arange(2)), 0.0)


def test_posterior_stays_where_it_was_taken() -> None:
    razor, x, y = _classifier("kron")
    posterior = razor.posterior([(x, y)])
    before = posterior.predict(x[:3]).mean
    with torch.no_grad():
        razor.model[0].weight.mul_(3)
    assert_close(posterior.predict(x[:3]).mean, before, 1e-12)


def test_a_shift_common_to_all_logits_changes_no_prediction() -> None:
    """Probit leaves out the variance of the mean logit, which softmax cannot see."""
    torch.manual_seed(0)
    f, root = torch.randn(4, 5, dtype=F64), torch.randn(4, 5, 5, dtype=F64)
    covariance = root @ root.mT
    shifted = covariance + 100 * torch.ones(5, 5, dtype=F64)
    a = sr.Categorical().closed_form_prediction(f, covariance)[0]
    assert_close(sr.Categorical().closed_form_prediction(f, shifted)[0], a, 1e-9)
    project = torch.eye(5, dtype=F64) - 0.2
    variance = (project @ covariance @ project).diagonal(dim1=1, dim2=2)
    assert_close(a, (f / (1 + math.pi * variance / 8).sqrt()).softmax(-1), 1e-12)


class _Spare(nn.Module):
    """A network with a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.used = nn.Linear(2, 4), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


@pytest.mark.parametrize("structure", ["full", "block"])
def test_a_layer_that_does_not_act_changes_no_prediction(structure: str) -> None:
    torch.manual_seed(0)
    model, x = _Spare().double(), torch.randn(9, 2, dtype=F64)
    pair, results = (x, torch.arange(9) % 3), []
    for part in (model, model.used):
        razor = sr.Razor(part, "categorical", 9, structure=structure)
        evidence = razor.evidence([pair])
        covariance = razor.posterior([pair]).functional(x)[1]
        results.append((evidence.log_likelihood, evidence.log_det, covariance))
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected, 1e-10)
