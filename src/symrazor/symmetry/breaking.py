"""Name the modules that break translation equivariance, from their calls on an example input.

A convolution is equivariant, but a network of convolutions need not be: pools and convolutions with
a stride keep some pixels and drop others, zero padding marks the border, and a dense layer on a
flattened map has weights for every position. `record_calls` records what each module is called
with, and `breaking_modules` names those that break the symmetry.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import ConvTranspose, conv_padding
from symrazor.core.parameters import eval_mode
from symrazor.data.batches import Input, call, map_tensors
from symrazor.layers.conv import CONVOLUTIONS, AnyConv, ComputedFilter
from symrazor.layers.path import Path
from symrazor.layers.subsampling import ADAPTIVE_REDUCTIONS, AVERAGE_POOLS, MAX_POOLS, Subsample
from symrazor.symmetry.equivariance import equivariance_error

CONVS = tuple(CONVOLUTIONS.values())
_PAD_KINDS = ("Constant", "Zero", "Reflection", "Replication", "Circular")
PADS = tuple(getattr(nn, f"{kind}Pad{dims}d") for kind in _PAD_KINDS for dims in (1, 2, 3))
STRIDED_POOL = "pooling with a stride"
STRIDED_CONV = "convolution with a stride"
BORDER = "padding that marks the border"
NO_PADDING = "filter without padding"
FLATTENED = "dense layer on flattened positions"
ADAPTIVE_POOL = "adaptive pooling to several positions"
FIXED_SUBSAMPLING = "subsampling at fixed positions"
TRANSPOSED = "transposed convolution"
ADAPTIVE_POOLS = (
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
CIRCULAR_PADS = (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)
SPATIAL = (*CONVS, *MAX_POOLS, *AVERAGE_POOLS, *ADAPTIVE_POOLS, *PADS)
"""Modules that act on a fixed number of spatial dimensions."""
MAX_MEASURED_INPUTS = 32
MEASURED_SHIFTS = 8


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Args:
        shape: shape of the first positional input; empty if that is not a tensor.
        is_map: whether the input is a whole feature map, flattened to rows.
        is_image: whether the input precedes the first convolution.
        map_shape: shape (c, *size) of this feature map; empty if the input is none.
        padded: whether a padding module returned the input.
    """

    shape: tuple[int, ...]
    is_map: bool
    is_image: bool
    map_shape: tuple[int, ...] = ()
    padded: bool = False


def record_calls(model: nn.Module, x: Input) -> tuple[Tensor, dict[int, list[ModuleCall]]]:
    """Run a model in eval mode; return its outputs and all calls of its modules, by module id."""
    calls: dict[int, list[ModuleCall]] = {}
    last_map: tuple[int, ...] = ()
    images: list[Tensor] = []
    padded: Tensor | None = None
    convolved = False

    def record(module: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        nonlocal last_map, padded, convolved
        shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
        is_map = len(shape) == 2 and math.prod(last_map[1:]) > 1 and shape[1] == math.prod(last_map)
        is_image = not convolved or any(args[0] is image for image in images if args)
        map_shape, is_padded = last_map if is_map else (), bool(shape) and args[0] is padded
        module_call = ModuleCall(shape, is_map, is_image, map_shape, is_padded)
        calls.setdefault(id(module), []).append(module_call)
        padded = y if isinstance(module, PADS) else padded
        convolved |= isinstance(module, CONVS)
        if isinstance(module, nn.Linear):
            last_map = ()
        elif isinstance(y, Tensor) and y.dim() > 2:
            last_map = tuple(y.shape[1:])

    cuda = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    try:
        with ExitStack() as hooks, eval_mode(model), torch.no_grad(), torch.random.fork_rng(cuda):
            for module in model.modules():
                hooks.enter_context(module.register_forward_hook(record))
            copied = map_tensors(x, torch.clone)
            map_tensors(copied, images.append)
            return call(model, copied), calls
    except Exception as error:
        shapes = map_tensors(x, lambda part: list(getattr(part, "shape", [])))
        raise ValueError(
            f"The model does not run on the example input of shape {shapes}: "
            f"{type(error).__name__}: {error}"
        ) from error


def network_error(model: nn.Module, x: Input) -> float | None:
    """Return the equivariance error of a network under circular shifts of its inputs.

    It is measured on at most `MAX_MEASURED_INPUTS` inputs. If these are all equal, as example
    inputs often are, random inputs of the same shape are used. None for inputs that are not maps
    [n, c, *size], and for a single input.
    """
    if not isinstance(x, Tensor) or not 3 <= x.dim() <= 5 or len(x) < 2 or x.shape[2:].numel() < 2:
        return None
    if not x.is_floating_point():
        return None
    x = x[:MAX_MEASURED_INPUTS]
    if not bool((x != x[:1]).any()):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        x = noise.to(x)
    try:
        return equivariance_error(model, x, count=MEASURED_SHIFTS)
    except ValueError:  # the outputs are not maps or vectors, or not finite
        return None


def breaking_modules(model: nn.Module, calls: Mapping[int, Sequence[ModuleCall]]) -> dict[str, str]:
    """Return the modules that break translation equivariance, with the reason.

    Free paths of relaxed layers are left out: the evidence decides about them.

    Args:
        model: any module.
        calls: calls of its modules on an example input, from `record_calls`.
    """
    free = tuple(
        f"{name}." for name, m in model.named_modules() if isinstance(m, Path) and m.group is None
    )
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if name.startswith(free):
            continue
        of_calls = (_reason(module, call) for call in calls.get(id(module), ()))
        reason = next(filter(None, of_calls), None)
        if reason is not None:
            reasons[name] = reason
    return reasons


def _reason(module: nn.Module, call: ModuleCall) -> str | None:
    """Return why a call of a module is not translation-equivariant, or None."""
    size, reason = call.shape[2:], None
    if isinstance(module, nn.Linear):
        return FLATTENED if call.is_map else None
    is_unbatched = isinstance(module, SPATIAL) and not isinstance(module, _spatial(len(size)))
    if math.prod(size) < 2 or is_unbatched:
        return None
    if isinstance(module, (*MAX_POOLS, *AVERAGE_POOLS)):
        reason = _pool_reason(module, len(size), call.padded)
    elif isinstance(module, ADAPTIVE_POOLS):
        pairs = zip(adaptive_sizes(module, size), size, strict=True)
        reason = ADAPTIVE_POOL if any(out not in (1, n) for out, n in pairs) else None
    elif isinstance(module, CONVS):
        reason = _conv_reason(module, size, call.padded)
    elif isinstance(module, ComputedFilter):
        is_marked = module.padding != "circular" and any(module.geometry.amounts)
        reason = BORDER if is_marked else None
    elif isinstance(module, Subsample):
        is_fixed = module.stride > 1 and module.reduction not in ADAPTIVE_REDUCTIONS
        reason = FIXED_SUBSAMPLING if is_fixed else None
    elif isinstance(module, PADS):
        reason = None if isinstance(module, CIRCULAR_PADS) else BORDER
    elif isinstance(module, ConvTranspose):
        reason = TRANSPOSED
    return reason


def _spatial(dims: int) -> tuple[type[nn.Module], ...]:
    """Return the members of `SPATIAL` for a number of dimensions, as their names say."""
    return tuple(kind for kind in SPATIAL if kind.__name__.endswith(f"{dims}d"))


def _pool_reason(pool: nn.Module, dims: int, padded: bool) -> str | None:
    kernel, stride, padding = (each(v, dims) for v in pool_options(pool))
    if any(step > 1 for step in stride):
        return STRIDED_POOL
    if any(padding):
        return BORDER
    return NO_PADDING if max(kernel) > 1 and not padded else None


def _conv_reason(conv: AnyConv, size: Sequence[int], padded: bool) -> str | None:
    if any(step > 1 and n > 1 for step, n in zip(conv.stride, size, strict=True)):
        return STRIDED_CONV
    amounts, reach = conv_padding(conv), conv_reach(conv)
    if any(amounts) and conv.padding_mode != "circular":
        return BORDER
    added = [low + high for low, high in zip(amounts[-2::-2], amounts[-1::-2], strict=True)]
    return None if padded or added == reach else NO_PADDING


def conv_reach(conv: AnyConv) -> list[int]:
    """Return the number of pixels that a filter covers beyond the first, in each dimension."""
    return [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]


def each(value: int | Sequence[int], dims: int) -> list[int]:
    """Return one value per dimension, of an option that may be a single number."""
    sizes = [value] if isinstance(value, int) else [*value]
    return sizes * dims if len(sizes) == 1 else sizes


def pool_options(pool: nn.Module) -> list[int | Sequence[int]]:
    """Return kernel size, stride and padding of a pool."""
    return [getattr(pool, name) for name in ("kernel_size", "stride", "padding")]


def adaptive_sizes(pool: nn.Module, size: Sequence[int]) -> list[int]:
    """Return the output size of an adaptive pool on a map of a size."""
    output_size: Any = pool.output_size
    values = list(output_size) if isinstance(output_size, Sequence) else [output_size] * len(size)
    return [n if value is None else value for value, n in zip(values, size, strict=True)]
