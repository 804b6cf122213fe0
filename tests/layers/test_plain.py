"""Networks that `discover` and `fit` start from."""

import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor.layers.plain import convolutional


@pytest.mark.parametrize(
    "shape", [(1, 4), (3, 100), (1, 5, 7), (3, 32, 32), (1, 1, 9), (2, 4, 5, 6)]
)
def test_convolutions_of_any_shape_are_equivariant(shape: tuple[int, ...]) -> None:
    model = convolutional(shape, 3)
    x = torch.randn(4, *shape)
    assert model(x).shape == (4, 3)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    assert sr.equivariance_error(convs[0], x) < 1e-5
