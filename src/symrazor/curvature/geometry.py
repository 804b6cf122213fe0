"""Positions of a convolution: its padding, its windows and the patches under them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Geometry:
    """What a convolution does with positions, whatever its weight is made of.

    `amounts` is the padding as F.pad wants it: low and high, from the last axis to the first.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: str
    amounts: tuple[int, ...]
    groups: int = 1

    @classmethod
    def of(cls, conv: Conv) -> "Geometry":
        """The geometry of a convolution of torch."""
        amounts = tuple(conv._reversed_padding_repeated_twice)
        return cls(
            conv.kernel_size, conv.stride, conv.dilation, conv.padding_mode, amounts, conv.groups
        )


def pad(x: Tensor, shape: Geometry) -> Tensor:
    """The input as the convolution sees it."""
    mode = "constant" if shape.padding_mode == "zeros" else shape.padding_mode
    amounts = shape.amounts
    if not any(amounts):
        return x
    return wrap(x, amounts) if mode == "circular" else F.pad(x, amounts, mode=mode)


def wrap(x: Tensor, amounts: Sequence[int]) -> Tensor:
    """Circular F.pad that keeps the memory layout; `amounts` from the last axis to the first."""
    for axis in range(len(amounts) // 2):
        low, high = amounts[2 * axis : 2 * axis + 2]
        dim, size = x.dim() - 1 - axis, x.shape[-1 - axis]
        if max(low, high) > size:
            raise ValueError(f"expected circular padding of at most {size}, got {max(low, high)}")
        parts = [x.narrow(dim, size - low, low), x, x.narrow(dim, 0, high)]
        x = torch.cat([part for part in parts if part.shape[dim]], dim) if low or high else x
    return x


class CircularPad(torch.autograd.Function):
    """`wrap` whose backward pass folds the padded border back onto the other side.

    Autograd would send the gradient through a chain of slice copies, some thirty kernels, which
    cost more than the convolution that follows.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, amounts: tuple[int, ...]) -> Tensor:
        """Pad."""
        return wrap(x, amounts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...]], output: Tensor) -> None:
        """Remember how much was padded."""
        ctx.amounts = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """Fold."""
        for axis in range(len(ctx.amounts) // 2):
            low, high = ctx.amounts[2 * axis : 2 * axis + 2]
            dim = g.dim() - 1 - axis
            size = g.shape[dim] - low - high
            inner = g.narrow(dim, low, size)
            if low or high:
                inner = inner.clone(memory_format=torch.preserve_format)
            if high:
                inner.narrow(dim, 0, high).add_(g.narrow(dim, low + size, high))
            if low:
                inner.narrow(dim, size - low, low).add_(g.narrow(dim, 0, low))
            g = inner
        return g, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """It is linear."""
        return wrap(tangent, ctx.amounts)


def windows(
    x: Float[Tensor, "n c *size"],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "n c *out_and_kernel"]:
    """View of all windows: [n, c, *positions, *offsets], without copying."""
    for d, (k, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + d, gap * (k - 1) + 1, step)[..., ::gap]
    return x


def patches(
    x: Float[Tensor, "n c *size"],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Float[Tensor, "n t k i"]:
    """Patches of an already padded input, i ordered as in a convolution weight."""
    view = windows(x, kernel, stride, dilation)
    n, c, dims = len(x), x.shape[1], len(kernel)
    split = view.reshape(n, groups, c // groups, *view.shape[2:])
    order = [0, *range(3, 3 + dims), 1, 2, *range(3 + dims, 3 + 2 * dims)]
    features = c // groups * math.prod(kernel)
    return split.permute(order).reshape(n, -1, groups, features)


def all_patches(x: Float[Tensor, "n c *size"], shape: Geometry) -> Float[Tensor, "n t k i"]:
    """Patches of an input that is not padded yet."""
    return patches(pad(x, shape), shape.kernel_size, shape.stride, shape.dilation, shape.groups)
