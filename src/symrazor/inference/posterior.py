r"""The Laplace posterior $N(\theta_*, (H + \Delta)^{-1})$: samples of weights, and predictions.

Predictions are linearised by default: $f(x) \sim N(f_*(x), J \Sigma J^\top)$, the model for which
the Gauss-Newton curvature is exact. The likelihood's mean is then averaged over that Gaussian.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from symrazor.accelerate.torch_internals import reparametrize_module
from symrazor.core.likelihood import Categorical, Covariances, Likelihood, Outputs
from symrazor.core.parameters import weights
from symrazor.core.prior import Prior
from symrazor.core.validation import check_choice
from symrazor.curvature.estimate import Curvature
from symrazor.curvature.operations import record
from symrazor.curvature.weight_sharing import Layer
from symrazor.data.batches import Input, call
from symrazor.inference.evidence import log_curvatures

How = Literal["probit", "bridge", "mc", "sampling"]


@dataclass(frozen=True)
class Prediction:
    """Predictive distribution of y.

    Args:
        mean: probabilities of the classes, or means of the targets.
        variance: variance of real targets, noise included; None for classes.
        epistemic: standard deviation of `mean` that comes from the weights alone: more data reduce
            it. None if it was not computed.
    """

    mean: Float[Tensor, "n k"]
    variance: Float[Tensor, "n k"] | None = None
    epistemic: Float[Tensor, "n k"] | None = None

    @property
    def std(self) -> Float[Tensor, "n k"] | None:
        """Standard deviation of the targets, or of the probabilities; None if unknown."""
        return self.epistemic if self.variance is None else self.variance.sqrt()


def jacobians(
    model: Callable[..., Any], layers: Sequence[Layer], x: Input
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs f[n, ...] and, for every weight tensor, df/dtheta as [n, k, p], k of them."""
    tape = record(model, layers, x)
    columns: dict[str, list[Tensor]] = {}
    for output in range(tape.f[0].numel()):
        root = torch.zeros_like(tape.f).flatten(1)
        root[:, output] = 1
        root = root.view_as(tape.f)
        gradients: dict[str, Tensor] = {}
        for use, cotangent in zip(tape.uses, tape.cotangents(root), strict=True):
            g = tape.f.new_zeros(use.y_shape) if cotangent is None else cotangent
            # A weight that is used twice has the sum of both gradients.
            for name, gradient in use.gradients(g).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        for name, gradient in gradients.items():
            columns.setdefault(name, []).append(gradient)
    stacked = {name: torch.stack(parts, 1).detach() for name, parts in columns.items()}
    return tape.f.detach(), stacked


class Posterior:
    """A Gaussian over the weights, centred at their current values.

    Args:
        model: the network; its present weights are copied as the mean.
        likelihood: turns outputs into predictions.
        layers: the model's layers.
        curvature: blocks of H over the whole data set.
        prior: the prior, whose curvature is copied.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        layers: Sequence[Layer],
        curvature: Curvature,
        prior: Prior,
    ) -> None:
        names = [name for block in curvature.blocks for name in block.names]
        if len(names) > len(set(names)):
            raise ValueError(
                "Blocks of samples bound the evidence but define no posterior. A posterior needs "
                "block=None and outputs='joint'."
            )
        self.model, self.likelihood, self.layers = model, likelihood, layers
        self.curvature = curvature
        self.mean = {name: value.detach().clone() for name, value in weights(model).items()}
        log_curvature = log_curvatures(prior, curvature, self.mean)
        self.log_curvature = {k: v.detach().clone() for k, v in log_curvature.items()}

    def __repr__(self) -> str:
        n_weights = sum(value.numel() for value in self.mean.values())
        blocks = sorted({type(block).__name__ for block in self.curvature.blocks})
        return (
            f"Posterior({type(self.model).__name__}, {n_weights:,} weights, "
            f"{'/'.join(blocks)} curvature of {self.curvature.n_data:,} data)"
        )

    def sample(self, n: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Draw n samples of all weights: tensor name -> [n, *shape]."""
        if n < 1:
            raise ValueError(f"The number of samples must be at least 1, got {n}.")
        draws: dict[str, Tensor] = {}
        for block in self.curvature.blocks:
            sizes = [self.mean[name].numel() for name in block.names]
            mean = self.mean[block.names[0]]
            noise = torch.randn(n, sum(sizes), generator=generator, dtype=torch.float64)
            flat = block.draw(self.log_curvature, noise.to(mean.device))
            for name, part in zip(block.names, flat.split(sizes, 1), strict=True):
                shift = part.reshape(n, *self.mean[name].shape).to(mean.dtype)
                draws[name] = self.mean[name] + shift
        return draws

    @torch.enable_grad()
    def functional(self, x: Input) -> tuple[Outputs, Covariances]:
        r"""Return mean $f_*(x)$ and covariance $J \Sigma J^\top$ of the linearised outputs.

        The covariance [n, k, k] is that of all outputs of a sample, flattened.
        """
        mean = {name: value.requires_grad_() for name, value in self.mean.items()}
        with reparametrize_module(self.model, mean):  # layer formats may read the weights
            f, J = jacobians(self.model, self.layers, x)
        n, k = f.shape[0], f[0].numel()
        covariance = torch.zeros(n, k, k, dtype=torch.float64, device=f.device)
        for block in self.curvature.blocks:
            if any(name in J for name in block.names):  # a disabled path does not act on f
                parts = [
                    J.get(name, f.new_zeros(n, k, self.mean[name].numel())) for name in block.names
                ]
                covariance += block.covariance(self.log_curvature, torch.cat(parts, 2))
        return f.double(), covariance

    def predict(
        self, x: Input, how: How = "probit", samples: int = 100, generator: Generator | None = None
    ) -> Prediction:
        """Return the predictive distribution at x.

        Args:
            x: inputs.
            how: "probit" (closed form, linearised), "bridge" (Laplace bridge to a Dirichlet,
                linearised, categorical only), "mc" (samples of linearised outputs) or "sampling"
                (samples of weights through the network itself).
            samples: number of samples for "mc" and "sampling".
            generator: random generator for "mc" and "sampling".
        """
        check_choice("how", how, How)
        if how == "sampling":
            return self._sampling(x, samples, generator)
        f, covariance = self.functional(x)
        if how == "mc":
            draws = _gaussian_draws(f.flatten(1), covariance, samples, generator)
            draws = draws.unflatten(2, f.shape[1:])
            means = self.likelihood.mean(draws.flatten(0, 1)).unflatten(0, (samples, -1))
            return mixture_prediction(self.likelihood, means)
        if how == "probit":
            return Prediction(*self.likelihood.closed_form_prediction(f, covariance))
        if not isinstance(self.likelihood, Categorical):
            raise ValueError("how='bridge' needs a categorical likelihood. Use how='probit'.")
        return Prediction(laplace_bridge(f, covariance))

    def _sampling(self, x: Input, samples: int, generator: Generator | None) -> Prediction:
        draws, means = self.sample(samples, generator), list[Tensor]()
        for s in range(samples):
            theta = {name: value[s] for name, value in draws.items()}
            with torch.no_grad(), reparametrize_module(self.model, theta):
                means.append(self.likelihood.mean(call(self.model, x).double()))
        return mixture_prediction(self.likelihood, torch.stack(means))


def mixture_prediction(likelihood: Likelihood, means: Float[Tensor, "s n k"]) -> Prediction:
    """Return the prediction of a mixture from the mean of y under each sample of the weights."""
    mean = means.mean(0)
    noise = likelihood.noise_variance(mean)
    return Prediction(mean, None if noise is None else means.var(0, correction=0) + noise)


def laplace_bridge(f: Outputs, covariance: Covariances) -> Float[Tensor, "n k"]:
    r"""Return class probabilities of the Dirichlet that matches a Gaussian over logits.

    The Gaussian is conditioned on logits that add up to zero and rescaled to a typical variance of
    $\sqrt{K/2}$, where the match is good. Then
    $\alpha_k = \Sigma_{kk}^{-1} (1 - 2/K + e^{\mu_k} K^{-2} \sum_l e^{-\mu_l})$
    (Hobbhahn, Kristiadi and Hennig 2022).
    """
    k = f.shape[1]
    total = covariance.sum((1, 2)).clamp(min=torch.finfo(torch.float64).tiny)
    rows = covariance.sum(2)
    mu = f - rows * (f.sum(1) / total).unsqueeze(1)
    sigma = covariance - rows.unsqueeze(2) * rows.unsqueeze(1) / total.reshape(-1, 1, 1)
    variance = sigma.diagonal(dim1=1, dim2=2).clamp(min=torch.finfo(torch.float64).tiny)
    factor = (variance.mean(1, keepdim=True) / math.sqrt(k / 2)).clamp(min=1)
    mu, variance = mu / factor.sqrt(), variance / factor
    ratio = (mu + torch.logsumexp(-mu, 1, keepdim=True)).exp()
    alpha = (1 - 2 / k + ratio / k**2) / variance
    return alpha / alpha.sum(1, keepdim=True)


def _gaussian_draws(
    f: Tensor, covariance: Tensor, samples: int, generator: Generator | None
) -> Float[Tensor, "s n k"]:
    """Draw from N(f, covariance) by eigenvectors, as the covariance may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    noise = torch.randn(samples, *f.shape, generator=generator, dtype=torch.float64).to(f.device)
    scaled = noise * values.clamp(min=0).sqrt()
    return f + torch.einsum("nij,snj->sni", vectors, scaled)
