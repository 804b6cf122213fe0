"""Cheaper backward passes for some operations of any model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from symrazor.accelerate.torch_internals import PAD_FUNCTIONS
from symrazor.curvature.convolution import pad_circular


class CircularPad(torch.autograd.Function):
    """`pad_circular` whose backward pass folds the padded border back onto the other side.

    Autograd would send the gradient through a chain of slice copies, some thirty kernels, which
    cost more than the convolution that follows.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, amounts: tuple[int, ...]) -> Tensor:
        """Pad."""
        return pad_circular(x, amounts)

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
        return pad_circular(tangent, ctx.amounts)


class FastBackward(TorchFunctionMode):
    """While active, some operations in any model get a cheaper backward pass to their input.

    Circular padding: autograd sends the gradient through a chain of slice copies, which costs more
    than the convolution that follows. Strided convolutions of few channels, and those with one
    output position: see `_Conv`. Others do not keep their input. Their weights, if leaves, get no
    gradient: nobody asks for one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace F.pad(..., mode="circular") and F.conv2d where it pays."""
        kwargs = kwargs or {}
        if func in PAD_FUNCTIONS:
            x, amounts = args[:2] if len(args) > 1 else (args[0], kwargs["pad"])
            mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
            if mode == "circular" and all(p >= 0 for p in amounts):
                return CircularPad.apply(x, tuple(amounts))  # type: ignore[no-untyped-call]
        elif func is F.conv2d and not kwargs and len(args) == 7 and _gains(*args):
            return _Conv.apply(*args[:5])  # type: ignore[no-untyped-call]
        elif func in (F.conv1d, F.conv2d, F.conv3d) and len(args) > 1 and args[1].is_leaf:
            place = _place(args[0])
            if place is not None:
                with saved_tensors_hooks(partial(_outline, place, args[0].shape), _of_outline):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _place(x: Tensor) -> int | None:
    """Where a tensor is; None for what is traced or mapped over, and has no place of its own."""
    if torch.compiler.is_compiling():
        return None
    try:
        return x.data_ptr()
    except RuntimeError:
        return None


@dataclass(frozen=True)
class _Outline:
    """A tensor without its values: where they went to, only the gradient of a weight would ask."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _outline(place: int, size: torch.Size, saved: Tensor) -> Tensor | _Outline:
    """What autograd keeps of a convolution: of the input, which is there, only the outline.

    (The input itself would be kept by the hooks, which autograd holds on to.)
    """
    if saved.shape != size or saved.data_ptr() != place:
        return saved
    return _Outline(saved.shape, saved.stride(), saved.dtype, saved.device)


def _of_outline(kept: Tensor | _Outline) -> Tensor:
    """A tensor for the backward pass, which looks at the shape of an input alone."""
    if isinstance(kept, Tensor):
        return kept
    return torch.empty_strided(kept.size, kept.stride, dtype=kept.dtype, device=kept.device)


def _gains(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Whether `_Conv` can and should stand in for a convolution."""
    if x.device.type != "cpu" or x.dim() != 4 or not x.requires_grad:
        return False
    if not isinstance(stride, tuple) or not isinstance(padding, tuple):
        return False
    if groups != 1 or dilation != (1, 1) or not w.is_leaf or not (b is None or b.is_leaf):
        return False
    few = min(stride) > 1 and w.shape[1] <= FEW_CHANNELS
    reach = [x.shape[2 + d] + 2 * padding[d] - w.shape[2 + d] for d in (0, 1)]
    return few or all(0 <= r < step for r, step in zip(reach, stride, strict=True))


FEW_CHANNELS = 8
"""Vector units hold 16 numbers: the gradient of fewer input channels leaves them half empty."""


class _Conv(torch.autograd.Function):
    r"""F.conv2d whose backward pass to the input is a matrix product, or a convolution at stride 1.

    With one output position, $\partial x = g W$. Else write input row $h = s j + m$ with block j
    and $0 \le m < s$. Offset d of position t touches row $h = s t + d - p$, so that block j needs

    $$ \partial x[s j + m] = \sum_b W_m[b]\, g[j + b], \qquad
       W_m[b] = W[d], \; d = m + p - s b , $$

    a convolution at stride 1 whose output channels are (m, channel), then unfolded into rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any
    ) -> Tensor:
        ctx.size, ctx.stride, ctx.padding = x.shape, stride, padding
        ctx.save_for_backward(w)
        return F.conv2d(x, w, b, stride, padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (w,) = ctx.saved_tensors
        n, c, height, width = ctx.size
        if g.shape[2] == g.shape[3] == 1:
            (ky, kx), (py, px) = w.shape[2:], ctx.padding
            seen = F.pad(w, (-px, px + width - kx, -py, py + height - ky)).permute(0, 2, 3, 1)
            found = (g.reshape(n, -1) @ seen.reshape(len(w), -1)).view(n, height, width, c)
        else:
            found = _input_gradient(g, w, ctx.size, ctx.stride, ctx.padding)
        return found.permute(0, 3, 1, 2), None, None, None, None


def _input_gradient(
    g: Tensor, w: Tensor, size: torch.Size, stride: Sequence[int], padding: Sequence[int]
) -> Float[Tensor, "n h w c"]:
    (n, c, height, width), (sy, sx) = size, stride
    rows, first, last = _taps(w.shape[2], sy, padding[0])
    columns, left, right = _taps(w.shape[3], sx, padding[1])
    kernel = w.new_zeros(sy, sx, c, len(w), last - first + 1, right - left + 1)
    for m, d, b in rows:
        for k, e, a in columns:
            kernel[m, k, :, :, b - first, a - left] = w[:, :, d, e].T
    j, i = -(-height // sy), -(-width // sx)
    amounts = (-left, i + right - g.shape[3], -first, j + last - g.shape[2])
    weight = kernel.flatten(0, 2).contiguous(memory_format=torch.channels_last)
    blocks = F.conv2d(F.pad(g, amounts), weight).permute(0, 2, 3, 1)
    split = blocks.reshape(n, j, i, sy, sx * c).transpose(2, 3)
    return split.reshape(n, j * sy, i * sx, c)[:, :height, :width]


def _taps(k: int, step: int, padding: int) -> tuple[list[tuple[int, int, int]], int, int]:
    """(row m in a block, offset d, block distance b) of every offset; least and largest b."""
    taps = [
        (m, d, (m + padding - d) // step)
        for m in range(step)
        for d in range(k)
        if (m + padding - d) % step == 0
    ]
    distances = [b for *_, b in taps]
    return taps, min(distances), max(distances)
