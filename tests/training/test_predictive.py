"""Compare predictive probabilities with closed forms, quadrature and normalisation."""

import itertools
import math

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

import symrazor as sr
from symrazor.training.predictive import log_guess, log_predictive

F64 = torch.float64


def test_class_guess_is_the_dirichlet_multinomial_marginal() -> None:
    y = torch.tensor([0, 1, 1, 3, 0, 0])
    counts = (3, 2, 0, 1)
    expected = math.lgamma(4) + sum(math.lgamma(c + 1) for c in counts) - math.lgamma(4 + 6)
    assert float(log_guess(sr.Categorical(), y, 4).sum()) == pytest.approx(expected, abs=1e-12)


def test_class_guess_is_normalised_over_all_label_sequences() -> None:
    sequences = itertools.product(range(3), repeat=4)
    total = sum(
        float(log_guess(sr.Categorical(), torch.tensor(labels), 3).sum().exp())
        for labels in sequences
    )
    assert total == pytest.approx(1, abs=1e-12)


def test_bernoulli_guess_is_the_beta_marginal_of_each_output() -> None:
    y = torch.tensor([[1, 0], [1, 0], [0, 0], [1, 0]])
    expected = sum(
        math.lgamma(ones + 1) + math.lgamma(4 - ones + 1) - math.lgamma(6) for ones in (3, 0)
    )
    assert float(log_guess(sr.Bernoulli(), y, 2).sum()) == pytest.approx(expected, abs=1e-12)


def test_poisson_guess_is_the_gamma_marginal() -> None:
    y = torch.tensor([[3.0], [0.0], [5.0]])
    factorials = sum(math.lgamma(count + 1) for count in (3, 0, 5))
    expected = math.lgamma(8 + 1) - 9 * math.log(3 + 1) - factorials
    assert float(log_guess(sr.Poisson(), y, 1).sum()) == pytest.approx(expected, abs=1e-12)


def test_gaussian_guess_is_the_normal_inverse_gamma_marginal() -> None:
    y = torch.tensor([0.3, -1.2, 2.0, 0.4, 0.9], dtype=F64)
    n, kappa, alpha = 5, 6.0, 3.5
    mean = float(y.sum()) / kappa
    beta = 1 + 0.5 * (float(y.square().sum()) - kappa * mean**2)
    expected = (
        math.lgamma(alpha)
        - alpha * math.log(beta)
        - 0.5 * math.log(kappa)
        - 0.5 * n * math.log(2 * math.pi)
    )
    guess = log_guess(sr.Gaussian(), y, 1)
    assert guess.shape == (5,)
    assert float(guess.sum()) == pytest.approx(expected, abs=1e-12)


def test_a_likelihood_of_the_user_is_guessed_at_zero_outputs() -> None:
    class Shifted(sr.Likelihood):
        def nll(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, " n"]:
            return (f - y.reshape(f.shape)).abs().sum(-1) + math.log(2)

        residual = hessian_root = sample = mean = nll  # type: ignore[assignment]

    y = torch.tensor([1.0, -3.0])
    expected = torch.tensor([-1 - math.log(2), -3 - math.log(2)], dtype=F64)
    assert torch.allclose(log_guess(Shifted(), y, 1), expected, atol=1e-12)


def _two_class_fit() -> tuple[sr.Fit, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=F64)
    y = (x[:, 0] + 0.5 * torch.randn(40, generator=generator, dtype=F64) > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return sr.fit(model, (x[:20], y[:20]), epochs=20, progress=False), x[20:], y[20:]


def test_map_probabilities_are_those_of_the_trained_network() -> None:
    fit, x, y = _two_class_fit()
    expected = torch.distributions.Categorical(logits=fit.model(x)).log_prob(y).detach()
    assert torch.allclose(log_predictive(fit, x, y), expected, atol=1e-12)


def test_integrated_probabilities_agree_with_quadrature() -> None:
    fit, x, y = _two_class_fit()
    f, covariance = fit.posterior().functional(x)
    sign = 2.0 * y - 1
    mean = sign * (f[:, 1] - f[:, 0])
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    nodes, weights = (torch.tensor(v) for v in np.polynomial.hermite_e.hermegauss(60))
    logits = mean.unsqueeze(1) + variance.sqrt().unsqueeze(1) * nodes
    expected = ((logits.sigmoid() * weights).sum(1) / weights.sum()).log()
    integrated = log_predictive(fit, x, y, "mc")
    assert float((integrated - expected).abs().max()) < 0.1
    assert float((integrated - expected).mean().abs()) < 0.02
    assert float((log_predictive(fit, x, y) - expected).abs().max()) > 0.1  # the test can fail


def test_integrated_gaussian_prediction_is_the_exact_posterior_predictive() -> None:
    """In a linear model the Laplace posterior with the full curvature is exact."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator, dtype=F64)
    y = x @ torch.tensor([1.0, -0.5, 0.2], dtype=F64) + 0.3
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    options = {"burn_in": 10**9, "prior_precision": 2.0, "structure": "full", "lr": 0.05}
    fit = sr.fit(model, (x[:6], y[:6]), sr.Gaussian(0.5), epochs=300, progress=False, **options)
    precision = 2 * torch.eye(3, dtype=F64) + x[:6].T @ x[:6] / 0.25
    mean = x[6:] @ torch.linalg.solve(precision, x[:6].T @ y[:6] / 0.25)
    variance = 0.25 + (x[6:] @ torch.linalg.inv(precision) * x[6:]).sum(1)
    expected = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[6:])
    assert torch.allclose(log_predictive(fit, x[6:], y[6:], "mc"), expected, atol=1e-3)
