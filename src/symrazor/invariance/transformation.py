r"""A transformation of one datum, with widths that can be learned, and Lie groups as such.

A `Transformation` takes a point $\epsilon \in [-1, 1]^k$ for every datum and moves the datum by it:
$x' = t(x; \eta \epsilon)$ with widths $\eta$. At width 0 it leaves x alone. A `Choice` is a finite
group whose elements have learned probabilities; it has no points, all elements are taken.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
    """Moves each datum by a point of the cube; see the module.

    Attributes:
        dim: numbers in a point.
        poses: where `find_reach_` looks for the poses of data: "within" the cube; "anywhere", if
            points outside of it move data further in the same way; "none", if a datum cannot be
            moved back, so that the reading is the width of the copies. If its `Hyper`s have `dim`
            numbers in all, in the order of a point, readings narrow them to the poses found; else
            they show the width of the copies.
    """

    dim: int
    poses: Poses = "within"

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "n ..."], points: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n ..."]:
        """Datum i, moved by point i."""

    @abstractmethod
    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Widths by name, in units a person thinks in, for data of a shape (without the first)."""


class Choice(nn.Module, ABC):
    """A finite group with a probability for each element; the identity comes first."""

    @property
    @abstractmethod
    def probabilities(self) -> Float[Tensor, " e"]:
        """Of the elements, differentiable."""

    @abstractmethod
    def forward(self, x: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n e ..."]:
        """Every datum under every element."""

    @abstractmethod
    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Probabilities by name."""

    @property
    def products(self) -> Int[Tensor, "e e"] | None:
        """Number of the element h e for each h and e; None if shares of poses are not wanted."""
        return None

    def describe_shares(
        self, shape: Sequence[int], shares: Float[Tensor, " e"]
    ) -> dict[str, float]:
        """`describe` with shares of poses, at most the probabilities of copies; for `products`."""
        raise NotImplementedError(f"{type(self).__name__} has products, but no describe_shares")


class Lie(Transformation):
    """Pictures, vectors or sets of points moved by a Lie group of the plane or of space.

    Pictures [n, c, h, w] are resampled (`transforms.resample`); vectors [n, d] and sets of points
    [n, s, d] are multiplied (`transforms.act`), all points of a set by the same element.

    Args:
        distribution: the group, with its widths.
    """

    poses = "anywhere"

    def __init__(self, distribution: LieDistribution) -> None:
        """Keep the distribution."""
        super().__init__()
        given: object = distribution
        if not isinstance(given, LieDistribution) or given.width.raw.dim() != 1:
            raise ValueError(
                "expected a LieDistribution with one width for each generator, got "
                f"{distribution!r}; do: affine('rotation') for pictures, say"
            )
        self.distribution = distribution
        self.dim = distribution.dim

    def forward(
        self, x: Float[Tensor, "n ..."], points: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n ..."]:
        """Each datum under its own element."""
        self._check(x)
        matrices = self.distribution.matrices(points).unsqueeze(1)
        if x.dim() == 4:
            return resample(x.unsqueeze(1), matrices).squeeze(2).squeeze(1)
        if x.dim() == 2:
            return act(x.unsqueeze(1), matrices).squeeze(2).squeeze(1)
        if x.dim() == 3:
            return act(x, matrices).squeeze(2)
        raise ValueError(
            "expected pictures [n, c, h, w], sets of points [n, s, d] or vectors [n, d], got "
            f"{list(x.shape)}"
        )

    def _check(self, x: Tensor) -> None:
        """Maps of pictures, and of vectors with one number less than their size, are affine."""
        size = self.distribution.algebra.generators.shape[-1]
        homogeneous = x.dim() == 4 or x.shape[-1] == size - 1
        if homogeneous and bool(self.distribution.algebra.generators[:, -1].any()):
            raise ValueError(
                f"expected vectors of {size} numbers for {self.distribution.extra_repr()}, got "
                f"{list(x.shape)}; do: affine(...) for pictures"
            )

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Degrees, pixels and factors; shifts of points are in the unit of the data."""
        pixels = shape[-1] / 2 if len(shape) == 3 else None
        found = self.distribution.describe(pixels)
        units = {"half-widths": "in the unit of the data"}
        return {_renamed(name, units): float(width) for name, width in found.items()}


def _number(given: object) -> bool:
    return isinstance(given, int | float)


def _renamed(name: str, units: Mapping[str, str]) -> str:
    label, _, unit = name.removesuffix(")").rpartition(" (")
    return f"{label} ({units[unit]})" if unit in units else name


def affine(group: Group | Sequence[str] = "affine", widths: Widths = 0.1) -> Lie:
    """Rotations, shifts, scalings or all six affine generators of pictures, or some by name."""
    return Lie(AffineLie(group, widths))


def lie(algebra: LieAlgebra, widths: Widths = 0.1) -> Lie:
    """Any Lie algebra: `groups.lie.so3()` for sets of points in space, say."""
    if not isinstance(algebra, LieAlgebra):
        raise ValueError(
            f"expected a LieAlgebra, as groups.lie.so3(), got {type(algebra).__name__}; do: "
            "affine('rotation') for pictures, say"
        )
    return Lie(LieDistribution(algebra, widths))


class Flips(Choice):
    """Mirror images: each of some axes is turned over with a learned probability below 1/2.

    Args:
        axes: of one datum, counted from the end: -1 turns left and right, -2 up and down.
        probability: where each starts; 1/2 is full invariance.
    """

    def __init__(self, axes: Sequence[int] = (-1,), probability: float = 0.1) -> None:
        """Start at some probability."""
        super().__init__()
        if isinstance(axes, int):
            raise ValueError(f"expected a tuple of axes, got {axes}; do: Flips(({axes},))")
        if not _number(probability) or not 0 < probability < 0.5:
            raise ValueError(f"expected a probability above 0 and below 1/2, got {probability!r}")
        whole = all(type(axis) is int and axis < 0 for axis in axes)
        if not axes or not whole or len(set(axes)) < len(axes):
            raise ValueError(f"expected different axes counted from the end, got {list(axes)}")
        self.axes = tuple(axes)
        start = torch.full((len(axes),), float(probability))
        self.probability = Hyper(start, interval(0.0, 0.5))

    @property
    def probabilities(self) -> Float[Tensor, " e"]:
        """Products over the axes."""
        p = self.probability.value
        found = p.new_ones(1)
        for one in p:
            found = torch.cat([found * (1 - one), found * one])
        return found

    def forward(self, x: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n e ..."]:
        """All combinations of flips."""
        if x.dim() - 1 < -min(self.axes):
            raise ValueError(f"expected data with axes {self.axes}, got {list(x.shape[1:])} each")
        found = x.unsqueeze(1)
        for axis in self.axes:
            found = torch.cat([found, found.flip(axis)], 1)
        return found

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Probability by axis."""
        return self._named(self.probability.value.detach().tolist())

    @property
    def products(self) -> Int[Tensor, "e e"]:
        """Two flips of an axis are none."""
        number = torch.arange(2 ** len(self.axes))
        return number.unsqueeze(1) ^ number

    def describe_shares(
        self, shape: Sequence[int], shares: Float[Tensor, " e"]
    ) -> dict[str, float]:
        """Share of each axis; which side is the standard one is not known, so up to 1/2."""
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
    """Rotations of pictures by multiples of 90 degrees, exact; each with a learned probability.

    Args:
        probability: of all turns but the identity together, at the start; 3/4 is invariance.
    """

    def __init__(self, probability: float = 0.1) -> None:
        """Start near the identity."""
        super().__init__()
        self.logits = Hyper(torch.zeros(4), real)
        self.set_probability_(probability)

    def set_probability_(self, probability: float) -> None:
        """Of all turns together, the same for each of the three.

        Raises:
            ValueError: not between 0 and 1.
        """
        if not _number(probability) or not 0 < probability < 1:
            raise ValueError(f"expected a probability between 0 and 1, got {probability!r}")
        p = torch.tensor([1 - probability, *(probability / 3,) * 3])
        self.logits.value = p.log()

    @property
    def probabilities(self) -> Float[Tensor, " e"]:
        """Of 0, 90, 180 and 270 degrees."""
        return self.logits.value.softmax(0)

    def forward(self, x: Shaped[Tensor, "n c h w"]) -> Shaped[Tensor, "n 4 c h w"]:
        """All four turns."""
        check_images(x)
        if x.shape[-1] != x.shape[-2]:
            raise ValueError(f"expected square pictures for quarter turns, got {list(x.shape)}")
        return torch.stack([x.rot90(k, (-2, -1)) for k in range(4)], 1)

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Probability by angle; 1/4 each is invariance."""
        return self.describe_shares(shape, torch.ones(4))

    @property
    def products(self) -> Int[Tensor, "e e"]:
        """Angles add up."""
        number = torch.arange(4)
        return (number.unsqueeze(1) + number) % 4

    def describe_shares(
        self, shape: Sequence[int], shares: Float[Tensor, " e"]
    ) -> dict[str, float]:
        """The same by share."""
        values = torch.minimum(shares, self.probabilities.detach().to(shares)).tolist()
        unit = "probability of 1/4"
        return {f"turn by {90 * k} degrees ({unit})": p for k, p in enumerate(values) if k}
