"""Test fully connected paths against loops."""

import itertools

import torch

from symrazor.layers import FFC, SFC
from symrazor.testing import assert_close


def test_factored_layer_by_equation_5() -> None:
    """Compare with w[d, o, c, s] = theta_1[o, d, c] theta_2[d, c, s], summed by loops."""
    torch.manual_seed(0)
    path = FFC(2, 3, (2, 3), stride=1).double()
    theta_2, theta_1 = path.first.weight, path.second.weight  # [c, d, s], [d, o, c]
    x = torch.randn(1, 2, 2, 3, dtype=torch.float64)
    flat, y = x.reshape(2, 6), torch.zeros(3, 6, dtype=torch.float64)
    for d, o, c, s in itertools.product(range(3), range(6), range(2), range(6)):
        y[d, o] += (theta_1[d, o, c] * theta_2[c, d, s] * flat[c, s]).item()
    assert_close(path(x).reshape(3, 6), y, 1e-12)


def test_a_product_is_zero_with_either_factor() -> None:
    for path in (FFC(2, 3, (4, 4), bias=True), SFC(2, 3, (4, 4), bias=True)):
        assert not path.is_zero()
        for factor in path.factors:
            kept = factor.detach().clone()
            torch.nn.init.zeros_(factor)
            assert path.is_zero()
            torch.nn.init.ones_(path.offset.bias)
            assert not path.is_zero()
            torch.nn.init.zeros_(path.offset.bias)
            factor.data.copy_(kept)
        with torch.no_grad():  # of each pair of channels one factor
            path.factors[0][0] = 0
            path.factors[1][..., 1] = 0
        assert path.is_zero()
        assert not path(torch.randn(2, 2, 4, 4)).any()
