"""Provide test suites for new layers, paths, likelihoods and groups, and reference values.

May import: everything below `discovery`.
"""

from symrazor.testing.annealing import (
    AnnealedEvidence,
    BatchedLikelihood,
    annealed_log_evidence,
)
from symrazor.testing.groups import GroupSuite
from symrazor.testing.layers import LayerSuite
from symrazor.testing.likelihoods import LikelihoodSuite
from symrazor.testing.oracles import Head, assert_close, dense_block, dense_ggn, output_hessian
from symrazor.testing.paths import PathSuite

__all__ = [
    "AnnealedEvidence",
    "BatchedLikelihood",
    "GroupSuite",
    "Head",
    "LayerSuite",
    "LikelihoodSuite",
    "PathSuite",
    "annealed_log_evidence",
    "assert_close",
    "dense_block",
    "dense_ggn",
    "output_hessian",
]
