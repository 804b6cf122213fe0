"""Provide test suites that a new layer, path, likelihood or group inherits.

May import: everything below `discovery`.
"""

from symrazor.testing.groups import GroupSuite
from symrazor.testing.layers import LayerSuite
from symrazor.testing.likelihoods import LikelihoodSuite
from symrazor.testing.oracles import Head, assert_close, dense_block, dense_ggn, output_hessian
from symrazor.testing.paths import PathSuite

__all__ = [
    "GroupSuite",
    "Head",
    "LayerSuite",
    "LikelihoodSuite",
    "PathSuite",
    "assert_close",
    "dense_block",
    "dense_ggn",
    "output_hessian",
]
