r"""Likelihoods $p(y \mid f)$ of a network output $f \in \mathbb R^K$.

A likelihood owns its negative log likelihood with every constant, the check of its labels, the
residual $\partial_f (-\log p)$, its predictions and scores, and a root of the output Hessian

$$ \Lambda(f) = -\nabla_f^2 \log p(y \mid f) = \sum_c r_c(f)\, r_c(f)^\top , $$

which for canonical links does not depend on $y$, so that the generalised Gauss-Newton matrix
$\sum_n J_n^\top \Lambda_n J_n$ equals the Fisher information. A new likelihood is a subclass with a
registered name: see docs/how-to/add-a-likelihood.md.
"""

from symrazor.core.likelihood.base import (
    LIKELIHOODS,
    Categorical,
    Columns,
    Covariances,
    Likelihood,
    Outputs,
    Probe,
    as_likelihood,
    calibration_error,
    check_compatible,
    confidence_sums,
    register_likelihood,
)
from symrazor.core.likelihood.bernoulli import Bernoulli
from symrazor.core.likelihood.gaussian import Gaussian, Heteroscedastic
from symrazor.core.likelihood.ordinal import Ordinal
from symrazor.core.likelihood.per_position import PerPosition
from symrazor.core.likelihood.poisson import Poisson
from symrazor.core.likelihood.weighted import Weighted, with_weights

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "Columns",
    "Covariances",
    "Gaussian",
    "Heteroscedastic",
    "Likelihood",
    "Ordinal",
    "Outputs",
    "PerPosition",
    "Poisson",
    "Probe",
    "Weighted",
    "as_likelihood",
    "calibration_error",
    "check_compatible",
    "confidence_sums",
    "register_likelihood",
    "with_weights",
]
