"""Fit Gaussian posteriors over weights by maximising the evidence lower bound.

`posteriors.py` defines the covariance structures, `network.py` wraps any network, `bound.py`
computes the bound.
"""

from symrazor.inference.variational.config import VariationalConfig
from symrazor.inference.variational.gaussian import (
    GaussianPosterior,
    Point,
    best_variance,
    collapsed_kl,
    kl,
)
from symrazor.inference.variational.network import Variational
from symrazor.inference.variational.posteriors import (
    BlockCholesky,
    Diagonal,
    Full,
    LowRank,
    MatrixNormal,
)

__all__ = [
    "BlockCholesky",
    "Diagonal",
    "Full",
    "GaussianPosterior",
    "LowRank",
    "MatrixNormal",
    "Point",
    "Variational",
    "VariationalConfig",
    "best_variance",
    "collapsed_kl",
    "kl",
]
