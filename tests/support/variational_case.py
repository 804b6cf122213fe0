"""A small classifier and its data, and a bound in closed form, for variational tests."""

import math

import torch
from torch import Tensor, nn

from symrazor.inference.evidence import Evidence
from symrazor.inference.variational.bound import kl
from symrazor.inference.variational.gaussian import GaussianPosterior

F64 = torch.float64


def mlp(hidden: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=generator, dtype=F64)
    return x, torch.arange(n) % 2


def linear_gaussian_bound(
    phi: Tensor,
    y: Tensor,
    q: GaussianPosterior,
    precision: float | Tensor = 1.0,
    noise: float | Tensor = 1.0,
) -> Evidence:
    r"""Return the bound of $y = \Phi W^\top + \epsilon$ in closed form, in float64.

    $$ \mathrm{E}_q \log p(y \mid W) = -\tfrac{1}{2\sigma^2} \big[ \|y - \Phi M^\top\|^2
       + \sum_{n o} \mathrm{Var}_q(\Phi W^\top)_{no} \big] - \tfrac{nk}{2} \log 2\pi\sigma^2 $$

    Args:
        phi: features.
        y: targets, [n] or [n, k].
        q: posterior over the weights, of shape [1, m] or [k, m], in float64.
        precision: prior precision of all weights.
        noise: standard deviation of the noise.
    """
    target = y.unsqueeze(1) if y.dim() == 1 else y
    if phi.dim() != 2 or len(target) != len(phi) or q.shape != (target.shape[1], phi.shape[1]):
        raise ValueError(
            "Features must be [n, m], targets [n, k] and the posterior over [k, m], got "
            f"{list(phi.shape)}, {list(y.shape)} and {list(q.shape)}."
        )
    phi, target = phi.to(q.mean.dtype), target.to(q.mean.dtype)
    delta = torch.as_tensor(precision, dtype=torch.float64, device=phi.device)
    sigma = torch.as_tensor(noise, dtype=torch.float64, device=phi.device)
    squares = (target - phi @ q.mean.T).square() + q.output_variance(phi)
    constant = sigma.log() + 0.5 * math.log(2 * math.pi)
    log_likelihood = -0.5 * squares.double().sum() / sigma.square() - target.numel() * constant
    log_prior = -0.5 * delta * q.mean.double().square().sum()
    log_det = 2 * (kl(q, delta) + log_prior)
    gamma = q.size - float((delta * q.trace()).detach())
    return Evidence(log_likelihood, log_prior, log_det, len(phi), {"weights": gamma})
