"""Replace some operations of any model by versions with a cheaper backward pass."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from symrazor.accelerate.torch_internals import PAD_FUNCTIONS
from symrazor.curvature.convolution import CircularPad


class FastBackward(TorchFunctionMode):
    """Replace operations while active; weights that are leaves get no gradient.

    Circular padding uses `CircularPad`. Strided convolutions of few channels, and convolutions with
    one output position, use `_Conv`. All other convolutions do not store their input, which only
    the gradient of a weight would need.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace F.pad(..., mode="circular") and F.conv2d if that is faster."""
        kwargs = kwargs or {}
        if func in PAD_FUNCTIONS:
            x, amounts = args[:2] if len(args) > 1 else (args[0], kwargs["pad"])
            mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
            if mode == "circular" and all(p >= 0 for p in amounts):
                return CircularPad.apply(x, tuple(amounts))  # type: ignore[no-untyped-call]
        elif func is F.conv2d and not kwargs and len(args) == 7 and _is_faster(*args):
            return _Conv.apply(*args[:5])  # type: ignore[no-untyped-call]
        elif func in (F.conv1d, F.conv2d, F.conv3d) and len(args) > 1 and args[1].is_leaf:
            address = _address(args[0])
            if address is not None:
                with saved_tensors_hooks(partial(_pack, address, args[0].shape), _unpack):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _address(x: Tensor) -> int | None:
    """Return the address of a tensor; None for traced or vmapped tensors, which have none."""
    if torch.compiler.is_compiling():
        return None
    try:
        return x.data_ptr()
    except RuntimeError:
        return None


def _pack(address: int, size: torch.Size, saved: Tensor) -> Tensor | Callable[[], Tensor]:
    """Store only the layout of a convolution's input, recognised by its address.

    The backward pass reads no more than its shape. (A reference to the input itself would be kept
    alive by the hooks, which autograd stores.)
    """
    if saved.shape != size or saved.data_ptr() != address:
        return saved
    layout = saved.shape, saved.stride()
    return partial(torch.empty_strided, *layout, dtype=saved.dtype, device=saved.device)


def _unpack(stored: Tensor | Callable[[], Tensor]) -> Tensor:
    return stored if isinstance(stored, Tensor) else stored()


def _is_faster(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Return whether `_Conv` can replace a convolution and is faster."""
    if x.device.type != "cpu" or x.dim() != 4 or not x.requires_grad:
        return False
    if not isinstance(stride, tuple) or not isinstance(padding, tuple):
        return False
    if groups != 1 or dilation != (1, 1) or not w.is_leaf or not (b is None or b.is_leaf):
        return False
    few_channels = min(stride) > 1 and w.shape[1] <= MAX_FEW_CHANNELS
    reach = [x.shape[2 + d] + 2 * padding[d] - w.shape[2 + d] for d in (0, 1)]
    return few_channels or all(0 <= r < step for r, step in zip(reach, stride, strict=True))


MAX_FEW_CHANNELS = 8
"""Vector units hold 16 numbers: the gradient of at most this many channels leaves half unused."""


class _Conv(torch.autograd.Function):
    r"""F.conv2d whose backward pass to the input is a matrix product or a stride-1 convolution.

    With one output position, $\partial x = g W$. Otherwise write input row $h = s j + m$ with block
    j and $0 \le m < s$. Offset d of position t touches row $h = s t + d - p$, so that block j needs

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
            kernel = F.pad(w, (-px, px + width - kx, -py, py + height - ky)).permute(0, 2, 3, 1)
            gradient = (g.reshape(n, -1) @ kernel.reshape(len(w), -1)).view(n, height, width, c)
        else:
            gradient = _input_gradient(g, w, ctx.size, ctx.stride, ctx.padding)
        return gradient.permute(0, 3, 1, 2), None, None, None, None


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
    """Return (row m in a block, offset d, block distance b) of all taps; smallest and largest b."""
    taps = [
        (m, d, (m + padding - d) // step)
        for m in range(step)
        for d in range(k)
        if (m + padding - d) % step == 0
    ]
    distances = [b for *_, b in taps]
    return taps, min(distances), max(distances)
