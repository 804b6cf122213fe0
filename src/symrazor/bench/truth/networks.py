"""Fixed architectures: networks that have a symmetry exactly, and networks that lack it.

Each is written with as few means as possible, so that the benchmark does not depend on the networks
that `discover` compares.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

Transform = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, torch.Generator], Tensor]
_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CHANNELS = {1: (16, 32, 32), 2: (16, 32), 3: (8, 16)}
"""Spatial dimensions -> channels of the convolutions."""
STRIDED_CHANNELS = (16, 32)
FIRST_KERNEL = {1: 5, 2: 5, 3: 3}
"""Spatial dimensions -> size of the first filter; further ones have size 3, and are dilated."""
WIDTH = 64
"""Width of dense layers."""


@dataclass(frozen=True)
class Architecture:
    """A network, what it assumes, and how its training data are augmented.

    Args:
        make: returns a network with weights from torch's global random state.
        holds: symmetry -> whether the network has it.
        augment: transforms training inputs at random; None for no augmentation.
    """

    make: Callable[[], nn.Module]
    holds: Mapping[str, bool] = field(default_factory=dict)
    augment: Augment | None = None


class Pool(nn.Module):
    """Concatenate the mean and the maximum over all dimensions from `start` on, or over one."""

    def __init__(self, start: int = 2, dim: int | None = None) -> None:
        super().__init__()
        self.start, self.dim = start, dim

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, 2c], or [n, 2c, ...] without the pooled dimension."""
        dims = tuple(range(self.start, x.dim())) if self.dim is None else (self.dim,)
        return torch.cat([x.mean(dims), x.amax(dims)], 1)


Trunk = tuple[list[nn.Module], int]
"""Layers that return features [n, count], and their count."""


def invariant(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a network that is exactly invariant to circular shifts, for all sizes."""
    layers, features = invariant_trunk(shape)
    return nn.Sequential(*layers, *_head(features, outputs))


def invariant_trunk(shape: Sequence[int]) -> Trunk:
    """Return circular convolutions and a pool over all positions."""
    channels = CHANNELS[len(shape) - 1]
    return [*_circular_convolutions(shape, channels), Pool()], 2 * channels[-1]


def invariant_along(shape: Sequence[int], outputs: int, dim: int) -> nn.Module:
    """Return a network that is exactly invariant to circular shifts along one dimension only."""
    channels = CHANNELS[len(shape) - 1]
    trunk = _circular_convolutions(shape, channels)
    features = 2 * channels[-1] * math.prod(shape[1:]) // shape[dim - 1]
    return nn.Sequential(*trunk, Pool(dim=dim), nn.Flatten(), *_head(features, outputs))


def _circular_convolutions(shape: Sequence[int], channels: Sequence[int]) -> list[nn.Module]:
    """Return convolutions without subsampling; dilations let them see whole objects."""
    dims, layers = len(shape) - 1, list[nn.Module]()
    for index, (c_in, c_out) in enumerate(pairwise([shape[0], *channels])):
        kernel, dilation = (3 if index else FIRST_KERNEL[dims]), 2**index
        layers += [
            _CONVOLUTIONS[dims](
                c_in,
                c_out,
                kernel,
                padding=dilation * (kernel // 2),
                dilation=dilation,
                padding_mode="circular",
            ),
            nn.ReLU(),
        ]
    return layers


def positional(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return strided convolutions and dense layers that see the position of every feature."""
    layers, features = positional_trunk(shape)
    return nn.Sequential(*layers, *_head(features, outputs))


def positional_trunk(shape: Sequence[int]) -> Trunk:
    """Return strided convolutions, flattened."""
    layers: list[nn.Module] = []
    sizes = list(shape[1:])
    for c_in, c_out in pairwise([shape[0], *STRIDED_CHANNELS]):
        layers += [_CONVOLUTIONS[len(sizes)](c_in, c_out, 3, stride=2, padding=1), nn.ReLU()]
        sizes = [(size + 1) // 2 for size in sizes]
    return [*layers, nn.Flatten()], STRIDED_CHANNELS[-1] * math.prod(sizes)


def dense(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return two hidden layers on the flattened input."""
    layers = [nn.Flatten(), nn.Linear(math.prod(shape), WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, *_head(WIDTH, outputs))


def linear(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return a linear model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def _head(features: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)]


class OrbitPooled(nn.Module):
    """Pool features over transformed copies of the input: exactly invariant under a finite group.

    Args:
        trunk: layers that return features.
        transforms: all elements of the group.
        outputs: number of outputs.
    """

    def __init__(self, trunk: Trunk, transforms: Sequence[Transform], outputs: int) -> None:
        super().__init__()
        layers, features = trunk
        self.features, self.transforms = nn.Sequential(*layers), tuple(transforms)
        self.head = nn.Sequential(*_head(2 * features, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        copies = torch.cat([transform(x) for transform in self.transforms])
        orbit = self.features(copies).unflatten(0, (len(self.transforms), len(x)))
        out: Tensor = self.head(torch.cat([orbit.mean(0), orbit.amax(0)], 1))
        return out


def quarter_turn(x: Tensor, turns: int) -> Tensor:
    """Rotate square images by multiples of 90 degrees."""
    return torch.rot90(x, turns, (2, 3))


def mirror(x: Tensor) -> Tensor:
    """Reverse the last dimension."""
    return x.flip(-1)


class DeepSets(nn.Module):
    """Permutation-invariant network for [n, points, features]; or invariant within blocks only.

    Args:
        features: of a point.
        outputs: number of outputs.
        blocks: number of blocks of equal size; points may be permuted inside each of them.
    """

    def __init__(self, features: int, outputs: int, blocks: int = 1) -> None:
        super().__init__()
        self.blocks = blocks
        points = [nn.Linear(features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.points = nn.Sequential(*points)
        self.head = nn.Sequential(*_head(2 * WIDTH * blocks, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        phi = self.points(x).unflatten(1, (self.blocks, -1))
        out: Tensor = self.head(torch.cat([phi.mean(2), phi.amax(2)], 2).flatten(1))
        return out


class Ring(nn.Module):
    """Invariant to cyclic shifts of points [n, points, features] in a given order."""

    def __init__(self, features: int, outputs: int, order: Sequence[int]) -> None:
        super().__init__()
        self.order = list(order)
        self.network = invariant((features, len(self.order)), outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs; vectors [n, points] are points with one feature."""
        points = x.unsqueeze(2) if x.dim() == 2 else x
        out: Tensor = self.network(points[:, self.order].transpose(1, 2))
        return out


class PlaneInvariant(nn.Module):
    """Invariant to rotations of vectors in one plane.

    Args:
        generator: skew-symmetric generator of the rotations, with singular values 1 or 0.
        outputs: number of outputs.
    """

    generator: Tensor

    def __init__(self, generator: Tensor, outputs: int) -> None:
        super().__init__()
        self.register_buffer("generator", generator.double())
        self.network = dense((len(generator) + 1,), outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, from the part outside the plane and the radius inside."""
        transposed = self.generator.mT.to(x)
        turned = x @ transposed
        outside = x + turned @ transposed
        out: Tensor = self.network(torch.cat([outside, turned.norm(dim=1, keepdim=True)], 1))
        return out


def ring_order(permutation: Tensor) -> list[int]:
    """Return the positions of a cyclic permutation in the order of its cycle."""
    order, steps = [0], permutation.tolist()
    while steps[order[-1]] != 0:
        order.append(steps[order[-1]])
    return order
