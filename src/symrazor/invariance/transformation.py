r"""Define transformations of one input with learned widths, and finite groups with probabilities.

A `Transformation` takes a point $\epsilon \in [-1, 1]^k$ for every input and transforms the input
by it: $x' = t(x; \eta \epsilon)$ with widths $\eta$; at width 0 it is the identity. A `Choice` is a
finite group whose elements have learned probabilities; it takes no points, since all elements are
used.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, interval, real
from symrazor.core.resampling import act, check_images, resample
from symrazor.groups.lie import LieAlgebra
from symrazor.invariance.lie_distributions import AffineLie, Group, LieDistribution, Widths

Poses = Literal["within", "anywhere", "none"]


class Transformation(nn.Module, ABC):
    """A transformation of each input by a point of the cube; see the module docstring.

    Attributes:
        dim: dimension of a point.
        poses: where `find_reach_` searches for poses of the inputs: "within" the cube; "anywhere",
            if points outside of the cube continue the transformation; "none", if a transformation
            cannot be inverted, so that readings show the width of the copies. If its `Hyper`s have
            `dim` numbers in total, in the order of a point, readings multiply them by the measured
            reach; else readings show the width of the copies.
    """

    dim: int
    poses: Poses = "within"

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "n ..."], points: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n ..."]:
        """Transform input i by point i."""

    @abstractmethod
    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Return widths by name in common units, for one input of a shape."""


class Choice(nn.Module, ABC):
    """A finite group with a probability for each element; the identity comes first."""

    @property
    @abstractmethod
    def probabilities(self) -> Float[Tensor, " e"]:
        """Return the probabilities of the elements, differentiably."""

    @abstractmethod
    def forward(self, x: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n e ..."]:
        """Return every input under every element."""

    @abstractmethod
    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Return probabilities by name."""

    @property
    def products(self) -> Int[Tensor, "e e"] | None:
        """Return the index of the product h e for each h and e; None to not measure shares."""
        return None

    def describe_shares(
        self, shape: Sequence[int], shares: Float[Tensor, " e"]
    ) -> dict[str, float]:
        """Return measured shares by name, at most the probabilities; needs `products`."""
        raise NotImplementedError(f"{type(self).__name__} has products, but no describe_shares")


class Lie(Transformation):
    """Images, vectors or sets of points transformed by a Lie group of the plane or of space.

    Images [n, c, h, w] are resampled (`core.resampling.resample`). Vectors [n, d] and sets of
    points [n, s, d] are multiplied by matrices (`core.resampling.act`), all points of a set by the
    same one.

    Args:
        distribution: the group and its widths.
    """

    poses = "anywhere"

    def __init__(self, distribution: LieDistribution) -> None:
        super().__init__()
        value: object = distribution
        if not isinstance(value, LieDistribution) or value.width.raw.dim() != 1:
            raise ValueError(
                "Lie needs a LieDistribution with one width for each generator, got "
                f"{distribution!r}. Example: affine('rotation') for images."
            )
        self.distribution = distribution
        self.dim = distribution.dim

    def forward(
        self, x: Float[Tensor, "n ..."], points: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n ..."]:
        """Transform each input by its own group element."""
        self._check(x)
        matrices = self.distribution.matrices(points).unsqueeze(1)
        if x.dim() == 3:
            return act(x, matrices).squeeze(2)
        if x.dim() in (2, 4):
            moved = (act if x.dim() == 2 else resample)(x.unsqueeze(1), matrices)
            return moved.squeeze(2).squeeze(1)
        raise ValueError(
            "Inputs must be images [n, c, h, w], sets of points [n, s, d] or vectors [n, d], got "
            f"{list(x.shape)}."
        )

    def _check(self, x: Tensor) -> None:
        """Check that maps of images, and of vectors with one entry less, are affine."""
        size = self.distribution.algebra.generators.shape[-1]
        homogeneous = x.dim() == 4 or x.shape[-1] == size - 1
        if homogeneous and bool(self.distribution.algebra.generators[:, -1].any()):
            raise ValueError(
                f"{self.distribution.extra_repr()} acts on vectors of {size} numbers, got inputs "
                f"{list(x.shape)}. Use affine(...) for images."
            )

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Return widths in degrees, pixels and factors; shifts of points in the data's unit."""
        pixels = shape[-1] / 2 if len(shape) == 3 else None
        return {
            name.replace("(half-widths)", "(in the unit of the data)"): float(width)
            for name, width in self.distribution.describe(pixels).items()
        }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def affine(group: Group | Sequence[str] = "affine", widths: Widths = 0.1) -> Lie:
    """Return rotations, shifts, scalings, all six affine generators of images, or some by name."""
    return Lie(AffineLie(group, widths))


def lie(algebra: LieAlgebra, widths: Widths = 0.1) -> Lie:
    """Return the transformation of a Lie algebra, such as `groups.lie.so3()` for points."""
    if not isinstance(algebra, LieAlgebra):
        raise ValueError(
            f"algebra must be a LieAlgebra such as groups.lie.so3(), got {type(algebra).__name__}. "
            "Use affine('rotation') for images."
        )
    return Lie(LieDistribution(algebra, widths))


class Flips(Choice):
    """Reflections: each axis is flipped with a learned probability below 1/2.

    Args:
        axes: axes of one input, counted from the end: -1 flips left and right, -2 up and down.
        probability: initial probability of each flip; 1/2 is full invariance.
    """

    def __init__(self, axes: Sequence[int] = (-1,), probability: float = 0.1) -> None:
        super().__init__()
        if isinstance(axes, int):
            raise ValueError(f"axes must be a tuple: use Flips(({axes},)).")
        if not _is_number(probability) or not 0 < probability < 0.5:
            raise ValueError(f"probability must be above 0 and below 1/2, got {probability!r}.")
        are_negative = all(type(axis) is int and axis < 0 for axis in axes)
        if not axes or not are_negative or len(set(axes)) < len(axes):
            raise ValueError(f"axes must be distinct negative integers, got {list(axes)}.")
        self.axes = tuple(axes)
        start = torch.full((len(axes),), float(probability))
        self.probability = Hyper(start, interval(0.0, 0.5))

    @property
    def probabilities(self) -> Float[Tensor, " e"]:
        """Return the products of the probabilities of all axes."""
        p = self.probability.value
        products = p.new_ones(1)
        for flip in p:
            products = torch.cat([products * (1 - flip), products * flip])
        return products

    def forward(self, x: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n e ..."]:
        """Return all combinations of flips."""
        if x.dim() - 1 < -min(self.axes):
            raise ValueError(
                f"Inputs of shape {list(x.shape[1:])} do not have the axes {self.axes}."
            )
        copies = x.unsqueeze(1)
        for axis in self.axes:
            copies = torch.cat([copies, copies.flip(axis)], 1)
        return copies

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Return the probability of each axis."""
        return self._named(self.probability.value.detach().tolist())

    @property
    def products(self) -> Int[Tensor, "e e"]:
        """Return the group table: two flips of the same axis cancel."""
        number = torch.arange(2 ** len(self.axes))
        return number.unsqueeze(1) ^ number

    def describe_shares(
        self, shape: Sequence[int], shares: Float[Tensor, " e"]
    ) -> dict[str, float]:
        """Return the share of each axis, at most 1/2 since the standard side is unknown."""
        number = torch.arange(len(shares))
        bits = [number.bitwise_right_shift(i) % 2 == 1 for i in range(len(self.axes))]
        values = [float(shares.cpu()[bit].sum()) for bit in bits]
        most = self.probability.value.detach().tolist()
        return self._named([min(q, 1 - q, p) for q, p in zip(values, most, strict=True)])

    def _named(self, values: Sequence[float]) -> dict[str, float]:
        names = {-1: "left-right flip", -2: "up-down flip"}
        return {
            f"{names.get(a, f'flip of axis {a}')} (probability)": p
            for a, p in zip(self.axes, values, strict=True)
        }


class QuarterTurns(Choice):
    """Exact rotations of images by multiples of 90 degrees, each with a learned probability.

    Args:
        probability: initial probability of all rotations except the identity; 3/4 is full
            invariance.
    """

    def __init__(self, probability: float = 0.1) -> None:
        super().__init__()
        self.logits = Hyper(torch.zeros(4), real)
        self.set_probability_(probability)

    def set_probability_(self, probability: float) -> None:
        """Set the total probability of the three rotations, equal for each, between 0 and 1."""
        if not _is_number(probability) or not 0 < probability < 1:
            raise ValueError(f"probability must be between 0 and 1, got {probability!r}.")
        p = torch.tensor([1 - probability, *(probability / 3,) * 3])
        self.logits.value = p.log()

    @property
    def probabilities(self) -> Float[Tensor, " e"]:
        """Return the probabilities of 0, 90, 180 and 270 degrees."""
        return self.logits.value.softmax(0)

    def forward(self, x: Shaped[Tensor, "n c h w"]) -> Shaped[Tensor, "n 4 c h w"]:
        """Return all four rotations."""
        check_images(x)
        if x.shape[-1] != x.shape[-2]:
            raise ValueError(f"QuarterTurns needs square images, got {list(x.shape)}.")
        return torch.stack([x.rot90(k, (-2, -1)) for k in range(4)], 1)

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Return the probability of each angle; 1/4 each is full invariance."""
        return self.describe_shares(shape, torch.ones(4))

    @property
    def products(self) -> Int[Tensor, "e e"]:
        """Return the group table: angles add up."""
        number = torch.arange(4)
        return (number.unsqueeze(1) + number) % 4

    def describe_shares(
        self, shape: Sequence[int], shares: Float[Tensor, " e"]
    ) -> dict[str, float]:
        """Return the share of each angle, at most its probability."""
        values = torch.minimum(shares, self.probabilities.detach().to(shares)).tolist()
        unit = "probability of 1/4"
        return {f"turn by {90 * k} degrees ({unit})": p for k, p in enumerate(values) if k}
