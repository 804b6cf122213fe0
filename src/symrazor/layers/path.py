"""What all paths share: the spaces they map between, and the group they are equivariant to."""

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

Shape = tuple[int, ...]


def halve(shape: Sequence[int], stride: int) -> Shape:
    """Spatial shape after subsampling.

    Raises:
        ValueError: a stride that does not divide the shape.
    """
    if stride < 1 or any(size % stride for size in shape):
        raise ValueError(f"expected a stride that divides the shape {tuple(shape)}, got {stride}")
    return tuple(size // stride for size in shape)


class Path(nn.Module):
    """A linear map from images [n, c, *in_shape] to images [n, d, *out_shape].

    A relaxed layer is a sum of paths between the same spaces (`Relaxed`). Every parameter of a path
    belongs to the prior of that path, biases included: a bias that breaks a symmetry must be
    counted where the symmetry is allowed to break.

    Args:
        in_channels: c.
        out_channels: d.
        in_shape: spatial shape of the input, in 1, 2 or 3 dimensions.
        stride: subsampling, the same in every dimension.

    Attributes:
        group: name of the group the path is equivariant to, or None.
    """

    group: str | None = None

    def __init__(
        self, in_channels: int, out_channels: int, in_shape: Sequence[int], stride: int = 1
    ) -> None:
        """Check and keep the shapes."""
        super().__init__()
        if in_channels < 1 or out_channels < 1:
            raise ValueError(
                f"expected at least 1 channel in and out, got {in_channels} and {out_channels}"
            )
        if not 1 <= len(in_shape) <= 3 or min(in_shape, default=0) < 1:
            raise ValueError(f"expected a shape of 1 to 3 positive sizes, got {tuple(in_shape)}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.in_shape: Shape = tuple(in_shape)
        self.out_shape = halve(in_shape, stride)
        self.stride = stride

    @property
    def pixels_in(self) -> int:
        """Number of input positions."""
        return prod(self.in_shape)

    @property
    def pixels_out(self) -> int:
        """Number of output positions."""
        return prod(self.out_shape)

    def check(self, x: Tensor) -> None:
        """Raise ValueError unless x is [n, in_channels, *in_shape]."""
        expected = (self.in_channels, *self.in_shape)
        if tuple(x.shape[1:]) != expected:
            raise ValueError(f"expected input [n, {str(list(expected))[1:]}, got {list(x.shape)}")

    def extra_repr(self) -> str:
        """Spaces and group, for `print(model)`."""
        return (
            f"{self.in_channels} x {self.in_shape} -> {self.out_channels} x {self.out_shape}, "
            f"group={self.group}"
        )
