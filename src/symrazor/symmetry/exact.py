"""Replace the modules that break translation equivariance between layers by exact ones."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from symrazor.data.batches import Input
from symrazor.layers.conv import CONVOLUTIONS, AnyConv
from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed
from symrazor.layers.subsampling import (
    AVERAGE_POOLS,
    MAX_POOLS,
    Reduction,
    SetPool,
    Subsample,
)
from symrazor.symmetry.breaking import (
    ADAPTIVE_POOLS,
    CIRCULAR_PADS,
    CONVS,
    PADS,
    ModuleCall,
    adaptive_sizes,
    breaking_modules,
    conv_reach,
    each,
    network_error,
    pool_options,
    record_calls,
)
from symrazor.symmetry.replacement import copy_model, replace_modules
from symrazor.symmetry.verdict import percent

MAX_EXACT_ERROR = 1e-3
"""Equivariance error above which a network counts as not exactly equivariant."""
_log = logging.getLogger("symrazor")


@dataclass(frozen=True)
class Exactness:
    """What `make_equivariant` did, and the equivariance error of the whole network.

    Args:
        changed: module name -> its replacement.
        left: module name -> why it was not replaced.
        before: error of the network under circular shifts; None if it was not measured.
        after: error of the new network.
    """

    changed: dict[str, str]
    left: dict[str, str]
    before: float | None
    after: float | None

    def __str__(self) -> str:
        width = max([6, *(len(name) for name in (*self.changed, *self.left))])
        rows = [(name, "replaced", text) for name, text in self.changed.items()]
        rows += [(name, "left", text) for name, text in self.left.items()]
        lines = [f"{name or '(root)':<{width}}  {done:<8}  {text}" for name, done, text in rows]
        if self.before is not None and self.after is not None:
            lines.append(
                f"equivariance error of the whole network: {percent(self.before)} before, "
                f"{percent(self.after)} after"
            )
            if self.after >= MAX_EXACT_ERROR:
                lines.append(
                    "The error that remains comes from the modules that were left, or from "
                    "operations that are no modules, such as F.max_pool2d(x, 2) in a forward pass."
                )
        return "\n".join(lines) or "nothing to replace"


def make_equivariant(model: nn.Module, example_input: Input) -> nn.Module:
    """Return a copy of a network that is exactly equivariant to circular shifts.

    Weights are kept. The new network computes another function where a module changed, so train it
    further. Its attribute `equivariance_report` is an `Exactness`; print it.

    - A pool with a stride becomes `Subsample` with an aligned pool. With cells that overlap, it
      becomes the pool at stride 1, then `Subsample`.
    - A convolution with a stride becomes the convolution at stride 1, then `Subsample`.
    - Zero, reflecting, replicating or no padding becomes circular padding that keeps the size.
    - A dense layer on a flattened map becomes a mean over positions and a dense layer with summed
      weights, which is the average of the old layer over all shifts of its input.

    Classifiers become invariant to shifts; networks that return maps become equivariant.

    Args:
        model: any module; it is not changed. Call this before `relax`.
        example_input: a batch of inputs [n, c, *size]. The errors in the report are measured on it.

    Raises:
        ValueError: if the model does not run on the example input, or not after the replacements.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    exact = copy_model(model)
    _, calls = record_calls(exact, example_input)
    before = network_error(exact, example_input)
    reasons = breaking_modules(exact, calls)
    inside = [name for name, m in exact.named_modules() if isinstance(m, (Path, Relaxed))]
    modules = dict(exact.named_modules())
    new: dict[int, nn.Module] = {}
    changed: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, reason in reasons.items():
        module = modules[name]
        if any(not layer or f"{name}.".startswith(f"{layer}.") for layer in inside):
            left[name] = f"{reason}, inside a relaxed layer: call make_equivariant before relax"
            continue
        try:
            replacement = _replacement(module, calls[id(module)])
        except ValueError as error:
            left[name] = f"{reason}: {error}"
            continue
        new[id(module)] = replacement.train(module.training)
        changed[name] = f"{reason} -> {_summary(replacement)}"
    exact = replace_modules(exact, new)
    try:
        record_calls(exact, example_input)
    except ValueError as error:
        raise ValueError(
            f"The network does not run with its modules replaced: {error.__cause__!r}. Sizes of "
            "maps may have changed, which a fixed reshape in the forward pass does not follow."
        ) from error
    report = Exactness(changed, left, before, network_error(exact, example_input))
    exact.equivariance_report = report  # type: ignore[assignment]
    _log.info("%s", report)
    return exact


def _summary(module: nn.Module) -> str:
    """Describe a replacement, as in "Conv2d with circular padding, Subsample(stride=2)"."""
    parts = list(module) if isinstance(module, nn.Sequential) else [module]
    return ", ".join(map(_part_summary, parts))


def _part_summary(part: nn.Module) -> str:
    if isinstance(part, CONVS):
        circular = " with circular padding" if part.padding_mode == "circular" else ""
        return f"{type(part).__name__}{circular}"
    if isinstance(part, nn.Linear):
        return f"Linear({part.in_features}, {part.out_features})"
    return f"{part}"


def _replacement(module: nn.Module, calls: Sequence[ModuleCall]) -> nn.Module:
    """Return an equivariant module with the same weights; ValueError with a reason if none."""
    call = calls[0]
    if isinstance(module, nn.Linear):
        if len({c.map_shape for c in calls}) > 1 or not all(c.is_map for c in calls):
            raise ValueError("it is called on maps of different shapes")
        return _pooled_linear(module, call.map_shape[0])
    size = call.shape[2:]
    dims = len(size)
    if isinstance(module, (*MAX_POOLS, *AVERAGE_POOLS)):
        return _circular_pool(module, size, call.padded)
    if isinstance(module, ADAPTIVE_POOLS):
        ratios = {n / m for n, m in zip(size, adaptive_sizes(module, size), strict=True)}
        ratio = ratios.pop()
        if ratios or ratio != int(ratio) or len({c.shape[2:] for c in calls}) > 1:
            raise ValueError("the sizes are not one multiple of the output sizes")
        return Subsample(int(ratio), _aligned(module))
    if isinstance(module, CONVS):
        return _circular_conv(module, size, call.padded)
    if isinstance(module, PADS):
        return CIRCULAR_PADS[dims - 1](module.padding)
    raise ValueError("there is no exact replacement")


def _aligned(pool: nn.Module) -> Reduction:
    is_max = isinstance(pool, (*MAX_POOLS, *ADAPTIVE_POOLS[:3]))
    return "aligned-max-pool" if is_max else "aligned-average-pool"


def _common_stride(stride: Sequence[int]) -> int:
    if len(set(stride)) > 1:
        raise ValueError("its strides differ between dimensions")
    return stride[0]


def _circular_pad(reach: Sequence[int], size: Sequence[int]) -> list[nn.Module]:
    """Return padding that keeps the size under a filter of this reach, or nothing if it is 0."""
    if max(reach) > min(size):
        raise ValueError("its filter is larger than the map")
    amounts = [part for r in reversed(reach) for part in (r // 2, r - r // 2)]
    return [CIRCULAR_PADS[len(reach) - 1](tuple(amounts))] if any(amounts) else []  # type: ignore[arg-type]


def _circular_pool(pool: nn.Module, size: Sequence[int], padded: bool) -> nn.Module:
    dims = len(size)
    kernel, stride, padding = (each(value, dims) for value in pool_options(pool))
    dilation = each(getattr(pool, "dilation", 1), dims)
    if getattr(pool, "return_indices", False):
        raise ValueError("it returns indices")
    step = _common_stride(stride)
    if kernel == stride and not any(padding) and set(dilation) == {1} and not padded:
        return Subsample(step, _aligned(pool))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    parts = [] if padded else _circular_pad(reach, size)
    if isinstance(pool, MAX_POOLS):
        parts.append(MAX_POOLS[dims - 1](tuple(kernel), 1, dilation=tuple(dilation)))
    else:
        parts.append(AVERAGE_POOLS[dims - 1](tuple(kernel), 1))  # type: ignore[arg-type]
    return nn.Sequential(*parts, Subsample(step)) if step > 1 else nn.Sequential(*parts)


def _circular_conv(conv: AnyConv, size: Sequence[int], padded: bool) -> nn.Module:
    dims = len(size)
    if type(conv) is not CONVOLUTIONS[dims] or is_parametrized(conv):
        raise ValueError("its weight or forward pass is custom")
    step, reach = _common_stride(conv.stride), conv_reach(conv)
    parts = [] if padded else _circular_pad(reach, size)
    same = not padded and not any(r % 2 for r in reach)
    circular = CONVOLUTIONS[dims](
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        padding=tuple(r // 2 for r in reach) if same else 0,  # type: ignore[arg-type]
        dilation=conv.dilation,  # type: ignore[arg-type]
        groups=conv.groups,
        bias=conv.bias is not None,
        padding_mode="circular" if same and any(reach) else "zeros",
        device="meta",
    )
    circular.weight, circular.bias = conv.weight, conv.bias
    layers: list[nn.Module] = [circular] if same else [*parts, circular]
    layers += [Subsample(step)] if step > 1 else []
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


@torch.no_grad()
def _pooled_linear(linear: nn.Linear, channels: int) -> nn.Module:
    """Return the average of a dense layer over all shifts of its input map."""
    if linear.in_features % channels or is_parametrized(linear):
        raise ValueError("its weight is custom")
    W = linear.weight.unflatten(1, (channels, -1)).sum(2)
    pooled = nn.Linear(channels, linear.out_features, linear.bias is not None, device="meta")
    pooled.weight = nn.Parameter(W.clone(), requires_grad=linear.weight.requires_grad)
    pooled.bias = linear.bias
    return nn.Sequential(nn.Unflatten(1, (channels, -1)), SetPool("mean"), pooled)
