"""Build simple networks of torch modules and of group convolutions.

`convolutional`, `fully_connected` and `perceptron` return networks with fresh weights from torch's
global random state.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import log2, prod
from typing import Literal

import torch
from torch import Tensor, nn

from symrazor.groups import Group, OnGrid
from symrazor.layers.conv import CONVOLUTIONS
from symrazor.layers.gconv import GConv, Kind
from symrazor.layers.point_group import point_group
from symrazor.layers.subsampling import Subsample

MAX_CONVOLUTIONS = 3
CONV_CHANNELS = {1: 16, 2: 8, 3: 4}
"""Spatial dimensions -> channels of the first convolution; each further one has twice as many."""
LARGE_IMAGE_SIDE = 20
"""Images whose smaller side exceeds this many pixels get twice as many channels."""
POOL_STRIDE = 2
PERCEPTRON_WIDTH = 64
_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
_GLOBAL_POOLS = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}


def conv_channels(shape: Sequence[int]) -> int:
    """Return the default channels of the first convolution on inputs of shape [channels, *size]."""
    dims = len(shape) - 1
    is_large_image = dims == 2 and min(shape[1:]) > LARGE_IMAGE_SIDE
    return CONV_CHANNELS[dims] * (2 if is_large_image else 1)


def convolutional(
    shape: Sequence[int], outputs: int, width: int | None = None, kernels: Sequence[int] = ()
) -> nn.Module:
    """Return convolutions with aligned max pools in between, a global max pool and a linear layer.

    The network is exactly invariant to circular shifts: convolutions have circular padding, and
    `Subsample` follows the shifts, for sides of any length.

    Args:
        shape: shape of one input, [channels, *size] in 1 to 3 dimensions.
        outputs: number of outputs.
        width: channels of the first convolution; by default `conv_channels(shape)`.
        kernels: size of the filters of each convolution; by default as many convolutions as leave
            four positions per side, at most `MAX_CONVOLUTIONS`.
    """
    dims, kernels = len(shape) - 1, kernels or default_kernels(shape)
    channels = _channels(shape, width, len(kernels))
    convs = [
        CONVOLUTIONS[dims](c_in, c_out, kernel, padding=kernel // 2, padding_mode="circular")
        for (c_in, c_out), kernel in zip(channels, kernels, strict=True)
    ]
    return nn.Sequential(*_with_pools(convs, dims), nn.Linear(convs[-1].out_channels, outputs))


def ordinary_convolutional(
    shape: Sequence[int], outputs: int, width: int | None = None
) -> nn.Module:
    """Return convolutions with strided max pools in between and a dense readout by position.

    It has no symmetry and is fast: zero padding, filters of size 3, and for images weights in the
    channels-last format.

    Args:
        shape: shape of one input, [channels, *size] in 1 to 3 dimensions.
        outputs: number of outputs.
        width: channels of the first convolution; by default `conv_channels(shape)`.
    """
    dims, sizes, layers = len(shape) - 1, list(shape[1:]), list[nn.Module]()
    channels = _channels(shape, width, len(default_kernels(shape)))
    for c_in, c_out in channels:
        conv = CONVOLUTIONS[dims](c_in, c_out, 3, padding=1)
        layers += [conv, nn.ReLU(), _POOLS[dims](POOL_STRIDE)]
        sizes = [size // POOL_STRIDE for size in sizes]
    network = nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(channels[-1][1] * prod(sizes), outputs)
    )
    return network.to(memory_format=torch.channels_last) if dims == 2 else network  # type: ignore[call-overload]


def group_convolutions(
    shape: Sequence[int],
    group: str | Group,
    width: int | None = None,
    kernels: Sequence[int] = (),
) -> tuple[list[nn.Module], int]:
    """Return group convolutions with pools in between, and the channels of their maps.

    `relax` of a `convolutional` network of the same width, with this group, contains these layers.

    Args:
        shape: shape of one input, [channels, *size] in 2 or 3 dimensions, with equal sizes.
        group: rotations and reflections that map the grid to itself, see `GConv`.
        width: channels of the first convolution, a multiple of the order of the group.
        kernels: sizes of the filters; by default `default_kernels(shape)`.

    Raises:
        ValueError: a group that does not fit the map or the width.
    """
    size, kernels = tuple(shape[1:]), kernels or default_kernels(shape)
    channels, layers = _channels(shape, width, len(kernels)), list[nn.Module]()
    for (c_in, c_out), kernel in zip(channels, kernels, strict=True):
        kind: Kind = "full" if layers else "lift"
        layers.append(GConv(c_in, c_out, size, group=group, kind=kind, kernel=kernel))
        size = tuple(-(-side // POOL_STRIDE) for side in size)
    return _with_pools(layers, len(shape) - 1)[:-2], channels[-1][1]


def default_kernels(shape: Sequence[int]) -> list[int]:
    """Return the size of the filters of each convolution on inputs of a shape."""
    convolutions = min(MAX_CONVOLUTIONS, max(1, int(log2(min(shape[1:]))) - 1))
    return [5 if len(shape) == 2 and shape[1] >= 16 else 3] * convolutions


def _channels(shape: Sequence[int], width: int | None, count: int) -> list[tuple[int, int]]:
    """Return the input and output channels of every convolution."""
    width = conv_channels(shape) if width is None else width
    return list(pairwise([shape[0], *(width * 2**index for index in range(count))]))


def _with_pools(convs: Sequence[nn.Module], dims: int) -> list[nn.Module]:
    """Return convolutions with ReLU and an aligned max pool after each, the last one global."""
    layers: list[nn.Module] = []
    for conv in convs:
        layers += [conv, nn.ReLU(), Subsample(POOL_STRIDE, "aligned-max-pool")]
    return [*layers[:-1], _GLOBAL_POOLS[dims](1), nn.Flatten()]


Reads = Literal["position", "row", "column"] | None
"""What a readout sees of the position of a feature."""


class Readout(nn.Module):
    """Map feature maps to outputs: the maximum and the mean over positions, and a linear layer.

    A linear layer on all positions contains the mean. Networks that differ in symmetry only must
    therefore have it, with and without that layer.

    Args:
        channels: channels of the maps, a multiple of `order`.
        outputs: number of outputs.
        positions: size of the maps.
        reads: with "position", a dense layer on all positions is added, which breaks the symmetry.
            "row" and "column" add a dense layer on the maxima over the other axis of images, which
            leave the invariance to shifts along that axis. None adds nothing.
        order: group elements of the maps, over which pooled features are averaged.
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        positions: Sequence[int] = (),
        reads: Reads = None,
        order: int = 1,
    ) -> None:
        super().__init__()
        self.reads, self.order, self.by_position = reads, order, None
        self.linear = nn.Linear(channels // order, outputs)
        self.mean = nn.Linear(channels // order, outputs, bias=False)
        if reads is not None:
            seen = prod(positions) if reads == "position" else positions[reads == "column"]
            self.by_position = nn.Linear(channels * seen, outputs)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the outputs for maps [n, channels, *size]."""
        return self.from_features(self.features(maps))

    def from_features(self, features: Sequence[Tensor]) -> Tensor:
        """Return the outputs for pooled features."""
        outputs: Tensor = self.linear(features[0]) + self.mean(features[1])
        if self.by_position is None:
            return outputs
        at_positions: Tensor = self.by_position(features[2])
        return outputs + at_positions

    def features(self, maps: Tensor) -> list[Tensor]:
        """Return the maxima, the means and, if they are read, the values by position."""
        flat = maps.flatten(2)
        pooled = [flat.amax(2), flat.mean(2)]
        if self.order > 1:
            pooled = [part.unflatten(1, (self.order, -1)).mean(1) for part in pooled]
        if self.reads in ("row", "column"):
            maps = maps.amax(3 if self.reads == "row" else 2)
        return pooled if self.reads is None else [*pooled, maps.flatten(1)]


class OrbitPooled(nn.Module):
    """Average the features of all transformed copies of the input: invariant to a point group.

    The readout may see positions, so that the network need not be invariant to shifts.

    Args:
        body: layers from the input to feature maps.
        readout: maps the feature maps to outputs.
        group: rotations and reflections that map the grid to itself.
        size: size of the grid.
    """

    moves: Tensor

    def __init__(
        self, body: nn.Module, readout: Readout, group: str | Group, size: Sequence[int]
    ) -> None:
        super().__init__()
        self.body, self.readout = body, readout
        on_grid, size = point_group(group), tuple(size)
        on_grid.check_map(size)
        pixels = torch.arange(prod(size), dtype=torch.float64).reshape(1, 1, *size)
        action = OnGrid(on_grid.group, size)
        moves = [action.act(pixels, g).long().flatten() for g in range(on_grid.order)]
        self.size = size
        self.register_buffer("moves", torch.stack(moves), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        flat = x.flatten(2)
        copies = [flat[:, :, move].unflatten(2, self.size) for move in self.moves]
        features = [self.readout.features(self.body(copy)) for copy in copies]
        mean = [torch.stack(part).mean(0) for part in zip(*features, strict=True)]
        return self.readout.from_features(mean)


def fully_connected(shape: Sequence[int], outputs: int, width: int = 64) -> nn.Module:
    """Return two hidden layers on the flattened input; no symmetry is built in."""
    body = [nn.Flatten(), nn.Linear(prod(shape), width), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def perceptron(
    features: int, outputs: int, hidden_layers: int, width: int = PERCEPTRON_WIDTH
) -> nn.Module:
    """Return a linear model, or one with hidden layers of tanh units."""
    widths = [features, *[width] * hidden_layers, outputs]
    layers: list[nn.Module] = []
    for c_in, c_out in pairwise(widths):
        layers += [nn.Linear(c_in, c_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
