"""Gaussian likelihoods: one noise scale for all samples, or one predicted for each."""

import math

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
    device_of,
    register_likelihood,
)
from symrazor.core.parameters import Hyper


@register_likelihood("gaussian")
class Gaussian(Likelihood):
    r"""$y \sim N(f, \sigma^2)$ with a learned noise scale, $\Lambda = \sigma^{-2} I$.

    Args:
        noise: starting standard deviation.
        outputs: None for one noise scale, or K for one per output.
    """

    def __init__(self, noise: float = 1.0, outputs: int | None = None) -> None:
        super().__init__()
        shape = () if outputs is None else (outputs,)
        self.noise = Hyper(torch.full(shape, noise, dtype=torch.float64))

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        r"""Return $\tfrac12 z^2 + \log \sigma + \tfrac12 \log 2\pi$, summed over outputs."""
        sigma = self.noise.value.to(f.dtype)
        z = (f - y.reshape(f.shape)) / sigma
        return (0.5 * z.square() + sigma.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        r"""Return $(f - y) / \sigma^2$."""
        return (f - y.reshape(f.shape)) / self.noise.value.to(f.dtype).square()

    def hessian_root(self, f: Outputs) -> Columns:
        r"""Return the unit vectors divided by $\sigma$."""
        n, k = f.shape
        inverse = (1 / self.noise.value.to(f.dtype)).expand(k)
        return torch.diag(inverse).unsqueeze(1).expand(k, n, k)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw the output plus noise."""
        noise = torch.randn(f.shape, generator=generator, device=device_of(generator, f))
        scale = self.noise.value.detach().to(f.dtype)
        return f.detach() + scale * noise.to(device=f.device, dtype=f.dtype)

    def mean(self, f: Outputs) -> Outputs:
        """Return the output itself."""
        return f

    def noise_variance(self, mean: Outputs) -> Outputs:
        r"""Return $\sigma^2$."""
        return self.noise.value.detach().square().expand_as(mean)

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return the exact mean and variance."""
        return f, covariance.diagonal(dim1=1, dim2=2) + self.noise_variance(f)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for one real target per output."""
        super().check(f, y)
        check_targets(f, y, "Gaussian")
        noise = self.noise.value
        if noise.dim() and noise.numel() != f.shape[1]:
            raise ValueError(
                f"The Gaussian likelihood has {noise.numel()} noise scales, but the model has "
                f"{f.shape[1]} outputs."
            )


@register_likelihood("heteroscedastic")
class Heteroscedastic(Likelihood):
    r"""$y \sim N(m, \sigma^2)$ with mean and $\log \sigma$ predicted: $f = (m, \log \sigma)$.

    The first half of the outputs are means, the second half log standard deviations. The root is
    that of the Fisher information, $\mathrm{diag}(\sigma^{-2}, 2)$.
    """

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        r"""Return $\tfrac12 z^2 + \log \sigma + \tfrac12 \log 2\pi$, summed over targets."""
        m, s = f.chunk(2, -1)
        z = (m - y.reshape(m.shape)) * (-s).exp()
        return (0.5 * z.square() + s + 0.5 * math.log(2 * math.pi)).sum(-1)

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        r"""Return $(m - y) / \sigma^2$ and $1 - z^2$."""
        m, s = f.chunk(2, -1)
        z = (m - y.reshape(m.shape)) * (-s).exp()
        return torch.cat([z * (-s).exp(), 1 - z.square()], -1)

    def hessian_root(self, f: Outputs) -> Columns:
        r"""Return unit vectors, divided by $\sigma$ for means and times $\sqrt 2$ for scales."""
        _, s = f.chunk(2, -1)
        root = torch.cat([(-s).exp(), torch.full_like(s, math.sqrt(2))], -1)
        return torch.diag_embed(root).transpose(0, 1)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw the mean plus noise."""
        m, s = f.detach().chunk(2, -1)
        noise = torch.randn(m.shape, generator=generator, device=device_of(generator, f))
        return m + s.exp() * noise.to(device=f.device, dtype=f.dtype)

    def mean(self, f: Outputs) -> Outputs:
        """Return the mean."""
        return f.chunk(2, -1)[0]

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        r"""Return the exact mean and variance for Gaussian $m$ and $\log\sigma$."""
        m, s = f.chunk(2, -1)
        of_mean, of_scale = covariance.diagonal(dim1=1, dim2=2).chunk(2, -1)
        return m, of_mean + (2 * s + 2 * of_scale).exp()

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for two outputs per target."""
        super().check(f, y)
        if f.shape[1] % 2:
            raise ValueError(
                f"A heteroscedastic likelihood needs two outputs per target (mean and log scale), "
                f"got {f.shape[1]} outputs."
            )
        check_targets(f.chunk(2, -1)[0], y, "heteroscedastic Gaussian")
