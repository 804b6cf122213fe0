"""The Bernoulli likelihood of labels 0 and 1, one or several for each sample."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from symrazor.core.likelihood.base import (
    Columns,
    Covariances,
    Likelihood,
    MeanAndVariance,
    Outputs,
    check_targets,
    check_values,
    device_of,
    register_likelihood,
)


@register_likelihood("bernoulli")
class Bernoulli(Likelihood):
    r"""$y_k \in \{0, 1\}$ with logit $f_k$, $\Lambda = \mathrm{diag}(p(1-p))$."""

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        """Return the binary cross entropy, summed over outputs."""
        target = y.reshape(f.shape).to(f.dtype)
        return F.binary_cross_entropy_with_logits(f, target, reduction="none").sum(-1)

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        """Return probability minus label."""
        return f.sigmoid() - y.reshape(f.shape).to(f.dtype)

    def hessian_root(self, f: Outputs) -> Columns:
        r"""Return $\sqrt{p (1-p)} = \exp \tfrac12 (\log p + \log(1-p))$, finite at p = 0 and 1."""
        root = (0.5 * (F.logsigmoid(f) + F.logsigmoid(-f))).exp()
        return torch.diag_embed(root).transpose(0, 1)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw 0 or 1 per output."""
        p = f.detach().sigmoid().to(device_of(generator, f))
        return torch.bernoulli(p, generator=generator).to(f.device)

    def mean(self, f: Outputs) -> Outputs:
        """Return the probability of 1."""
        return f.sigmoid()

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return probabilities by the probit approximation."""
        variance = covariance.diagonal(dim1=1, dim2=2)
        return self.mean(f * (1 + math.pi / 8 * variance).rsqrt()), None

    def _scores(self, mean: Tensor, y: Tensor, nll: float) -> dict[str, float]:
        correct = (mean > 0.5) == (y.reshape(mean.shape) > 0.5)
        return {"accuracy": float(correct.double().mean()), "nll": nll}

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for labels 0 or 1, one per output."""
        super().check(f, y)
        check_targets(f, y, "Bernoulli")
        check_values(y, (y != 0) & (y != 1), "Labels must be 0 or 1")
