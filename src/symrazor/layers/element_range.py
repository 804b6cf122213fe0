r"""Limit a map of a regular representation to a learned range of rotations.

A network of group convolutions is equivariant to all rotations of its group, and cannot tell a six
from a rotated nine. With `ElementRange` after a layer, only the elements within a range v
of the identity pass, and the later layers are equivariant to rotations up to about v. A rotation by
$\theta$ in $(-\pi, \pi]$ is weighted by

$$ w_\theta(v) = \min(1, \max(0,\; 1 + (v - |\theta|) / s)) $$

with the angle s between neighbouring elements: elements up to v pass, and v = 0 leaves the identity
only, an ordinary convolution. The range of each layer is a hyperparameter, learned by the evidence.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, interval
from symrazor.groups import Group
from symrazor.layers.path import is_real
from symrazor.layers.point_group import point_group


class ElementRange(nn.Module):
    """Weight the elements of a group of rotations by a learned range around the identity.

    Args:
        group: rotations of the plane, "p4", "C8" and so on, or such a `Group`.
        degrees: starting value of the range, between 0 and 180.

    Raises:
        ValueError: a group with reflections or in three dimensions, or a range that is too large.
    """

    angles: Tensor

    def __init__(self, group: str | Group, degrees: float = 90.0) -> None:
        super().__init__()
        elements = point_group(group)
        matrices = elements.matrices
        if elements.dims != 2 or bool((torch.linalg.det(matrices) < 0).any()):
            raise ValueError(
                f"ElementRange needs rotations of the plane, got the group {elements.name}."
            )
        if not is_real(degrees) or not 0 < degrees < 180:
            raise ValueError(f"degrees must be between 0 and 180, got {degrees!r}.")
        self.name = elements.name
        angles = torch.atan2(matrices[:, 1, 0], matrices[:, 0, 0]).abs()
        self.register_buffer("angles", angles, persistent=False)
        self.range = Hyper(math.radians(degrees), interval(0.0, math.pi))

    @property
    def degrees(self) -> float:
        """The range in degrees to either side."""
        return math.degrees(float(self.range.value.detach()))

    def weights(self) -> Float[Tensor, " g"]:
        """Return the weight of every element, differentiable in the range."""
        step = 2 * math.pi / len(self.angles)
        range_ = self.range.value
        weights: Tensor = (1 + (range_ - self.angles.to(range_)) / step).clamp(0, 1)
        return weights

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n c *size"]:
        """Return the map with weighted elements."""
        fields = x.unflatten(1, (len(self.angles), -1))
        weights = self.weights().to(x).view(-1, *(1,) * (fields.dim() - 2))
        y: Tensor = (fields * weights).flatten(1, 2)
        return y

    def extra_repr(self) -> str:
        """Return the group and the range."""
        return f"{self.name}, {self.degrees:.0f} degrees"
