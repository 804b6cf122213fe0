r"""Define factored paths between maps of a regular representation (ELLA App. A).

Positions and group elements are treated alike,

$$ h[n, d, c] = \sum_{g, s} \theta_2[d, c, g, s]\, x[n, g, c, s], \qquad
   y[n, g, d, o] = \sum_c \theta_1[g, o, d, c]\, h[n, d, c] , $$

between maps of C and D fields, with DC|G|(S + S') weights. `FFC` on C|G| and D|G| channels has |G|
times as many. The sparse version has anchors in position with separate values per element,

$$ \theta_2[d, c, g, s] = \sum_p u[d, c, g, p]\, \Phi[p, s], \qquad
   \theta_1[g, o, d, c] = \sum_p \Phi'[p, o]\, u'[g, p, d, c] . $$

Both are equivariant to nothing.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.groups import Group
from symrazor.layers.basis import Basis, anchor_count, basis_prior_groups, make_basis
from symrazor.layers.fully_connected import BlockLinear, FactoredPath, PixelBias
from symrazor.layers.point_group import point_group
from symrazor.layers.sparse_factored import SparseBlocks, copy_dense_factors_


class GFFC(FactoredPath):
    """Factored fully connected layer on a group (F-GFC, ELLA App. A).

    The first five arguments are those of `Path`, with channels counted as in the map.

    Args:
        group: as for `GConv`.
        lift: whether the input is an image.
        bias: add one bias per output element and pixel.
    """

    first: BlockLinear
    second: BlockLinear

    def _build(self, *, group: str | Group = "p4", lift: bool = False, bias: bool = False) -> None:
        elements = point_group(group)
        if elements.dims != len(self.in_shape):
            raise ValueError(
                f"{elements.name} acts on maps in {elements.dims} dimensions, got {self.in_shape}."
            )
        order = elements.order
        self.in_elements, self.out_elements = 1 if lift else order, order
        if self.in_channels % self.in_elements or self.out_channels % order:
            raise ValueError(
                f"The {order} elements of {group} must divide the number of channels, got "
                f"{self.in_channels} in and {self.out_channels} out."
            )
        c, d = self.fields
        positions = self.in_elements * self.pixels_in, order * self.pixels_out
        self.first = BlockLinear(c, positions[0], d)
        self.second = BlockLinear(d, c, positions[1], last=True)
        self.offset = PixelBias(positions[1]) if bias else nn.Identity()

    @property
    def fields(self) -> tuple[int, int]:
        """Number of input and output fields."""
        return self.in_channels // self.in_elements, self.out_channels // self.out_elements

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Apply both products over elements and positions, and add the bias."""
        self.check(x)
        fields = x.flatten(2).unflatten(1, (self.in_elements, -1)).transpose(1, 2).flatten(2)
        y: Tensor = self.offset(self.second(self.first(fields).transpose(1, 2)))
        y = y.unflatten(2, (self.out_elements, -1)).transpose(1, 2).flatten(1, 2)
        image: Tensor = y.contiguous().unflatten(2, self.out_shape)
        return image


class ElementBasis(Basis):
    r"""A copy of a basis for every group element: $1 \otimes \Phi$, on (element, position)."""

    def __init__(self, elements: int, basis: Basis) -> None:
        super().__init__(basis.shape, basis.anchors.detach(), **basis.options)
        self.elements = elements

    @property
    def count(self) -> int:
        """Number of anchors of all elements together."""
        return self.elements * len(self.start)

    def matrix(self) -> Float[Tensor, "p s"]:
        """Return the block-diagonal matrix, differentiable in whatever is learned."""
        phi = super().matrix().contiguous()
        return torch.kron(torch.eye(self.elements, dtype=phi.dtype, device=phi.device), phi)


class SGFFC(GFFC):
    """Sparse factored layer on a group (S-GFC): `GFFC` with DC|G|(P + P') parameters.

    The arguments are those of `GFFC`, and:

    Args:
        anchors: their number on each side, or as a float their fraction of the pixels.
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    first: SparseBlocks  # type: ignore[assignment]
    second: SparseBlocks  # type: ignore[assignment]

    def _build(
        self,
        *,
        group: str | Group = "p4",
        lift: bool = False,
        anchors: float = 0.5,
        bias: bool = False,
        **basis: Any,
    ) -> None:
        super()._build(group=group, lift=lift, bias=bias)
        self._group_option = group
        counts = (anchor_count(anchors, n) for n in (self.pixels_in, self.pixels_out))
        in_basis, out_basis = (
            make_basis(shape, count, **basis)
            for shape, count in zip((self.in_shape, self.out_shape), counts, strict=True)
        )
        c, d = self.fields
        self.first = SparseBlocks(c, d, ElementBasis(self.in_elements, in_basis), "in")
        self.second = SparseBlocks(d, c, ElementBasis(self.out_elements, out_basis), "out")

    @torch.no_grad()
    def dense(self) -> GFFC:
        """Return the same map as a `GFFC` with dense factors."""
        in_channels, in_shape, out_channels, out_shape = self.spaces
        path = GFFC(
            in_channels,
            out_channels,
            in_shape,
            group=self._group_option,
            lift=self.in_elements < self.out_elements,
            bias=self.has_bias,
            out_shape=out_shape,
        ).to(self.first.values)
        copy_dense_factors_(self, path)
        return path

    def prior_groups(self) -> dict[str, list[str]]:
        """Return separate priors for values, lengthscales, and anchor positions."""
        return basis_prior_groups(self)
