"""Every layer of this library in a model, replaced by plain torch modules."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from symrazor.accelerate.torch_internals import child_modules, conv_padding
from symrazor.core.parameters import Hyper
from symrazor.curvature.tape import Input, call
from symrazor.layers.conv import CONVOLUTIONS, AnyConv, Conv, Filtered
from symrazor.layers.fully_connected import FC
from symrazor.layers.path import Path, is_symrazor_module, new_parameter, traced
from symrazor.layers.relaxed import Relaxed, joint
from symrazor.layers.subsampling import Subsample

ROWS = 256
"""Basis images that go through a path at a time, when it is written as a matrix."""


@dataclass(frozen=True)
class Part:
    """One term of the sum: a plain module, and the paths it stands for."""

    module: nn.Module
    paths: list[int]


class _Sum(nn.Module):
    r"""$\sum_p \mathrm{part}_p(x)$."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part.module for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.parts[0](x)
        for part in list(self.parts)[1:]:
            total = total + part(x)
        return total


@torch.no_grad()
def merge(paths: Sequence[Path], factor: float = 1.0) -> tuple[nn.Module, list[list[int]]]:
    r"""$f \sum_p \mathrm{path}_p(x)$ of torch.nn modules and plain tensor code.

    The factor goes into the weights. One convolution stays the module it is.

    Returns:
        The network, and which paths each of its terms stands for.
    """
    dense = [path.dense() for path in paths]
    if factor != 1:
        dense = [copy.deepcopy(path) for path in dense]
        for path in dense:
            path.scale_(factor)
    parts = _parts(dense)
    affine = [i for i, path in enumerate(dense) if path.affine]
    apart = [part for part in parts if set(part.paths) <= set(affine)]
    if len(affine) > 1 and _matrix_is_cheaper([dense[i] for i in affine], apart):
        matrix = Part(_matrix([dense[i] for i in affine]), affine)
        parts = [matrix, *(part for part in parts if part not in apart)]
    parts.sort(key=lambda part: part.paths)
    module = parts[0].module if len(parts) == 1 else traced(_Sum(parts), "PlainSum")
    return module, [part.paths for part in parts]


def _parts(paths: Sequence[Path]) -> list[Part]:
    """Every path alone, or a group of convolutions that are one."""
    place = {id(path): i for i, path in enumerate(paths)}
    parts: list[Part] = []
    fixed: dict[int, AnyConv] = {}
    for group in joint(paths):
        own = [place[id(path)] for path in group]
        path = paths[own[0]]
        conv = path.fixed() if isinstance(path, Conv) else None
        if len(own) > 1:
            parts.append(Part(_shrunk([paths[i] for i in own]), own))
        elif conv is not None and type(conv) is CONVOLUTIONS[len(path.in_shape)]:
            fixed[own[0]] = conv
        else:
            parts.append(Part(path.plain(), own))
    return parts + _convolutions(fixed)


def _shrunk(paths: Sequence[Path]) -> nn.Module:
    """Filters that are shrunk together: as few convolutions as possible, then one subsampling."""
    some = paths[0]
    assert isinstance(some, Filtered)
    inner = [path.unshrunk() for path in paths if isinstance(path, Filtered)]
    fixed = {i: m for i, m in enumerate(inner) if type(m) in CONVOLUTIONS.values()}
    parts = _convolutions(fixed)  # type: ignore[arg-type]
    parts += [Part(m, [i]) for i, m in enumerate(inner) if i not in fixed]
    total = parts[0].module if len(parts) == 1 else traced(_Sum(parts), "PlainSum")
    return nn.Sequential(total, some.shrink.plain((some.out_channels, *some.in_shape)))


def _convolutions(fixed: dict[int, AnyConv]) -> list[Part]:
    """Convolutions by number, those added up that can be."""
    groups: list[list[int]] = []
    for i in sorted(fixed, key=lambda i: -fixed[i].weight[0, 0].numel()):
        home = next((g for g in groups if _offset(fixed[i], fixed[g[0]]) is not None), None)
        if home is None:
            groups.append([i])
        else:
            home.append(i)
    return [Part(_summed([fixed[i] for i in g]), sorted(g)) for g in groups]


def _offset(small: AnyConv, large: AnyConv) -> list[int] | None:
    """Where the small kernel sits inside the large one, or None if it does not fit there."""
    pads = [list(conv_padding(conv)) for conv in (small, large)]
    same_border = small.padding_mode == large.padding_mode or not any(pads[0])
    alike = ("stride", "dilation", "groups")
    if not same_border or any(getattr(small, k) != getattr(large, k) for k in alike):
        return None
    found: list[int] = []
    gaps = [b - a for a, b in zip(pads[0][-2::-2], pads[1][-2::-2], strict=True)]
    sizes = zip(gaps, small.dilation, small.kernel_size, large.kernel_size, strict=True)
    for gap, dilation, k, room in sizes:
        if gap % dilation or not 0 <= gap // dilation <= room - k:
            return None
        found.append(gap // dilation)
    return found


def _summed(convs: Sequence[AnyConv]) -> AnyConv:
    """Convolutions that fit into the first one, as one convolution."""
    large = convs[0]
    if len(convs) == 1:
        return large
    kernel = torch.zeros_like(large.weight, dtype=torch.float64)
    for conv in convs:
        start = _offset(conv, large)
        assert start is not None
        place = [slice(i, i + k) for i, k in zip(start, conv.kernel_size, strict=True)]
        kernel[(slice(None), slice(None), *place)] += conv.weight.double()
    biases = [conv.bias.double() for conv in convs if conv.bias is not None]
    merged = CONVOLUTIONS[large.weight.dim() - 2](
        large.in_channels,
        large.out_channels,
        large.kernel_size,  # type: ignore[arg-type]
        large.stride,  # type: ignore[arg-type]
        large.padding,  # type: ignore[arg-type]
        large.dilation,  # type: ignore[arg-type]
        large.groups,
        bias=bool(biases),
        padding_mode=large.padding_mode,
        device="meta",
    )
    merged.weight = new_parameter(kernel, large.weight)
    if biases:
        merged.bias = new_parameter(torch.stack(biases).sum(0), large.weight)
    return merged


def _has_bias(paths: Sequence[Path]) -> bool:
    names = (name for path in paths for name, _ in path.named_parameters())
    return any(not name.endswith("weight") for name in names)


def _matrix_is_cheaper(paths: Sequence[Path], apart: Sequence[Part]) -> bool:
    """Whether the sum as one matrix needs no more parameters and FLOPs than its parts."""
    some = paths[0]
    outputs = some.out_channels * some.pixels_out
    cost = outputs * some.in_channels * some.pixels_in
    tensors = {id(p): p for part in apart for p in part.module.parameters()}
    if not tensors:
        return False
    weight = next(iter(tensors.values()))
    x = torch.zeros(1, some.in_channels, *some.in_shape, dtype=weight.dtype, device=weight.device)
    with FlopCounterMode(display=False) as counter:
        for part in apart:
            part.module(x)
    parameters = cost + (outputs if _has_bias(paths) else 0)
    return (
        parameters <= sum(p.numel() for p in tensors.values())
        and 2 * cost <= counter.get_total_flops()
    )


def _matrix(paths: Sequence[Path]) -> nn.Module:
    """Affine paths as one matrix, found by sending a basis through each of them."""
    some = paths[0]
    like = next(p for path in paths for p in path.parameters())
    space = (some.in_channels, *some.in_shape)
    inputs, outputs = prod(space), some.out_channels * some.pixels_out
    W = like.new_zeros(outputs, inputs, dtype=torch.float64)
    b = W.new_zeros(outputs)
    for path in paths:
        exact = copy.deepcopy(path).double()
        origin = exact(W.new_zeros(1, *space)).flatten()
        b += origin
        if isinstance(exact, FC):
            W += exact.linear.weight
            continue
        for start in range(0, inputs, ROWS):
            rows = torch.arange(min(ROWS, inputs - start), device=W.device)
            basis = W.new_zeros(len(rows), inputs)
            basis[rows, start + rows] = 1
            images = exact(basis.unflatten(1, space)).flatten(1)
            W[:, start : start + ROWS] += (images - origin).T
    linear = nn.Linear(inputs, outputs, bias=_has_bias(paths), device="meta")
    linear.weight = new_parameter(W, like)
    if _has_bias(paths):
        linear.bias = new_parameter(b, like)
    shape = (some.out_channels, *some.out_shape)
    return nn.Sequential(nn.Flatten(), linear, nn.Unflatten(1, shape))


class Rewriter:
    """Replaces the layers of this library in a copy of a model, and notes what it did.

    Args:
        model: the relaxed network, to look at.
        x: an input for it.
        drop: relaxed layer -> paths to leave out.

    Attributes:
        terms: relaxed layer -> its kept paths, those that were merged together.
    """

    def __init__(self, model: nn.Module, x: Input, drop: Mapping[str, set[int]]) -> None:
        """Find out what must be known before."""
        self.drop, self.spaces = drop, _spaces(model, x)
        self.terms: dict[str, list[list[int]]] = {}
        self.done: dict[int, tuple[nn.Module, nn.Module]] = {}  # the old one too: it keeps its id

    def rewrite(self, module: nn.Module, name: str) -> nn.Module:
        """The plain form of a module; a module that is used twice stays one."""
        if id(module) in self.done:
            return self.done[id(module)][1]
        plain = self.plain(module, name) if is_symrazor_module(module) else module
        self.done[id(module)] = (module, plain)
        if plain is module:
            module.__dict__.pop("_relaxation", None)  # the account of `relax`, a class of ours
            for key, child in child_modules(module).items():
                if child is not None:
                    inside = f"{name}.{key}".removeprefix(".")
                    child_modules(module)[key] = self.rewrite(child, inside)
        return plain

    def plain(self, module: nn.Module, name: str) -> nn.Module:
        """One layer of this library as plain torch."""
        match module:
            case Relaxed():
                return self.sum(module, name)
            case Path():
                return merge([module])[0]
            case Subsample():
                return module.plain(self.spaces[name])
            case Hyper():
                holder = nn.Module()
                holder.register_buffer("value", module.value.detach())
                return holder
            case _:
                return traced(module, f"Plain{type(module).__name__}")

    def sum(self, layer: Relaxed, name: str) -> nn.Module:
        """The kept paths of a relaxed layer."""
        kept = [i for i in range(len(layer.paths)) if i not in self.drop[name]]
        factor = 1 / len(layer.paths) if layer.mean else 1.0
        plain, terms = merge([layer.path(i) for i in kept], factor)
        self.terms[name] = [[kept[i] for i in term] for term in terms]
        return plain


def _spaces(model: nn.Module, x: Input) -> dict[str, tuple[int, ...]]:
    """(c, *size) of the input of every subsampling outside of a path, from one forward pass."""
    inside = {id(m) for path in model.modules() if isinstance(path, Path) for m in path.modules()}
    alone = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, Subsample) and id(m) not in inside
    }
    seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in alone}
    hooks = [
        m.register_forward_pre_hook(lambda m, args, name=name: seen[name].add(args[0].shape[1:]))
        for name, m in alone.items()
    ]
    try:
        with torch.no_grad():
            call(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    for name, shapes in seen.items():
        if len(shapes) != 1:
            raise ValueError(
                f"expected the subsampling {name!r} to see inputs of one shape on the example "
                f"input, got {sorted(map(tuple, shapes)) or 'none'}"
            )
    return {name: tuple(*shapes) for name, shapes in seen.items()}
