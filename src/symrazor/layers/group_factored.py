r"""F-GFC: the factored path on a group (ELLA App. A), positions and elements alike.

$$ h[n, d, c] = \sum_{g, s} \theta_2[d, c, g, s]\, x[n, g, c, s], \qquad
   y[n, g, d, o] = \sum_c \theta_1[g, o, d, c]\, h[n, d, c] $$

between maps of a regular representation with C and D fields: DC|G|(S + S') weights, where `FFC` on
C|G| and D|G| channels has |G| times as many. It is equivariant to nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.groups import Group
from symrazor.layers.basis import Basis, anchor_count, basis_of, prior_groups
from symrazor.layers.fully_connected import BlockLinear, Factored, PixelBias
from symrazor.layers.point_group import point_group
from symrazor.layers.sparse_factored import SparseBlocks


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


class ElementBasis(Basis):
    r"""A basis for every element of a group: $1 \otimes \Phi$, on (element, place)."""

    def __init__(self, elements: int, basis: Basis) -> None:
        """Copy a basis of places."""
        super().__init__(basis.shape, basis.anchors.detach(), **basis.options)
        self.elements = elements

    @property
    def count(self) -> int:
        """Number of anchors, those of all elements."""
        return self.elements * len(self.start)

    def matrix(self) -> Float[Tensor, "p s"]:
        """Blocks of Phi, differentiable in whatever is learned."""
        phi = super().matrix().contiguous()
        return torch.kron(torch.eye(self.elements, dtype=phi.dtype, device=phi.device), phi)


class SGFFC(GFFC):
    """`GFFC` with both factors from anchors.

    The arguments are those of `GFFC`, and:

    Args:
        anchors: how many on each side, or as a float which fraction of the pixels.
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    first: SparseBlocks  # type: ignore[assignment]
    second: SparseBlocks  # type: ignore[assignment]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        group: str | Group = "p4",
        lift: bool = False,
        anchors: float = 0.5,
        bias: bool = False,
        out_shape: Sequence[int] | None = None,
        **basis: Any,
    ) -> None:
        """Place the anchors of both factors and draw their values."""
        shapes = in_channels, out_channels, in_shape, stride
        super().__init__(*shapes, group=group, lift=lift, bias=bias, out_shape=out_shape)
        fields = in_channels // self.before, out_channels // self.after
        self.point_group_of = group
        counts = (anchor_count(anchors, n) for n in (self.pixels_in, self.pixels_out))
        seen, made = (
            basis_of(shape, count, **basis)
            for shape, count in zip((self.in_shape, self.out_shape), counts, strict=True)
        )
        self.first = SparseBlocks(fields[0], fields[1], ElementBasis(self.before, seen), "in")
        self.second = SparseBlocks(fields[1], fields[0], ElementBasis(self.after, made), "out")

    @torch.no_grad()
    def dense(self) -> GFFC:
        """The same map as `GFFC`, with both factors written out."""
        c, shape, d, out_shape = self.spaces
        lift, bias = self.before < self.after, any(True for _ in self.offset.parameters())
        group = self.point_group_of
        path = GFFC(c, d, shape, group=group, lift=lift, bias=bias, out_shape=out_shape)
        path.to(self.first.values)
        path.first.weight.copy_(self.first.weight())
        path.second.weight.copy_(self.second.weight())
        path.offset.load_state_dict(self.offset.state_dict())
        return path

    def prior_groups(self) -> dict[str, list[str]]:
        """Anchor values, lengthscales, places of the anchors."""
        return prior_groups(self)
