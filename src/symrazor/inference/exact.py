r"""Compute the exact evidence of the linear-Gaussian model, the reference of all estimators.

$$ y = \Phi w + \epsilon, \quad w \sim N(0, \delta^{-1} I), \quad \epsilon \sim N(0, \sigma^2 I) $$
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.inference.evidence import Evidence


@dataclass(frozen=True)
class LinearGaussian:
    """Exact evidence, with its terms at the posterior mean of the weights, and that mean."""

    evidence: Evidence
    mean: Float[Tensor, " m"]


def exact_evidence(
    phi: Float[Tensor, "n m"],
    y: Float[Tensor, " n"],
    precision: float | Float[Tensor, ""] | Float[Tensor, " m"] = 1.0,
    noise: float | Float[Tensor, ""] = 1.0,
) -> LinearGaussian:
    r"""Return $\log N(y \mid 0, \Phi \Delta^{-1} \Phi^\top + \sigma^2 I)$ and its terms.

    The result is in float64 and differentiable. With $B = \sigma^{-1} \Phi \Delta^{-1/2}$ it needs
    the Cholesky factor of $I + B B^\top$
    (dense, for $n \le m$) or of $I + B^\top B$ (Woodbury, for $n > m$), whichever is smaller.

    Args:
        phi: features.
        y: targets.
        precision: prior precision of the weights, one or one per weight.
        noise: standard deviation of the noise.

    Raises:
        ValueError: shapes do not match, or values are not finite or not positive.
    """
    phi, y = phi.double(), y.double()
    delta = torch.as_tensor(precision, dtype=torch.float64, device=phi.device)
    sigma = torch.as_tensor(noise, dtype=torch.float64, device=phi.device)
    _check(phi, y, delta, sigma)
    n, m = phi.shape
    root = delta.rsqrt().expand(m)
    B = phi * root / sigma
    z = y / sigma
    if n <= m:
        L = torch.linalg.cholesky(torch.eye(n, dtype=B.dtype, device=B.device) + B @ B.T)
        white = B.T @ torch.cholesky_solve(z.unsqueeze(1), L).squeeze(1)
    else:
        L = torch.linalg.cholesky(torch.eye(m, dtype=B.dtype, device=B.device) + B.T @ B)
        white = torch.cholesky_solve((B.T @ z).unsqueeze(1), L).squeeze(1)
    residual = z - B @ white
    log_likelihood = (
        -0.5 * residual.square().sum() - n * sigma.log() - 0.5 * n * math.log(2 * math.pi)
    )
    log_prior = -0.5 * white.square().sum()
    log_det = 2 * L.diagonal().log().sum()
    return LinearGaussian(Evidence(log_likelihood, log_prior, log_det, n), root * white)


def _check(phi: Tensor, y: Tensor, delta: Tensor, sigma: Tensor) -> None:
    if phi.dim() != 2 or y.shape != phi.shape[:1] or not phi.numel():
        raise ValueError(
            f"Features must be [n, m] and targets [n], got {list(phi.shape)} and {list(y.shape)}."
        )
    if delta.dim() > 1 or (delta.dim() == 1 and len(delta) != phi.shape[1]):
        raise ValueError(
            f"precision must be one number or {phi.shape[1]}, got shape {list(delta.shape)}."
        )
    for name, value in (("precision", delta), ("noise", sigma)):
        if not bool((value > 0).all() & value.isfinite().all()):
            raise ValueError(f"{name} must be positive, got {value.tolist()}.")
    if not bool(phi.isfinite().all() & y.isfinite().all()):
        raise ValueError("Features and targets must be finite, got NaN or infinity.")
