r"""Compute log predictive probabilities of new data, after a fit and before any data.

After a fit, $p(y \mid x, D)$ is evaluated at the trained weights, or with the weights integrated
out. Before any data, `log_guess` gives the marginal likelihood of a model without inputs and
without a network, whose few parameters have a proper prior and are integrated out exactly.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.likelihood import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from symrazor.training.evidence_training import EVALUATION_BATCH, outputs
from symrazor.training.fit import Fit

Predictive = Callable[[Fit, Tensor, Tensor], Tensor]
"""Maps a fit, inputs and labels to the log predictive probability of each label."""

PredictiveName = Literal["map", "mc"]

OUTPUT_SAMPLES = 400
"""Samples of the linearised outputs per datum, for predictions with the weights integrated out."""


def log_predictive(
    fit: Fit, x: Tensor, y: Tensor, how: PredictiveName = "map"
) -> Float[Tensor, " n"]:
    r"""Return $\log p(y_i \mid x_i, D)$ of each datum, in float64 on the CPU.

    Args:
        fit: result of `fit` on the data D.
        x: inputs.
        y: labels.
        how: "map" uses the trained weights; "mc" averages the probability over samples of the
            linearised outputs under the Laplace posterior (in closed form for a Gaussian).
    """
    y = y.to(fit.data.y.device)
    if how == "map":
        with torch.no_grad():
            return -fit.razor.likelihood.nll(outputs(fit.model, x).double(), y).cpu()
    posterior = fit.posterior()
    generator = torch.Generator().manual_seed(0)
    parts = []
    for inputs, labels in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
        f, covariance = posterior.functional(inputs.to(y.device))
        parts.append(_integrate(fit.razor.likelihood, f, covariance, labels, generator))
    return torch.cat(parts).cpu()


@torch.no_grad()
def _integrate(
    likelihood: Likelihood,
    f: Float[Tensor, "n k"],
    covariance: Float[Tensor, "n k k"],
    y: Tensor,
    generator: torch.Generator,
) -> Float[Tensor, " n"]:
    r"""Return $\log \int p(y \mid f') N(f' \mid f, \mathrm{covariance})\, df'$ of each datum."""
    if isinstance(likelihood, Gaussian):
        noise = torch.diag_embed(likelihood.noise_variance(f).double())
        predictive = torch.distributions.MultivariateNormal(f, covariance + noise)
        log_density: Tensor = predictive.log_prob(y.reshape(f.shape).double())
        return log_density
    values, vectors = torch.linalg.eigh(covariance)  # the covariance may be singular
    noise = torch.randn(OUTPUT_SAMPLES, *f.shape, generator=generator, dtype=torch.float64)
    scaled = noise.to(f.device) * values.clamp(min=0).sqrt()
    draws = f + torch.einsum("nij,snj->sni", vectors, scaled)
    log_p = torch.stack([-likelihood.nll(draw, y) for draw in draws])
    return log_p.logsumexp(0) - math.log(OUTPUT_SAMPLES)


def log_guess(likelihood: Likelihood, y: Tensor, n_outputs: int) -> Float[Tensor, " n"]:
    r"""Return $\log p(y_i \mid y_1, \dots, y_{i-1})$ of each label, without inputs, in float64.

    The sum is the marginal likelihood of labels that do not depend on x:

    - categorical: Laplace's rule of succession, $(n_k + 1) / (i - 1 + K)$ for class k;
    - Bernoulli: the same for each output, with K = 2;
    - Poisson: each rate has an exponential prior of mean 1;
    - Gaussian: each output has an unknown mean and variance with a normal-inverse-gamma prior
      ($\mu_0 = 0$, $\kappa = \alpha = \beta = 1$), which suits standardised targets;
    - any other likelihood: the likelihood of outputs f = 0.
    """
    with torch.no_grad():
        if isinstance(likelihood, Categorical):
            return _log_class_guess(y.long().cpu(), n_outputs)
        rows = y.detach().cpu().double().reshape(len(y), -1)
        if isinstance(likelihood, Bernoulli):
            columns = [_log_class_guess(column.long(), 2) for column in rows.T]
            return torch.stack(columns).sum(0)
        if isinstance(likelihood, Poisson):
            return _log_count_guess(rows).sum(1)
        if isinstance(likelihood, Gaussian):
            return _log_normal_guess(rows).sum(1)
        f = torch.zeros(len(y), n_outputs, dtype=torch.float64, device=y.device)
        return -likelihood.nll(f, y).double().cpu()


def _sums_before(values: Tensor) -> Tensor:
    """Return the sum of all earlier rows, for each row."""
    return values.cumsum(0) - values


def _log_class_guess(y: Tensor, n_classes: int) -> Tensor:
    counts_before = _sums_before(torch.nn.functional.one_hot(y, n_classes))
    counts = counts_before.gather(1, y.unsqueeze(1)).squeeze(1)
    return torch.log((counts + 1).double() / (counts_before.sum(1) + n_classes))


def _log_count_guess(y: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return log probabilities of counts: a negative binomial with the sums of earlier counts."""
    shape, rate = _sums_before(y) + 1, _sums_before(torch.ones_like(y)) + 1
    binomial = torch.lgamma(shape + y) - torch.lgamma(shape) - torch.lgamma(y + 1)
    return binomial + shape * torch.log(rate / (rate + 1)) - y * torch.log(rate + 1)


def _log_normal_guess(y: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return log densities: a Student t with the mean and spread of earlier targets."""
    n, total, squares = (_sums_before(v) for v in (torch.ones_like(y), y, y.square()))
    kappa, alpha = n + 1, 1 + n / 2
    mean = total / kappa
    beta = 1 + 0.5 * (squares - kappa * mean.square())
    scale = (beta * (kappa + 1) / (alpha * kappa)).sqrt()
    t = torch.distributions.StudentT(2 * alpha, mean, scale)
    log_density: Tensor = t.log_prob(y)
    return log_density
