r"""A read-out that no element of a group changes: fields in, ordinary channels out.

$$ y[o](t) = b[o] + \sum_c W[o, c]\, \frac1{|G|} \sum_g x[g, c](t) $$

is the only linear map of one pixel from a regular representation to images that commutes with the
group: what a dense head must be if the answer is not to depend on orientation.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.groups import Group
from symrazor.layers.filtered import CONVOLUTIONS, AnyConv
from symrazor.layers.gconv import GroupPool
from symrazor.layers.path import Map, Path
from symrazor.layers.point_group import point_group


class GReadout(Path):
    """The mean over the elements of a group, then a convolution of one pixel.

    Beside a `Conv` with a kernel of one pixel it says whether the answer needs the orientation.

    Args:
        in_channels: fields times |G|.
        out_channels: of the images that come out.
        in_shape: spatial shape.
        group: as for `GConv`.
    """

    conv: AnyConv

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        group: str | Group = "p4",
    ) -> None:
        """Draw the weights."""
        super().__init__(in_channels, out_channels, in_shape)
        self.point_group = point_group(group)
        self.point_group.check_map(self.in_shape)
        self.group, order = self.point_group.name, self.point_group.order
        self.strict = self.point_group.exact
        if in_channels % order:
            raise ValueError(
                f"expected a number of channels in that the {order} elements of {self.group} "
                f"divide, got {in_channels}"
            )
        self.pool = GroupPool(order, "mean")
        self.conv = CONVOLUTIONS[len(self.in_shape)](in_channels // order, out_channels, 1)
        with torch.no_grad():
            assert self.conv.bias is not None
            self.conv.bias.zero_()

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Average, then mix the fields."""
        self.check(x)
        y: Tensor = self.conv(self.pool(x))
        return y

    @property
    def affine(self) -> bool:
        """True."""
        return True

    def transformations(self) -> list[tuple[Map, Map]]:
        """What each element but the identity does to inputs and to outputs."""
        act = self.point_group.act
        return [
            (partial(act, g), partial(act, g, regular=False))
            for g in range(1, self.point_group.order)
        ]

    def keeps(self, other: Path) -> bool:
        """Whether its group, which has all translations, contains that of another path."""
        if not isinstance(other, GReadout):
            return other.group in ("translation", self.group)
        return self.point_group.keeps(other.point_group)
