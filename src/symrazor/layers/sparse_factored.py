r"""S-FC: the two factors of `FFC` from a few anchors each (ELLA Eq. 7).

A factor is written out before use, or the basis is applied to the data, whichever is less work.
In the weight-sharing format the anchor values see the inputs, or send the cotangents, of a dense
factor, projected by the basis.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.layers.basis import Basis, basis_of, deviation, nearest, prior_groups
from symrazor.layers.fully_connected import FFC, Factored, PixelBias, block_product, is_wide
from symrazor.layers.path import Path, Spaces


def _times(x: Float[Tensor, "a b p"], M: Float[Tensor, "p q"]) -> Float[Tensor, "a b q"]:
    """The last axis times M, as one product of two matrices whatever the layout of x."""
    y: Tensor = (x.flatten(0, 1) @ M).unflatten(0, x.shape[:2])
    return y


def basis_first(data: int, features: int, anchors: int, places: int) -> bool:
    r"""Whether $u (\Phi x)$ takes fewer multiply-adds than $(u \Phi) x$, in one block of features.

    They take $nP(S + f)$ and $fS(P + n)$, and about twice as many in the backward pass.
    """
    if isinstance(data, torch.SymInt):
        return False  # an export for any number of data has one order
    return data * anchors * (places + features) < features * places * (anchors + data)


class SparseBlocks(nn.Module):
    r"""`BlockLinear` whose W is $u \Phi$ along its inputs or its outputs.

    $W[k, o, i] = \sum_p u[k, o, p]\, \Phi[p, i]$ for side "in", and
    $W[k, o, i] = \sum_p \Phi[p, o]\, u[k, p, i]$ for side "out".
    """

    values: nn.Parameter

    def __init__(
        self, blocks: int, features: int, basis: Basis, side: Literal["in", "out"]
    ) -> None:
        """Draw u so that W has variance 1 / (number of inputs)."""
        super().__init__()
        self.basis, self.side = basis, side
        with torch.no_grad():
            phi = basis.matrix()
            inputs = phi.shape[1] if side == "in" else features
            bound = math.sqrt(3) * deviation(phi, 1 / inputs)
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
        """W."""
        return self._written(self.basis.matrix())

    def _written(self, phi: Float[Tensor, "p s"]) -> Float[Tensor, "k o i"]:
        return _times(self.values, phi) if self.side == "in" else _times(self.values.mT, phi).mT

    def forward(self, x: Float[Tensor, "n k i"]) -> Float[Tensor, "n k o"]:
        r"""Multiply each block: $u (\Phi x)$ or $(u \Phi) x$, whichever is less work."""
        phi = self.basis.matrix()
        if not basis_first(x.shape[0], self.features, *phi.shape):
            wide = self.side == "out" and is_wide(self.features, phi.shape[1])
            return block_product(x, self._written(phi), wide)
        if self.side == "in":
            return block_product(_times(x, phi.T), self.values)
        return _times(block_product(x, self.values), phi)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        shape = "values {} x {} x {}".format(*self.values.shape)
        return f"{shape}, anchors along its {self.side}puts"


@sharing.register
def _sparse_blocks(module: SparseBlocks) -> Sharing:
    def whole(x: Float[Tensor, "n k f"]) -> Float[Tensor, "n 1 k f"]:
        return x.unsqueeze(1)

    def projected(x: Float[Tensor, "n k f"]) -> Float[Tensor, "n 1 k p"]:
        return (x @ module.basis.matrix().T).unsqueeze(1)

    return Sharing(
        weight="values",
        bias=None,
        inputs=projected if module.side == "in" else whole,
        outputs=whole if module.side == "in" else projected,
        to_blocks=torch.clone,
        from_blocks=torch.clone,
        shaping=tuple(f"basis.{name}" for name in module.basis.shaping),
    )


def _both(anchors: Any) -> tuple[Any, Any]:
    """The anchors of each side, of a pair or of what is the same for both."""
    if not isinstance(anchors, tuple):
        return anchors, anchors
    if len(anchors) != 2:
        raise ValueError(f"expected anchors for both sides, (before, after), got {anchors}")
    return anchors


class SFC(Factored):
    """S-FC: `FFC` with both factors from anchors, DC(P + P') parameters.

    The first four arguments are those of `Path`.

    Args:
        anchors: fraction of the pixels, or how many on each side.
        bias: one bias per output pixel.
        out_shape: spatial shape of the output, in place of a stride.
        **basis: options of `symrazor.layers.basis.Basis`: omega, form, learn_omega, learn_anchors.
    """

    first: SparseBlocks
    second: SparseBlocks

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: Sequence[int],
        stride: int = 1,
        *,
        anchors: float | tuple[float, float] = 0.5,
        bias: bool = False,
        out_shape: Sequence[int] | None = None,
        **basis: Any,
    ) -> None:
        """Place the anchors of both factors and draw their values."""
        super().__init__(in_channels, out_channels, in_shape, stride, out_shape)
        before, after = _both(anchors)
        seen = basis_of(self.in_shape, before, **basis)
        made = basis_of(self.out_shape, after, **basis)
        self._assemble(seen, made, bias)

    def _assemble(self, seen: Basis, made: Basis, bias: bool) -> None:
        self.first = SparseBlocks(self.in_channels, self.out_channels, seen, "in")
        self.second = SparseBlocks(self.out_channels, self.in_channels, made, "out")
        self.offset = PixelBias(self.pixels_out) if bias else nn.Identity()

    @classmethod
    @torch.no_grad()
    def from_ffc(cls, ffc: FFC, anchors: float | tuple[float, float] = 0.5, **basis: Any) -> "SFC":
        """Anchors fitted to both dense factors by least squares."""
        if not isinstance(ffc, FFC):
            raise ValueError(f"expected an FFC, got {type(ffc).__name__}")
        before, after = _both(anchors)
        seen = basis_of(ffc.in_shape, before, **basis)
        made = basis_of(ffc.out_shape, after, **basis)
        return cls._fitted(ffc, seen, made)

    @classmethod
    def _fitted(cls, ffc: FFC, seen: Basis, made: Basis) -> "SFC":
        path = cls._of(ffc.spaces, seen, made, isinstance(ffc.offset, PixelBias))
        path.to(ffc.first.weight)
        path.first.values.copy_(nearest(path.first.basis.matrix(), ffc.first.weight))
        path.second.values.copy_(nearest(path.second.basis.matrix(), ffc.second.weight.mT).mT)
        path.offset.load_state_dict(ffc.offset.state_dict())
        return path

    @classmethod
    def _of(cls, spaces: Spaces, seen: Basis, made: Basis, bias: bool) -> "SFC":
        """A path on given bases."""
        path = cls.__new__(cls)
        channels, shape, out_channels, out_shape = spaces
        Path.__init__(path, channels, out_channels, shape, out_shape=out_shape)
        path._assemble(seen, made, bias)
        return path

    @torch.no_grad()
    def dense(self) -> FFC:
        """The same map as `FFC`, with both factors written out."""
        channels, shape, out_channels, out_shape = self.spaces
        bias = isinstance(self.offset, PixelBias)
        path = FFC(channels, out_channels, shape, bias=bias, out_shape=out_shape)
        path.to(self.first.values)
        path.first.weight.copy_(self.first.weight())
        path.second.weight.copy_(self.second.weight())
        path.offset.load_state_dict(self.offset.state_dict())
        return path

    @torch.no_grad()
    def reduce(self, anchors: float | tuple[float, float]) -> "SFC":
        """The nearest map with another number of anchors, spread anew."""
        before, after = _both(anchors)
        seen = basis_of(self.in_shape, before, **self.first.basis.options)
        made = basis_of(self.out_shape, after, **self.second.basis.options)
        return SFC._fitted(self.dense(), seen, made)

    @torch.no_grad()
    def resample(self, ratio: float) -> "SFC":
        """The same functions of place on maps whose sides are `ratio` times as long.

        Anchors are stretched by the ratio r and omega by 1/r; the first factor is divided by the
        ratio of the areas, so that sums over pixels stay what they were.

        Raises:
            ValueError: a ratio that does not give whole sizes, or a pixel bias, which has no
                meaning at another resolution.
        """
        if not isinstance(self.offset, nn.Identity):
            raise ValueError("expected a path without pixel biases, got one with them")
        channels, shape, out_channels, out_shape = self.spaces
        if any(size * ratio < 1 or size * ratio % 1 for size in (*shape, *out_shape)):
            raise ValueError(
                f"expected a ratio that maps {shape} and {out_shape} to whole sizes, got {ratio}"
            )
        before, after = (tuple(int(size * ratio) for size in s) for s in (shape, out_shape))
        bases = self.first.basis.stretched(before, ratio), self.second.basis.stretched(after, ratio)
        path = SFC._of((channels, before, out_channels, after), *bases, bias=False)
        path.to(self.first.values)
        path.first.values.copy_(self.first.values / ratio ** len(before))
        path.second.values.copy_(self.second.values)
        return path

    def prior_groups(self) -> dict[str, list[str]]:
        """Anchor values, lengthscales (with the pixel biases), places of the anchors."""
        return prior_groups(self)
