r"""Define transformations of one input with learned widths, and finite groups with probabilities.

A `Transformation` takes a point $\epsilon \in [-1, 1]^k$ for every input and transforms the input
by it: $x' = t(x; \eta \epsilon)$ with widths $\eta$; at width 0 it is the identity. A `Choice` is a
finite group whose elements have learned probabilities; it takes no points, since all elements are
used.

An image x is a function on the plane, known at its pixels and zero outside. The map T reads it at
other places, $(T x)(q) = x(T q)$, by bilinear interpolation (`resample`). The origin is the image
centre, and the unit is half the width in both directions, so that a rotation is a rotation for any
aspect ratio. The adjoint transforms weights instead of inputs (`adjoint_resample`). Since

$$ \int w(q)\, x(Tq)\, dq = |T|^{-1} \int w(T^{-1} p)\, x(p)\, dp, $$

transforming every input by T equals, up to interpolation, transforming the filters once:
$(W \circ T) x = W (T \circ x)$ (Learning Invariant Weights, section 3.2).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, interval, real
from symrazor.groups.lie import LieAlgebra, sample_grid
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

    Images [n, c, h, w] are resampled (`resample`). Vectors [n, d] and sets of
    points [n, s, d] are multiplied by matrices (`act`), all points of a set by the
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
        is_moved = [number.bitwise_right_shift(i) % 2 == 1 for i in range(len(self.axes))]
        values = [float(shares.cpu()[bit].sum()) for bit in is_moved]
        probabilities = self.probability.value.detach().tolist()
        return self._named([min(q, 1 - q, p) for q, p in zip(values, probabilities, strict=True)])

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


def resample(
    images: Float[Tensor, "*lead n c h w"],
    matrices: Float[Tensor, "*lead s 3 3"],
    blur: float = 0.0,
) -> Float[Tensor, "*lead n s c h w"]:
    """Return every image under every map: bilinear, zeros outside.

    Images that share their maps are interpolated together, so that the interpolation weights are
    computed once. To give every image its own maps, add a leading dimension.

    Args:
        images: floating-point images.
        matrices: homogeneous maps, with the leading dimensions of `images` or none.
        blur: standard deviation in pixels of a Gaussian filter applied first; 0 for none.
    """
    check_images(images)
    if not blur >= 0:
        raise ValueError(f"blur must be at least 0 pixels, got {blur}.")
    lead, (n, c, h, w) = images.shape[:-4], images.shape[-4:]
    maps = _check_maps(matrices, lead)[..., :2, :].to(images.dtype)
    flat = images.reshape(-1, n * c, h, w)
    if blur > 0:
        flat = _blurred(flat, blur)
    s = maps.shape[-3]
    read = sample_grid(flat, maps.reshape(-1, s, 2, 3))
    return read.reshape(*lead, n, c, s, h, w).movedim(-3, -4)


def adjoint_resample(
    filters: Float[Tensor, "*lead n c h w"],
    matrices: Float[Tensor, "*lead s 3 3"],
    blur: float = 0.0,
) -> Float[Tensor, "*lead n s c h w"]:
    """Return filters $|T|^{-1} w(T^{-1} q)$, whose products with x are those of w with $T x$."""
    inverse = torch.linalg.inv_ex(matrices)[0]
    (a, b), (c, d) = (row.unbind(-1) for row in inverse[..., :2, :2].unbind(-2))
    area = (a * d - b * c).abs().to(filters.dtype)[..., None, :, None, None, None]
    resampled: Tensor = resample(filters, inverse, blur) * area
    return resampled


def act(
    x: Float[Tensor, "*lead n d"], matrices: Float[Tensor, "*lead s e e"]
) -> Float[Tensor, "*lead n s d"]:
    """Return every vector under every map: linear (e = d) or affine (e = d + 1, homogeneous)."""
    d, e = x.shape[-1], matrices.shape[-1]
    if matrices.shape[-2] != e or e not in (d, d + 1):
        raise ValueError(
            f"Maps of vectors with {d} entries must be {d} x {d} (linear) or {d + 1} x {d + 1} "
            f"(affine), got {list(matrices.shape[-2:])}."
        )
    maps = matrices.to(x.dtype)
    moved = torch.einsum("...sij,...nj->...nsi", maps[..., :d, :d], x)
    return moved if e == d else moved + maps[..., :d, d].unsqueeze(-3)


def check_images(images: Tensor) -> None:
    """Raise ValueError unless images are floating-point numbers [..., n, c, h, w]."""
    if images.dim() < 4 or not images.is_floating_point():
        raise ValueError(
            "Images must be floating-point tensors [n, channels, height, width], got "
            f"{list(images.shape)} of {images.dtype}. Reshape or convert them, or use an action on "
            "vectors."
        )


def _check_maps(matrices: Tensor, lead: torch.Size) -> Tensor:
    if matrices.dim() < 3 or matrices.shape[-2:] != (3, 3) or not matrices.shape[-3]:
        raise ValueError(
            "Affine maps of the plane must have shape [..., s, 3, 3] with s >= 1, got "
            f"{list(matrices.shape)}."
        )
    if matrices.shape[:-3] not in (lead, torch.Size()):
        raise ValueError(
            f"The maps must have the leading dimensions {list(lead)} of the images or none, got "
            f"{list(matrices.shape[:-3])}."
        )
    return matrices


def _blurred(images: Float[Tensor, "n c h w"], sigma: float) -> Float[Tensor, "n c h w"]:
    """Apply a separable Gaussian filter with zeros outside."""
    radius = max(1, math.ceil(3 * sigma))
    steps = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    taps = (-0.5 * (steps / sigma).square()).softmax(0)
    flat = images.reshape(-1, 1, *images.shape[-2:])
    flat = F.conv2d(flat, taps.reshape(1, 1, -1, 1), padding=(radius, 0))
    flat = F.conv2d(flat, taps.reshape(1, 1, 1, -1), padding=(0, radius))
    return flat.reshape(images.shape)
