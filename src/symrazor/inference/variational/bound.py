r"""Compute the evidence lower bound of Gaussian posteriors $q = \prod_l N(m_l, \Sigma_l)$.

$$ \log p(D \mid \eta) \ge \mathrm{E}_q \log p(D \mid \theta, \eta) - \mathrm{KL}(q \,\|\, p) $$

As an `Evidence`: `log_likelihood` is the expected one, `log_prior` is
$-\tfrac12 m^\top \Delta m$, and `log_det` is the remainder of twice the divergence,

$$ -\log |\Delta \Sigma| + \mathrm{tr}\, \Delta \Sigma - D . $$

For the exact posterior of a linear-Gaussian model, $\Sigma = (H + \Delta)^{-1}$, the first term is
the log-determinant of the exact evidence. The other two are minus the effective parameters
$\gamma = D - \mathrm{tr}\, \Delta \Sigma$, by which the expected log likelihood falls short, so
the bound equals the evidence.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from symrazor.core.prior import GaussianPrior
from symrazor.inference.evidence import Evidence
from symrazor.inference.variational.gaussian import GaussianPosterior, Point, kl


def variational_evidence(
    log_likelihood: Tensor,
    posteriors: Mapping[str, GaussianPosterior],
    prior: GaussianPrior,
    n_data: int,
    effective: bool = True,
) -> Evidence:
    r"""Return the bound, differentiable in posteriors, precisions and log likelihood.

    Args:
        log_likelihood: expectation under the posteriors, over all data.
        posteriors: tensor name -> posterior; a `Point` has no divergence.
        prior: the prior of every tensor that has a posterior.
        n_data: number of data.
        effective: also compute effective parameters, $\gamma = D - \mathrm{tr}\, \Delta \Sigma$ of
            each tensor; all weights of a point estimate count.
    """
    integrated = {name: q for name, q in posteriors.items() if not isinstance(q, Point)}
    zero = torch.zeros((), dtype=torch.float64, device=log_likelihood.device)
    log_prior, log_det = zero, zero
    if integrated:
        log_prior = -0.5 * prior.squared_norm({name: q.mean for name, q in integrated.items()})
        terms = [kl(q, prior.precision_of(name)) for name, q in integrated.items()]
        log_det = 2 * (torch.stack(terms).sum() + log_prior)
    gamma: dict[str, float] = {}
    if effective:
        gamma = {name: float(q.size) for name, q in posteriors.items()}
        with torch.no_grad():
            for name, q in integrated.items():
                gamma[name] -= float((prior.precision_of(name) * q.variance().double()).sum())
    return Evidence(log_likelihood.double(), log_prior, log_det, n_data, gamma)
