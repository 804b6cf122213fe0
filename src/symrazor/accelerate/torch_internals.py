"""Collect the private and undocumented names of torch in one place.

`tests/accelerate/test_torch_internals.py` checks each name and lists the code that depends on it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
