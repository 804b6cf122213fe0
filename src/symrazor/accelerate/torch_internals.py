"""Collect what depends on the internals of torch: private names, and a cheaper backward pass.

`call_with_fast_backward` replaces operations whose backward pass is slow in torch, in any model. It
depends on how torch calls these operations, and on what their backward passes read.

`tests/accelerate/test_torch_internals.py` checks each name and lists the code that depends on it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _python_dispatch, _pytree

TorchDispatchMode = _python_dispatch.TorchDispatchMode
tree_leaves = _pytree.tree_leaves

BatchNorm = _BatchNorm
ConvTranspose = _ConvTransposeNd
Dropout = _DropoutNd
InstanceNorm = _InstanceNorm
"""Base classes of the layers of all dimensions."""


@contextmanager
def reparametrize_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Use other tensors as a module's parameters within a context, wherever they are shared.

    Recurrent modules keep a second list of their parameters, which torch does not update.
    """
    recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    with _reparametrize_module(module, dict(tensors), tie_weights=True):
        before = [m._flat_weights for m in recurrent]
        for m in recurrent:
            m._flat_weights = [getattr(m, name) for name in m._flat_weights_names]
        try:
            yield
        finally:
            for m, flat in zip(recurrent, before, strict=True):
                m._flat_weights = flat


def flat_rnn_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that the forward pass of a recurrent module uses, by local name."""
    if not isinstance(module, nn.RNNBase):
        return {}
    names, values = module._flat_weights_names, module._flat_weights
    return {n: v for n, v in zip(names, values, strict=True) if v is not None}


def is_checkpointing() -> bool:
    """Return whether hooks on saved tensors are active, such as those of torch.utils.checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


MAX_FEW_CHANNELS = 8
"""Vector units hold 16 numbers: the gradient of at most this many channels leaves half unused."""

PAD_FUNCTIONS = (F.pad, torch._C._nn.pad)
"""What a TorchFunctionMode sees for F.pad: the function itself or its C implementation."""

COPY_OPERATIONS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""Operations that change dtype or device, as a TorchDispatchMode sees them."""

# Operations on lists of tensors, one kernel for all of them on a GPU.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_


def tensor_version(x: Tensor) -> int:
    """Return the counter that every in-place change of a tensor increments."""
    return x._version


def conv_padding(conv: nn.Module) -> tuple[int, ...]:
    """Return a convolution's padding as F.pad expects it: low and high, last axis first."""
    return tuple(cast(Sequence[int], conv._reversed_padding_repeated_twice))


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the mutable mapping of a module's children, None entries included."""
    return module._modules


def local_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the mapping of the parameters that a module itself holds, None entries included."""
    return module._parameters


def local_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the mapping of the buffers that a module itself holds, None entries included."""
    return module._buffers


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a hook is registered for the module's own calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs before the module's own calls, as parametrizations of torch do."""
    return bool(module._forward_pre_hooks)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward hook is registered in the module or inside it."""
    return any(
        has_forward_hooks(m) or m._backward_hooks or m._backward_pre_hooks for m in module.modules()
    )


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was returned by torch.compile."""
    return hasattr(module, "_orig_mod")


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile was applied to, or the module itself."""
    return cast(nn.Module, getattr(module, "_orig_mod", module))


def weight_gradient_of_conv2d(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the weight gradient of an unpadded conv2d at stride 1."""
    backward: Callable[..., Any] = torch.ops.aten.convolution_backward
    steps = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    return cast(Tensor, backward(g, x, weight, None, *steps)[1])


def pad_circular(x: Tensor, amounts: Sequence[int]) -> Tensor:
    """Pad circularly like F.pad, but keep the memory layout."""
    for axis in range(len(amounts) // 2):
        low, high = amounts[2 * axis : 2 * axis + 2]
        dim, size = x.dim() - 1 - axis, x.shape[-1 - axis]
        if max(low, high) > size:
            raise ValueError(
                f"Circular padding of {max(low, high)} exceeds the size {size} of the input."
            )
        wrapped = [x.narrow(dim, size - low, low), x, x.narrow(dim, 0, high)]
        x = torch.cat([part for part in wrapped if part.shape[dim]], dim) if low or high else x
    return x


class CircularPad(torch.autograd.Function):
    """`pad_circular` whose backward pass adds the padded border to the other side.

    Autograd would send the gradient through a chain of slice copies, about thirty kernels, which
    cost more than the convolution that follows.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, amounts: tuple[int, ...]) -> Tensor:
        """Pad the last axes."""
        return pad_circular(x, amounts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...]], output: Tensor) -> None:
        """Store the amounts of padding."""
        ctx.amounts = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """Add the gradient of the border to the pixels it was copied from."""
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
        """Pad the tangent: the operation is linear."""
        return pad_circular(tangent, ctx.amounts)


def call_with_fast_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation, replaced if that is faster; weights that are leaves get no gradient.

    Circular padding uses `CircularPad`. Strided convolutions of few channels, and convolutions with
    one output position, use `_Conv`. All other convolutions do not store their input, which only
    the gradient of a weight would need.
    """
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
        w = ctx.saved_tensors[0].to(g.dtype)  # under autocast, g has 16 bits and w may have 32
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
