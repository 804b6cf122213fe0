"""Build the plain and the permutation-equivariant networks that `discover` and `fit` start from.

Every function returns a network with fresh weights from torch's global random state.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from symrazor.layers.equivariant import DeepSets
from symrazor.layers.relaxed import Relaxed
from symrazor.layers.subsampling import SetPool

MAX_CONVOLUTIONS = 3
CONV_CHANNELS = {1: 16, 2: 8, 3: 4}
"""Spatial dimensions -> channels of the first convolution; each further one has twice as many."""
LARGE_IMAGE_SIDE = 20
"""Images whose smaller side exceeds this many pixels get twice as many channels."""
SET_WIDTH = 32
PERCEPTRON_WIDTH = 64
_CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
_GLOBAL_POOLS = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}


def conv_channels(shape: Sequence[int]) -> int:
    """Return the default number of channels of the first convolution.

    Args:
        shape: shape of one input, [channels, *size].
    """
    dims = len(shape) - 1
    is_large_image = dims == 2 and min(shape[1:]) > LARGE_IMAGE_SIDE
    return CONV_CHANNELS[dims] * (2 if is_large_image else 1)


def convolutional(shape: Sequence[int], outputs: int, width: int | None = None) -> nn.Module:
    """Return convolutions with max pooling in between, a global max pool and a linear layer.

    There are as many convolutions as leave four positions per side, at most `MAX_CONVOLUTIONS`.
    Circular padding makes each of them exactly equivariant to circular shifts.

    Args:
        shape: shape of one input, [channels, *size] in 1 to 3 dimensions.
        outputs: number of outputs.
        width: channels of the first convolution; by default `conv_channels(shape)`.
    """
    dims, smallest_side = len(shape) - 1, min(shape[1:])
    width = conv_channels(shape) if width is None else width
    convolutions = min(MAX_CONVOLUTIONS, max(1, int(math.log2(smallest_side)) - 1))
    kernel = 5 if dims == 1 and smallest_side >= 16 else 3
    channels = [shape[0], *(width * 2**index for index in range(convolutions))]
    layers: list[nn.Module] = []
    for c_in, c_out in pairwise(channels):
        conv = _CONVS[dims](c_in, c_out, kernel, padding=kernel // 2, padding_mode="circular")
        layers += [conv, nn.ReLU(), _MAX_POOLS[dims](2)]
    head = [_GLOBAL_POOLS[dims](1), nn.Flatten(), nn.Linear(channels[-1], outputs)]
    return nn.Sequential(*layers[:-1], *head)


def fully_connected(shape: Sequence[int], outputs: int, width: int = 64) -> nn.Module:
    """Return two hidden layers on the flattened input; no symmetry is built in."""
    body = [nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def deep_sets(features: int, points: int, outputs: int, width: int = SET_WIDTH) -> nn.Module:
    """Return a permutation-invariant network for inputs [n, features, points]."""
    first, second = (Relaxed([DeepSets(c, width, points)]) for c in (features, width))
    return set_network(first, second, outputs, width)


def set_network(
    first: nn.Module, second: nn.Module, outputs: int, width: int = SET_WIDTH
) -> nn.Module:
    """Return two given layers on points, a mean over the points, and two dense layers."""
    body = [first, nn.ReLU(), second, nn.ReLU(), SetPool("mean")]
    return nn.Sequential(*body, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def perceptron(features: int, outputs: int, hidden_layers: int) -> nn.Module:
    """Return a linear model, or one with hidden layers of `PERCEPTRON_WIDTH` tanh units."""
    widths = [features, *[PERCEPTRON_WIDTH] * hidden_layers, outputs]
    layers: list[nn.Module] = []
    for c_in, c_out in pairwise(widths):
        layers += [nn.Linear(c_in, c_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
