r"""The Laplace posterior $N(\theta_*, (H + \Delta)^{-1})$: draws of weights, and predictions.

Predictions are linearised by default: $f(x) \sim N(f_*(x), J \Sigma J^\top)$, the model for which
the Gauss-Newton curvature is exact; then the likelihood's mean is averaged over that Gaussian.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from symrazor.accelerate.torch_internals import reparametrize_module
from symrazor.core.likelihood import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from symrazor.core.parameters import weights
from symrazor.core.prior import Prior
from symrazor.curvature.estimate import Curvature
from symrazor.curvature.tape import Input, call, record, weight_gradients
from symrazor.curvature.weight_sharing import Layer
from symrazor.inference.laplace import log_precisions

How = Literal["probit", "bridge", "mc", "sampling"]


@dataclass(frozen=True)
class Prediction:
    """Predictive mean of y (class probabilities for a categorical), and variance if real-valued."""

    mean: Float[Tensor, "n k"]
    variance: Float[Tensor, "n k"] | None = None


def jacobians(
    model: Callable[..., Any], layers: Sequence[Layer], x: Input
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs f[n, k] and, for every weight tensor, df/dtheta as [n, k, p]."""
    tape = record(model, layers, x)
    k = tape.f.shape[1]
    columns: dict[str, list[Tensor]] = {}
    for output in range(k):
        root = torch.zeros_like(tape.f)
        root[:, output] = 1
        found: dict[str, Tensor] = {}
        for use, cotangent in zip(tape.uses, tape.cotangents(root), strict=True):
            layer = use.layer
            g = tape.f.new_zeros(use.y_shape) if cotangent is None else cotangent
            formed = use.outputs(g)
            pieces: list[tuple[str, Tensor]] = []
            if layer.bias is not None:
                pieces.append((layer.bias, formed.sum(1).flatten(1)))
            if layer.weight is not None:
                pieces.append(
                    (layer.weight, weight_gradients([use], [use.input.detach()], [formed]))
                )
            for name in layer.shaping.values():
                pieces.append((name, use.shaping_gradient(name, g).detach()))
            for name, j in pieces:
                found[name] = found[name] + j if name in found else j
        for name, j in found.items():
            columns.setdefault(name, []).append(j)
    stacked = {name: torch.stack(parts, 1).detach() for name, parts in columns.items()}
    return tape.f.detach(), stacked


class Posterior:
    """A Gaussian over the weights, centred where they are now.

    Args:
        model: the network; its present weights are copied as the mean.
        likelihood: turns outputs into predictions.
        layers: the model's layers.
        curvature: blocks of H over the whole data set.
        prior: precisions, copied.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        layers: Sequence[Layer],
        curvature: Curvature,
        prior: Prior,
    ) -> None:
        """Freeze mean and precisions; see the class."""
        self.model, self.likelihood, self.layers = model, likelihood, layers
        self.curvature = curvature
        self.mean = {name: value.detach().clone() for name, value in weights(model).items()}
        self.log_precision = {
            name: value.detach().clone() for name, value in log_precisions(prior, curvature).items()
        }

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draws of all weights: tensor name -> [n, *shape]."""
        if n < 1:
            raise ValueError(f"expected at least 1 draw, got {n}")
        draws: dict[str, Tensor] = {}
        for block in self.curvature.blocks:
            sizes = [self.mean[name].numel() for name in block.names]
            mean = self.mean[block.names[0]]
            noise = torch.randn(n, sum(sizes), generator=generator, dtype=torch.float64)
            flat = block.draw(self.log_precision, noise.to(mean.device))
            for name, part in zip(block.names, flat.split(sizes, 1), strict=True):
                shift = part.reshape(n, *self.mean[name].shape).to(mean.dtype)
                draws[name] = self.mean[name] + shift
        return draws

    @torch.enable_grad()
    def functional(self, x: Input) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k k"]]:
        r"""Mean $f_*(x)$ and covariance $J \Sigma J^\top$ of the linearised outputs, in float64."""
        mean = {name: value.requires_grad_() for name, value in self.mean.items()}
        with reparametrize_module(self.model, mean):  # a format may look at its module's weights
            f, J = jacobians(self.model, self.layers, x)
        covariance = torch.zeros(
            len(f), f.shape[1], f.shape[1], dtype=torch.float64, device=f.device
        )
        for block in self.curvature.blocks:
            if any(name in J for name in block.names):  # a path that is off does not act on f
                parts = [
                    J.get(name, f.new_zeros(*f.shape, self.mean[name].numel()))
                    for name in block.names
                ]
                covariance += block.covariance(self.log_precision, torch.cat(parts, 2))
        return f.double(), covariance

    def predict(
        self,
        x: Input,
        how: How = "probit",
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predictive distribution at x.

        Args:
            x: inputs.
            how: "probit" (closed form, linearised), "bridge" (Laplace bridge to a Dirichlet,
                linearised, categorical only), "mc" (draws of linearised outputs) or "sampling"
                (draws of weights through the network itself).
            samples: draws for "mc" and "sampling".
            generator: their randomness.
        """
        if how == "sampling":
            return self._sampling(x, samples, generator)
        f, covariance = self.functional(x)
        if how == "mc":
            draws = _gaussian_draws(f, covariance, samples, generator)
            means = self.likelihood.mean(draws.flatten(0, 1)).unflatten(0, (samples, -1))
            return mixture_prediction(self.likelihood, means)
        if how == "bridge":
            if not isinstance(self.likelihood, Categorical):
                raise ValueError("expected a categorical likelihood for how='bridge'; use 'probit'")
            return Prediction(laplace_bridge(f, covariance))
        if how == "probit":
            return self._closed_form(f, covariance)
        raise ValueError(f"expected how in probit, bridge, mc, sampling, got {how!r}")

    def _closed_form(self, f: Tensor, covariance: Tensor) -> Prediction:
        variance = covariance.diagonal(dim1=1, dim2=2)
        match self.likelihood:
            case Categorical():
                # A shift common to all logits changes no probability: its variance is left out.
                centred = covariance - covariance.mean(1, keepdim=True)
                centred = centred - centred.mean(2, keepdim=True)
                spread = centred.diagonal(dim1=1, dim2=2)
                return Prediction((f * (1 + math.pi / 8 * spread).rsqrt()).softmax(-1))
            case Bernoulli():
                scale = (1 + math.pi / 8 * variance).rsqrt()
                return Prediction(self.likelihood.mean(f * scale))
            case Gaussian():
                return Prediction(f, variance + _noise(self.likelihood, f))
            case Poisson():
                rate = (f + 0.5 * variance).exp()
                return Prediction(rate, rate + rate.square() * torch.expm1(variance))
            case _:
                raise ValueError(
                    f"no closed form is known for {type(self.likelihood).__name__}; use how='mc'"
                )

    def _sampling(self, x: Input, samples: int, generator: torch.Generator | None) -> Prediction:
        draws = self.sample(samples, generator)
        with torch.no_grad():
            means = [
                self.likelihood.mean(call(partial(_with, self.model, draws, s), x).double())
                for s in range(samples)
            ]
        return mixture_prediction(self.likelihood, torch.stack(means))


def mixture_prediction(likelihood: Likelihood, means: Float[Tensor, "s n k"]) -> Prediction:
    """The prediction of a mixture, from the mean of y under each draw of the weights."""
    mean = means.mean(0)
    spread = means.var(0, correction=0)
    match likelihood:
        case Gaussian():
            return Prediction(mean, spread + _noise(likelihood, mean))
        case Poisson():
            return Prediction(mean, spread + mean)
        case _:
            return Prediction(mean)


def _noise(likelihood: Gaussian, like: Tensor) -> Tensor:
    return likelihood.noise.value.detach().square().expand_as(like)


def _with(model: nn.Module, draws: Mapping[str, Tensor], s: int, *args: Any, **kwargs: Any) -> Any:
    """Run the model with one draw of its weights."""
    return functional_call(model, {name: value[s] for name, value in draws.items()}, args, kwargs)


def laplace_bridge(
    f: Float[Tensor, "n k"], covariance: Float[Tensor, "n k k"]
) -> Float[Tensor, "n k"]:
    r"""Class probabilities of the Dirichlet that matches a Gaussian over logits.

    The Gaussian is conditioned on logits that add up to zero and rescaled to a typical variance of
    $\sqrt{K/2}$, where the match is good; then
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
    f: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None
) -> Float[Tensor, "s n k"]:
    """Draws from N(f, covariance) by eigenvectors: the covariance may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    noise = torch.randn(samples, *f.shape, generator=generator, dtype=torch.float64).to(f.device)
    scaled = noise * values.clamp(min=0).sqrt()
    return f + torch.einsum("nij,snj->sni", vectors, scaled)
