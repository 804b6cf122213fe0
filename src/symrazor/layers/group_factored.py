r"""F-GFC: the factored path on a group (ELLA App. A), positions and elements alike.

$$ h[n, d, c] = \sum_{g, s} \theta_2[d, c, g, s]\, x[n, g, c, s], \qquad
   y[n, g, d, o] = \sum_c \theta_1[g, o, d, c]\, h[n, d, c] $$

between maps of a regular representation with C and D fields: DC|G|(S + S') weights, where `FFC` on
C|G| and D|G| channels has |G| times as many. It is equivariant to nothing.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from symrazor.groups import Group
from symrazor.layers.factored import BlockLinear, Factored, PixelBias
from symrazor.layers.point_group import point_group


class GFFC(Factored):
    """The factored path between maps of a regular representation.

    The first four arguments are those of `Path`, channels counted as in the map.

    Args:
        group: as for `GConv`.
        lift: the input is an image.
        bias: one bias per output element and pixel.
        out_shape: spatial shape of the output, in place of a stride.
    """

    first: BlockLinear
    second: BlockLinear

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        group: str | Group = "p4",
        lift: bool = False,
        bias: bool = False,
        out_shape: Sequence[int] | None = None,
    ) -> None:
        """Make both factors."""
        super().__init__(in_channels, out_channels, in_shape, stride, out_shape)
        elements = point_group(group)
        if elements.dims != len(self.in_shape):
            where = f"{elements.dims} dimensions for {elements.name}"
            raise ValueError(f"expected maps in {where}, got {self.in_shape}")
        order = elements.order
        self.before, self.after = 1 if lift else order, order
        if in_channels % self.before or out_channels % order:
            raise ValueError(
                f"expected channels that the {order} elements of {group} divide, got "
                f"{in_channels} in and {out_channels} out"
            )
        fields = in_channels // self.before, out_channels // order
        places = self.before * self.pixels_in, order * self.pixels_out
        self.first = BlockLinear(fields[0], places[0], fields[1])
        self.second = BlockLinear(fields[1], fields[0], places[1], last=True)
        self.offset = PixelBias(places[1]) if bias else nn.Identity()

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Two batched products over elements and positions."""
        self.check(x)
        fields = x.flatten(2).unflatten(1, (self.before, -1)).transpose(1, 2).flatten(2)
        y: Tensor = self.offset(self.second(self.first(fields).transpose(1, 2)))
        y = y.unflatten(2, (self.after, -1)).transpose(1, 2).flatten(1, 2)
        found: Tensor = y.contiguous().unflatten(2, self.out_shape)
        return found
