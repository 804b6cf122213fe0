r"""S-GFC: the factored path on a group, `GFFC`, with both factors from a few anchors.

$$ \theta_2[d, c, g, s] = \sum_p u[d, c, g, p]\, \Phi[p, s], \qquad
   \theta_1[g, o, d, c] = \sum_p \Phi'[p, o]\, u'[g, p, d, c] $$

Every element has the anchors of the others, and values of its own: DC|G|(P + P') weights. It is
equivariant to nothing, and smooth in position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.groups import Group
from symrazor.layers.basis import Basis, anchor_count, basis_of, prior_groups
from symrazor.layers.group_factored import GFFC
from symrazor.layers.sparse_factored import SparseBlocks


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
