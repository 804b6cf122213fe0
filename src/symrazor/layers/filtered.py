"""Paths with a filter: a convolution at stride 1, then a subsampling; and sums of such paths.

A convolution is linear in its filter, $K_1 * x + K_2 * x = (K_1 + K_2) * x$. So where nobody
listens to the filters of a layer, those of one size and padding are added up and convolved once:
half the work of a convolution beside a group convolution. A hook on any of them, as the curvature
sets, sees it called by itself, on the same input and with the same result up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.convolution import pad_circular
from symrazor.curvature.fast_backward import CircularPad
from symrazor.layers.path import Path
from symrazor.layers.subsampling import Subsample
from symrazor.layers.trace import is_symbolic

AnyConv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Padding = Literal["circular", "zeros"]

CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Filter:
    """A convolution at stride 1 that keeps the shape of a map.

    Args:
        weight: K, of an odd size in every dimension.
        bias: one per output channel, or none.
        padding: "circular" or "zeros".
        groups: parts of the channels that are not mixed.
    """

    weight: Float[Tensor, "d c *kernel"]
    bias: Float[Tensor, " d"] | None
    padding: Padding
    groups: int = 1

    def __add__(self, other: "Filter") -> "Filter":
        """The filter whose output is the sum of both outputs."""
        biases = [b for b in (self.bias, other.bias) if b is not None]
        bias = biases[0] + biases[1] if len(biases) == 2 else biases[0] if biases else None
        return Filter(self.weight + other.weight, bias, self.padding, self.groups)

    def __call__(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *size"]:
        """Convolve."""
        around = [k // 2 for k in self.weight.shape[2:]]
        convolve = CONVOLVE[len(around)]
        if self.padding == "circular" and any(around):
            amounts = tuple(amount for amount in reversed(around) for _ in range(2))
            x, around = _wrapped(x, amounts), [0] * len(around)
        return convolve(x, self.weight, self.bias, padding=around, groups=self.groups)


def _wrapped(x: Tensor, amounts: tuple[int, ...]) -> Tensor:
    """Circular padding, its backward pass as short as its forward pass."""
    if is_symbolic(x):
        return F.pad(x, amounts, mode="circular")
    if not x.requires_grad or torch.compiler.is_compiling():  # a compiler joins the copies itself
        return pad_circular(x, amounts)
    padded: Tensor = CircularPad.apply(x, amounts)  # type: ignore[no-untyped-call]
    return padded


@runtime_checkable
class OneFilter(Protocol):
    """A module that convolves with one filter."""

    def as_filter(self) -> Filter | None:
        """The filter, differentiable in what it is made of; None where there are several."""


def _filter_of(conv: nn.Module) -> Filter | None:
    """The one filter of a module, if it has one that keeps shapes."""
    if isinstance(conv, OneFilter):
        return conv.as_filter()
    if type(conv) not in CONVOLUTIONS.values():
        return None
    assert isinstance(conv, AnyConv)
    around = [k // 2 for k in reversed(conv.kernel_size) for _ in range(2)]
    plain = set(conv.stride) | set(conv.dilation) == {1}
    odd = all(k % 2 for k in conv.kernel_size)
    if not plain or not odd or list(conv._reversed_padding_repeated_twice) != around:
        return None
    match conv.padding_mode:
        case "circular" | "zeros" as padding:
            return Filter(conv.weight, conv.bias, padding, conv.groups)
    return None


def is_heard(module: nn.Module) -> bool:
    """Whether a hook waits for a call of the module or of one in it."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in module.modules()
    )


class Filtered(Path):
    r"""$y = \mathrm{shrink}(\mathrm{conv}(x))$: what paths with a filter have in common."""

    group = "translation"
    conv: nn.Module
    shrink: Subsample

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Convolve, then subsample."""
        self.check(x)
        y: Tensor = self.shrink(convolved([self.conv], x))
        return y

    def unshrunk(self) -> nn.Module:
        """The filter alone, at stride 1, as torch.nn modules."""
        return self.conv

    def _plain(self) -> nn.Module:
        """The filter, and its subsampling after it."""
        if self.stride == 1:
            return self.unshrunk()
        shrink = self.shrink.plain((self.out_channels, *self.in_shape))
        return nn.Sequential(self.unshrunk(), shrink)


def convolved(filters: Sequence[nn.Module], x: Float[Tensor, "n c *size"]) -> Tensor:
    """The sum of several convolutions of one input; one convolution where that is possible."""
    together: dict[object, Filter] = {}
    terms: list[Tensor] = []
    for conv in filters:
        own = None if is_symbolic(x) or is_heard(conv) else _filter_of(conv)
        if own is None:
            terms.append(conv(x))
            continue
        alike = own.padding, own.groups, own.weight.shape
        together[alike] = together[alike] + own if alike in together else own
    terms += [whole(x) for whole in together.values()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
