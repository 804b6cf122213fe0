"""The Poisson likelihood of counts."""

import torch
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


@register_likelihood("poisson")
class Poisson(Likelihood):
    r"""Counts with log rate $f_k$, $\Lambda = \mathrm{diag}(e^{f})$."""

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        r"""Return $e^f - y f + \log y!$, summed over outputs."""
        count = y.reshape(f.shape).to(f.dtype)
        return (f.exp() - count * f + torch.lgamma(count + 1)).sum(-1)

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        """Return rate minus count."""
        return f.exp() - y.reshape(f.shape).to(f.dtype)

    def hessian_root(self, f: Outputs) -> Columns:
        """Return the square root of the rate."""
        return torch.diag_embed((0.5 * f).exp()).transpose(0, 1)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw a count per output."""
        rate = f.detach().exp().to(device_of(generator, f))
        return torch.poisson(rate, generator=generator).to(f.device)

    def mean(self, f: Outputs) -> Outputs:
        """Return the rate."""
        return f.exp()

    def noise_variance(self, mean: Outputs) -> Outputs:
        """Return the mean."""
        return mean

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return the exact mean and variance for a log-normal rate."""
        variance = covariance.diagonal(dim1=1, dim2=2)
        rate = (f + 0.5 * variance).exp()
        return rate, rate + rate.square() * torch.expm1(variance)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for integers from 0 on, one per output."""
        super().check(f, y)
        check_targets(f, y, "Poisson")
        wrong = (y < 0) | (y != y.floor() if y.is_floating_point() else y < 0)
        check_values(y, wrong, "Counts must be integers from 0 on")
