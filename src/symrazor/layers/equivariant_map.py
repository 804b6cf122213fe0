r"""Linear maps that commute with a group, as modules in the weight-sharing format.

In it the coefficients u of $W[o, i, t, s] = \sum_b u[o, i, b]\, Q_b[t, s]$ are shared by the places
t of the output, and see $a[n, t, (i, b)] = \sum_s Q_b[t, s]\, x[n, i, s]$. There are few of them as
a rule, and then their curvature is exact.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.weight_sharing import Sharing, sharing
from symrazor.groups.maps import MapBasis

EXACT = 512
"""Up to so many coefficients a layer's curvature block is exact, not a Kronecker product."""


class _OnBasis(nn.Module):
    """Tensors of a basis beside parameters: rounded anew from float64 whenever the module moves."""

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, Tensor] = {}

    def keep(self, name: str, value: Tensor) -> None:
        """A buffer that is no part of the state."""
        self._exact[name] = value
        self.register_buffer(name, value.to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_OnBasis":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in self._exact.items():
            setattr(self, name, value.to(getattr(self, name)))
        return self


class EquivariantMap(_OnBasis):
    r"""$y[n, o, t] = \sum_{i, b, s} u[o, i, b]\, Q_b[t, s]\, x[n, i, s]$."""

    weight: nn.Parameter
    basis: Tensor
    scales: Tensor
    labels: Tensor

    def __init__(self, in_channels: int, out_channels: int, maps: MapBasis) -> None:
        """Draw u so that the output has the variance of He's initialisation."""
        super().__init__()
        bound = math.sqrt(6 / max(1, in_channels * maps.count))
        values = torch.empty(out_channels, in_channels, maps.count).uniform_(-bound, bound)
        self.weight = nn.Parameter(values)
        (self.t, self.s), self.count = maps.shape, maps.count
        self.inputs, self.outputs = in_channels, out_channels
        self.maps_first = maps.count * (self.s + out_channels) < self.s * out_channels
        self.labelled = maps.labels is not None
        if maps.labels is not None and maps.scales is not None:
            self.keep("scales", maps.scales)
            self.register_buffer("labels", maps.labels, persistent=False)
        if self.maps_first or not self.labelled:
            self.keep("basis", maps.matrices())

    def mapped(self, x: Float[Tensor, "n i s"]) -> Float[Tensor, "n i b t"]:
        """Every basis map of every channel."""
        if self.maps_first or not self.labelled:
            every: Tensor = F.linear(x, self.basis.flatten(0, 1)).unflatten(2, (self.count, self.t))
            return every
        spread = x.unsqueeze(2).expand(-1, -1, self.t, -1)
        where = self.labels.expand(*x.shape[:2], -1, -1)
        sums = x.new_zeros(*x.shape[:2], self.t, self.count).scatter_add(3, where, spread)
        return (sums * self.scales).transpose(2, 3)

    def written(self) -> Float[Tensor, "ot is"]:
        """The whole matrix."""
        if self.labelled:
            W = (self.weight * self.scales)[:, :, self.labels]
        else:
            W = torch.einsum("oib,bts->oits", self.weight, self.basis)
        return W.transpose(1, 2).reshape(self.outputs * self.t, self.inputs * self.s)

    def forward(self, x: Float[Tensor, "n i s"]) -> Float[Tensor, "n o t"]:
        """Basis maps first, or the matrix written out: whichever is less work."""
        if self.maps_first:
            y: Tensor = self.weight.flatten(1) @ self.mapped(x).flatten(1, 2)
        else:
            y = F.linear(x.flatten(1), self.written()).unflatten(1, (self.outputs, self.t))
        return y

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        spaces = f"{self.inputs} x {self.s} -> {self.outputs} x {self.t}"
        return f"{spaces}, {self.count} basis maps"


@sharing.register
def _equivariant_map(module: EquivariantMap) -> Sharing:
    shape = module.weight.shape

    def seen(x: Float[Tensor, "n i s"]) -> Float[Tensor, "n t 1 ib"]:
        return module.mapped(x).flatten(1, 2).transpose(1, 2).unsqueeze(2)

    return Sharing(
        inputs=seen,
        outputs=lambda g: g.transpose(1, 2).unsqueeze(2),
        bias=None,
        to_blocks=lambda weight: weight.flatten(1).unsqueeze(0),
        from_blocks=lambda blocks: blocks.reshape(shape),
        dense=module.weight.numel() <= EXACT,
    )


class InvariantBias(_OnBasis):
    r"""$y[n, o, t] + \sum_b v[o, b]\, q_b[t]$ for vectors $q_b$ that the group leaves alone."""

    values: nn.Parameter
    basis: Tensor

    def __init__(self, channels: int, maps: MapBasis) -> None:
        """Start at zero."""
        super().__init__()
        self.values = nn.Parameter(torch.zeros(channels, maps.count))
        self.keep("basis", maps.matrices().squeeze(2))

    def forward(self, y: Float[Tensor, "n o t"]) -> Float[Tensor, "n o t"]:
        """Add it."""
        return y + self.values @ self.basis

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"{len(self.values)} channels, {self.values.shape[1]} invariants"


@sharing.register
def _invariant_bias(module: InvariantBias) -> Sharing:
    def seen(y: Float[Tensor, "n o t"]) -> Float[Tensor, "n t 1 b"]:
        return module.basis.T.reshape(1, y.shape[2], 1, -1).expand(len(y), -1, -1, -1).to(y)

    return Sharing(
        inputs=seen,
        outputs=lambda g: g.transpose(1, 2).unsqueeze(2),
        weight="values",
        bias=None,
        dense=True,
    )
