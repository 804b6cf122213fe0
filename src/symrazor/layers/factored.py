r"""Define factored paths with anchors, and factored paths between maps of a regular representation.

Both factors of the sparse path S-FC come from a few anchors. A factor $u \Phi$ is computed before
use, or the basis is applied to the data, whichever takes fewer operations (ELLA Eq. 7). In the
weight-sharing format the anchor values receive the inputs of a dense factor, or send its
cotangents, projected by the basis.

On a group, positions and elements are treated in the same way (ELLA App. A),

$$ h[n, d, c] = \sum_{g, s} \theta_2[d, c, g, s]\, x[n, g, c, s], \qquad
   y[n, g, d, o] = \sum_c \theta_1[g, o, d, c]\, h[n, d, c] , $$

between maps of C and D fields, with DC|G|(S + S') weights. `FFC` on C|G| and D|G| channels has |G|
times as many. The sparse version has anchors in position with separate values per element,

$$ \theta_2[d, c, g, s] = \sum_p u[d, c, g, p]\, \Phi[p, s], \qquad
   \theta_1[g, o, d, c] = \sum_p \Phi'[p, o]\, u'[g, p, d, c] . $$

All are equivariant to nothing.
"""

import math
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.groups import Group
from symrazor.layers.basis import Basis, fit_values, make_basis, value_deviation
from symrazor.layers.fully_connected import (
    FFC,
    BlockLinear,
    BlockProduct,
    FactoredPath,
    PixelBias,
    block_product,
    is_wide,
    with_one_use,
)
from symrazor.layers.point_group import point_group

P = TypeVar("P", bound=FactoredPath)


def _multiply_last(x: Float[Tensor, "a b p"], M: Float[Tensor, "p q"]) -> Float[Tensor, "a b q"]:
    """Multiply the last axis by M with one matrix product, for any memory layout of x."""
    y: Tensor = (x.flatten(0, 1) @ M).unflatten(0, x.shape[:2])
    return y


def basis_first(data: int, features: int, anchors: int, positions: int) -> bool:
    r"""Return whether $u (\Phi x)$ takes fewer multiply-adds than $(u \Phi) x$, per block.

    They take $nP(S + f)$ and $fS(P + n)$, and about twice as many in the backward pass.
    """
    if isinstance(data, torch.SymInt):
        return False  # an export for any batch size needs one fixed order
    return data * anchors * (positions + features) < features * positions * (anchors + data)


class SparseBlocks(BlockProduct):
    r"""Multiply by one matrix per block, with $u \Phi$ along its inputs or its outputs.

    $W[k, o, i] = \sum_p u[k, o, p]\, \Phi[p, i]$ for side "in", and
    $W[k, o, i] = \sum_p \Phi[p, o]\, u[k, p, i]$ for side "out". The values u are drawn such that W
    has variance 1 / (number of inputs).
    """

    values: nn.Parameter

    def __init__(
        self, blocks: int, features: int, basis: Basis, side: Literal["in", "out"]
    ) -> None:
        super().__init__()
        self.basis, self.side = basis, side
        with torch.no_grad():
            phi = basis.matrix()
            inputs = phi.shape[1] if side == "in" else features
            bound = math.sqrt(3) * value_deviation(phi, 1 / inputs)
        shape = (features, basis.count) if side == "in" else (basis.count, features)
        self.values = nn.Parameter(torch.empty(blocks, *shape).uniform_(-bound, bound))

    @property
    def features(self) -> int:
        """Channels of a block on the side without anchors."""
        return self.values.shape[1 if self.side == "in" else 2]

    def weight(self) -> Float[Tensor, "k o i"]:
        """Return W."""
        return self._weight(self.basis.matrix())

    def _weight(self, phi: Float[Tensor, "p s"]) -> Float[Tensor, "k o i"]:
        if self.side == "in":
            return _multiply_last(self.values, phi)
        return _multiply_last(self.values.mT, phi).mT

    def forward(self, x: Float[Tensor, "n k i"]) -> Float[Tensor, "n k o"]:
        r"""Multiply each block: $u (\Phi x)$ or $(u \Phi) x$, whichever is cheaper."""
        phi = self.basis.matrix()
        if not basis_first(x.shape[0], self.features, *phi.shape):
            wide = self.side == "out" and is_wide(self.features, phi.shape[1])
            return block_product(x, self._weight(phi), wide)
        if self.side == "in":
            return block_product(_multiply_last(x, phi.T), self.values)
        return _multiply_last(block_product(x, self.values), phi)

    def extra_repr(self) -> str:
        """Return the sizes."""
        shape = "values {} x {} x {}".format(*self.values.shape)
        return f"{shape}, anchors along its {self.side}puts"


@sharing.register
def _sparse_blocks(module: SparseBlocks) -> Sharing:
    def projected(x: Float[Tensor, "n k f"]) -> Float[Tensor, "n 1 k p"]:
        return with_one_use(x @ module.basis.matrix().T)

    return Sharing(
        weight="values",
        bias=None,
        inputs=projected if module.side == "in" else with_one_use,
        outputs=with_one_use if module.side == "in" else projected,
        to_blocks=torch.clone,
        from_blocks=torch.clone,
        shaping=tuple(f"basis.{name}" for name in module.basis.shaping),
    )


def _anchors_per_side(anchors: Any) -> tuple[Any, Any]:
    if not isinstance(anchors, tuple):
        return anchors, anchors
    if len(anchors) != 2:
        raise ValueError(f"anchors must be one value or a pair (input, output), got {anchors}.")
    return anchors


@torch.no_grad()
def _with_dense_factors(sparse: FactoredPath, dense_class: type[P], **options: Any) -> P:
    """Return the map of a sparse path as a path of a class with dense factors."""
    in_channels, in_shape, out_channels, out_shape = sparse.spaces
    options |= {"out_shape": out_shape, "bias": sparse.has_bias}
    dense = dense_class(in_channels, out_channels, in_shape, **options).to(sparse.first.factor)
    for factor, blocks in ((dense.first, sparse.first), (dense.second, sparse.second)):
        assert isinstance(blocks, SparseBlocks)
        factor.factor.copy_(blocks.weight())
    dense.offset.load_state_dict(sparse.offset.state_dict())
    return dense


class SFC(FactoredPath):
    """Sparse fully connected layer (S-FC, ELLA Eq. 7): `FFC` with anchors, DC(P + P') parameters.

    The first five arguments are those of `Path`.

    Args:
        anchors: their number, or as a float their fraction of the pixels, or a `Basis`; or a pair
            of these for input and output.
        bias: add one bias per output pixel.
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    first: SparseBlocks
    second: SparseBlocks

    def _build(self, *, anchors: Any = 0.5, bias: bool = False, **basis: Any) -> None:
        before, after = _anchors_per_side(anchors)
        in_basis = make_basis(self.in_shape, before, **basis)
        out_basis = make_basis(self.out_shape, after, **basis)
        self.first = SparseBlocks(self.in_channels, self.out_channels, in_basis, "in")
        self.second = SparseBlocks(self.out_channels, self.in_channels, out_basis, "out")
        self.offset = PixelBias(self.pixels_out) if bias else nn.Identity()

    @classmethod
    @torch.no_grad()
    def from_ffc(cls, ffc: FFC, anchors: Any = 0.5, **basis: Any) -> "SFC":
        """Return the sparse path whose factors are nearest to those of an `FFC`."""
        if not isinstance(ffc, FFC):
            raise ValueError(f"ffc must be an FFC, got {type(ffc).__name__}.")
        in_channels, in_shape, out_channels, out_shape = ffc.spaces
        options = {"out_shape": out_shape, "anchors": anchors, "bias": ffc.has_bias, **basis}
        path = cls(in_channels, out_channels, in_shape, **options).to(ffc.first.weight)
        first, second = path.first.basis.matrix(), path.second.basis.matrix()
        path.first.values.copy_(fit_values(first, ffc.first.weight))
        path.second.values.copy_(fit_values(second, ffc.second.weight.mT).mT)
        path.offset.load_state_dict(ffc.offset.state_dict())
        return path

    def dense(self) -> FFC:
        """Return the same map as an `FFC` with dense factors."""
        return _with_dense_factors(self, FFC)

    def reduce(self, anchors: float | tuple[float, float]) -> "SFC":
        """Return the nearest map with another number of anchors, spread evenly."""
        before, after = _anchors_per_side(anchors)
        in_basis = make_basis(self.in_shape, before, **self.first.basis.options)
        out_basis = make_basis(self.out_shape, after, **self.second.basis.options)
        return SFC.from_ffc(self.dense(), (in_basis, out_basis))

    @torch.no_grad()
    def resample(self, ratio: float) -> "SFC":
        """Return the same functions of position on maps whose sides are `ratio` times as long.

        Anchors are multiplied by the ratio r and omega by 1/r. The first factor is divided by the
        ratio of the areas, so that sums over pixels are preserved.

        Raises:
            ValueError: the new sizes are not integers, or the path has pixel biases, which have no
                meaning at another resolution.
        """
        if self.has_bias:
            raise ValueError("A path with pixel biases cannot be resampled.")
        channels, shape, out_channels, out_shape = self.spaces
        if any(size * ratio < 1 or size * ratio % 1 for size in (*shape, *out_shape)):
            raise ValueError(
                f"ratio must map {shape} and {out_shape} to integer sizes, got {ratio}."
            )
        before, after = (tuple(int(size * ratio) for size in s) for s in (shape, out_shape))
        bases = self.first.basis.stretched(before, ratio), self.second.basis.stretched(after, ratio)
        path = SFC(channels, out_channels, before, out_shape=after, anchors=bases)
        path.to(self.first.values)
        path.first.values.copy_(self.first.values / ratio ** len(before))
        path.second.values.copy_(self.second.values)
        return path


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
        self._group_options = {"group": group, "lift": lift}
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
        in_basis = make_basis(self.in_shape, anchors, **basis)
        out_basis = make_basis(self.out_shape, anchors, **basis)
        c, d = self.fields
        self.first = SparseBlocks(c, d, ElementBasis(self.in_elements, in_basis), "in")
        self.second = SparseBlocks(d, c, ElementBasis(self.out_elements, out_basis), "out")

    def dense(self) -> GFFC:
        """Return the same map as a `GFFC` with dense factors."""
        return _with_dense_factors(self, GFFC, **self._group_options)
