"""Public test suites: a new layer or likelihood inherits its tests.

    class TestMyLayer(symrazor.testing.LayerSuite):
        def make(self):
            return MyLayer(3, 4)
        def inputs(self):
            return torch.randn(5, 3)

Everything is checked in float64 against an oracle that knows nothing of the weight-sharing format:
the dense Gauss-Newton matrix from per-datum Jacobians by automatic differentiation.
"""

from symrazor.groups.suite import GroupSuite
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
