r"""Define the sparse fully connected layer S-FC: both factors of `FFC` come from a few anchors.

A factor $u \Phi$ is computed before use, or the basis is applied to the data, whichever takes fewer
operations (ELLA Eq. 7). In the weight-sharing format the anchor values receive the inputs of a
dense factor, or send its cotangents, projected by the basis.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.basis import (
    Basis,
    basis_prior_groups,
    fit_values,
    make_basis,
    value_deviation,
)
from symrazor.layers.fully_connected import FFC, FactoredPath, PixelBias, block_product, is_wide
from symrazor.layers.path import Spaces


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


class SparseBlocks(nn.Module):
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
    def factor(self) -> nn.Parameter:
        """u, as a factor of a path."""
        return self.values

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
    def identity(x: Float[Tensor, "n k f"]) -> Float[Tensor, "n 1 k f"]:
        return x.unsqueeze(1)

    def projected(x: Float[Tensor, "n k f"]) -> Float[Tensor, "n 1 k p"]:
        return (x @ module.basis.matrix().T).unsqueeze(1)

    return Sharing(
        weight="values",
        bias=None,
        inputs=projected if module.side == "in" else identity,
        outputs=identity if module.side == "in" else projected,
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
def copy_dense_factors_(sparse: FactoredPath, dense: FactoredPath) -> None:
    """Copy the dense factors and the biases of a sparse path into a dense path of the same form."""
    for name in ("first", "second"):
        blocks = getattr(sparse, name)
        getattr(dense, name).weight.copy_(blocks.weight())
    dense.offset.load_state_dict(sparse.offset.state_dict())


class SFC(FactoredPath):
    """Sparse fully connected layer (S-FC, ELLA Eq. 7): `FFC` with anchors, DC(P + P') parameters.

    The first five arguments are those of `Path`.

    Args:
        anchors: their number, or as a float their fraction of the pixels; or a pair of these for
            input and output.
        bias: add one bias per output pixel.
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    first: SparseBlocks
    second: SparseBlocks

    def _build(
        self, *, anchors: float | tuple[float, float] = 0.5, bias: bool = False, **basis: Any
    ) -> None:
        before, after = _anchors_per_side(anchors)
        in_basis = make_basis(self.in_shape, before, **basis)
        out_basis = make_basis(self.out_shape, after, **basis)
        self._build_on(in_basis, out_basis, bias)

    def _build_on(self, in_basis: Basis, out_basis: Basis, bias: bool) -> None:
        self.first = SparseBlocks(self.in_channels, self.out_channels, in_basis, "in")
        self.second = SparseBlocks(self.out_channels, self.in_channels, out_basis, "out")
        self.offset = PixelBias(self.pixels_out) if bias else nn.Identity()

    @classmethod
    @torch.no_grad()
    def from_ffc(cls, ffc: FFC, anchors: float | tuple[float, float] = 0.5, **basis: Any) -> "SFC":
        """Return the sparse path whose factors are nearest to those of an `FFC`."""
        if not isinstance(ffc, FFC):
            raise ValueError(f"ffc must be an FFC, got {type(ffc).__name__}.")
        before, after = _anchors_per_side(anchors)
        in_basis = make_basis(ffc.in_shape, before, **basis)
        out_basis = make_basis(ffc.out_shape, after, **basis)
        return cls._fitted(ffc, in_basis, out_basis)

    @classmethod
    def _fitted(cls, ffc: FFC, in_basis: Basis, out_basis: Basis) -> "SFC":
        path = cls._on_bases(ffc.spaces, in_basis, out_basis, ffc.has_bias)
        path.to(ffc.first.weight)
        first, second = path.first.basis.matrix(), path.second.basis.matrix()
        path.first.values.copy_(fit_values(first, ffc.first.weight))
        path.second.values.copy_(fit_values(second, ffc.second.weight.mT).mT)
        path.offset.load_state_dict(ffc.offset.state_dict())
        return path

    @classmethod
    def _on_bases(cls, spaces: Spaces, in_basis: Basis, out_basis: Basis, bias: bool) -> "SFC":
        path = cls.__new__(cls)
        in_channels, in_shape, out_channels, out_shape = spaces
        path._set_spaces(in_channels, out_channels, in_shape, out_shape=out_shape)
        path._build_on(in_basis, out_basis, bias)
        return path

    @torch.no_grad()
    def dense(self) -> FFC:
        """Return the same map as an `FFC` with dense factors."""
        channels, shape, out_channels, out_shape = self.spaces
        path = FFC(channels, out_channels, shape, bias=self.has_bias, out_shape=out_shape)
        path.to(self.first.values)
        copy_dense_factors_(self, path)
        return path

    @torch.no_grad()
    def reduce(self, anchors: float | tuple[float, float]) -> "SFC":
        """Return the nearest map with another number of anchors, spread evenly."""
        before, after = _anchors_per_side(anchors)
        in_basis = make_basis(self.in_shape, before, **self.first.basis.options)
        out_basis = make_basis(self.out_shape, after, **self.second.basis.options)
        return SFC._fitted(self.dense(), in_basis, out_basis)

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
        path = SFC._on_bases((channels, before, out_channels, after), *bases, bias=False)
        path.to(self.first.values)
        path.first.values.copy_(self.first.values / ratio ** len(before))
        path.second.values.copy_(self.second.values)
        return path

    def prior_groups(self) -> dict[str, list[str]]:
        """Return separate priors for values, lengthscales and pixel biases, and positions."""
        return basis_prior_groups(self)
