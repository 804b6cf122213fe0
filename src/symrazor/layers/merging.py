r"""Convert the layers of this library to plain torch modules.

`Rewriter` converts a network; paths of a layer are merged
where possible:

1. Convolutions without subsampling, or subsampled at fixed positions, add up to one convolution;
   smaller kernels are padded with zeros. They must agree in stride, dilation, groups and padding.
2. Affine paths add up to one matrix, if this needs no more parameters and FLOPs. This is always the
   case if one of them is dense already, otherwise on maps of a few pixels.

Convolutions with a common adaptive subsampling are added before it, as in `Relaxed`, and merge like
others. They do not merge with free paths, because the kept pixels are chosen from their own output.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from symrazor.accelerate.torch_internals import child_modules, conv_padding
from symrazor.core.parameters import Hyper
from symrazor.data.batches import Input, call
from symrazor.layers.conv import CONVOLUTIONS, AnyConv, Conv, FilterPath
from symrazor.layers.fully_connected import FC
from symrazor.layers.path import Path, is_symrazor_module, new_parameter, traced
from symrazor.layers.plain import OrbitPooled
from symrazor.layers.relaxed import Relaxed, paths_by_subsampling
from symrazor.layers.subsampling import Subsample

BASIS_BATCH_SIZE = 256
"""Unit inputs evaluated at a time when a path is converted to a matrix."""


@dataclass(frozen=True)
class Term:
    """A plain module and the indices of the paths it replaces."""

    module: nn.Module
    paths: list[int]


class _Sum(nn.Module):
    def __init__(self, terms: Sequence[Term]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(term.module for term in terms)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.parts[0](x)
        for part in list(self.parts)[1:]:
            total = total + part(x)
        return total


def _sum_of_terms(terms: Sequence[Term]) -> nn.Module:
    return terms[0].module if len(terms) == 1 else traced(_Sum(terms), "PlainSum")


@torch.no_grad()
def merge(paths: Sequence[Path], factor: float = 1.0) -> tuple[nn.Module, list[list[int]]]:
    r"""Return $f \sum_p \mathrm{path}_p(x)$ as torch.nn modules and plain tensor code.

    The factor is multiplied into the weights. A single convolution is returned unchanged.

    Returns:
        The module, and for each of its terms the indices of the paths that it replaces.
    """
    dense = [path.dense() for path in paths]
    if factor != 1:
        dense = [copy.deepcopy(path) for path in dense]
        for path in dense:
            path.scale_(factor)
    terms = _convolution_terms_and_others(dense)
    affine = [i for i, path in enumerate(dense) if path.affine]
    affine_terms = [term for term in terms if set(term.paths) <= set(affine)]
    if len(affine) > 1 and _matrix_is_cheaper([dense[i] for i in affine], affine_terms):
        matrix = Term(_as_matrix([dense[i] for i in affine]), affine)
        terms = [matrix, *(term for term in terms if term not in affine_terms)]
    terms.sort(key=lambda term: term.paths)
    return _sum_of_terms(terms), [term.paths for term in terms]


def _convolution_terms_and_others(paths: Sequence[Path]) -> list[Term]:
    """Return merged convolutions, and every other path as a term of its own."""
    index = {id(path): i for i, path in enumerate(paths)}
    terms: list[Term] = []
    convs: dict[int, AnyConv] = {}
    for group in paths_by_subsampling(paths):
        members = [index[id(path)] for path in group]
        path = paths[members[0]]
        conv = path.as_torch_conv() if isinstance(path, Conv) else None
        if len(members) > 1:
            terms.append(Term(_with_common_subsampling([paths[i] for i in members]), members))
        elif conv is not None and type(conv) is CONVOLUTIONS[len(path.in_shape)]:
            convs[members[0]] = conv
        else:
            terms.append(Term(path.plain(), members))
    return terms + _merge_convolutions(convs)


def _with_common_subsampling(paths: Sequence[Path]) -> nn.Module:
    """Return as few convolutions as possible, followed by the common subsampling."""
    first = paths[0]
    assert isinstance(first, FilterPath)
    filters = [path.without_subsampling() for path in paths if isinstance(path, FilterPath)]
    convs = {i: m for i, m in enumerate(filters) if type(m) in CONVOLUTIONS.values()}
    terms = _merge_convolutions(convs)  # type: ignore[arg-type]
    terms += [Term(m, [i]) for i, m in enumerate(filters) if i not in convs]
    subsampling = first.subsampling.plain((first.out_channels, *first.in_shape))
    return nn.Sequential(_sum_of_terms(terms), subsampling)


def _merge_convolutions(convs: dict[int, AnyConv]) -> list[Term]:
    """Merge convolutions, given by path index, into those whose kernels contain theirs."""
    groups: list[list[int]] = []
    for i in sorted(convs, key=lambda i: -convs[i].weight[0, 0].numel()):
        fitting = (g for g in groups if _kernel_offset(convs[i], convs[g[0]]) is not None)
        group = next(fitting, None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return [Term(_sum_of_kernels([convs[i] for i in g]), sorted(g)) for g in groups]


def _kernel_offset(small: AnyConv, large: AnyConv) -> list[int] | None:
    """Return the position of the small kernel inside the large one, or None if it does not fit."""
    pads = [list(conv_padding(conv)) for conv in (small, large)]
    same_border = small.padding_mode == large.padding_mode or not any(pads[0])
    options = ("stride", "dilation", "groups")
    if not same_border or any(getattr(small, k) != getattr(large, k) for k in options):
        return None
    offsets: list[int] = []
    gaps = [b - a for a, b in zip(pads[0][-2::-2], pads[1][-2::-2], strict=True)]
    sizes = zip(gaps, small.dilation, small.kernel_size, large.kernel_size, strict=True)
    for gap, dilation, small_size, large_size in sizes:
        if gap % dilation or not 0 <= gap // dilation <= large_size - small_size:
            return None
        offsets.append(gap // dilation)
    return offsets


def _sum_of_kernels(convs: Sequence[AnyConv]) -> AnyConv:
    """Return the sum of convolutions whose kernels fit into the first as one convolution."""
    large = convs[0]
    if len(convs) == 1:
        return large
    kernel = torch.zeros_like(large.weight, dtype=torch.float64)
    for conv in convs:
        offset = _kernel_offset(conv, large)
        assert offset is not None
        window = [slice(i, i + k) for i, k in zip(offset, conv.kernel_size, strict=True)]
        kernel[(slice(None), slice(None), *window)] += conv.weight.double()
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


def _have_bias(paths: Sequence[Path]) -> bool:
    names = (name for path in paths for name, _ in path.named_parameters())
    return any(not name.endswith("weight") for name in names)


def _matrix_is_cheaper(paths: Sequence[Path], terms: Sequence[Term]) -> bool:
    """Return whether one matrix needs no more parameters and FLOPs than the separate terms."""
    first = paths[0]
    outputs = first.out_channels * first.pixels_out
    entries = outputs * first.in_channels * first.pixels_in
    tensors = {id(p): p for term in terms for p in term.module.parameters()}
    if not tensors:
        return False
    weight = next(iter(tensors.values()))
    shape = (1, first.in_channels, *first.in_shape)
    x = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
    with FlopCounterMode(display=False) as counter:
        for term in terms:
            term.module(x)
    parameters = entries + (outputs if _have_bias(paths) else 0)
    return (
        parameters <= sum(p.numel() for p in tensors.values())
        and 2 * entries <= counter.get_total_flops()
    )


def _as_matrix(paths: Sequence[Path]) -> nn.Module:
    """Return the sum of affine paths as one matrix, from their outputs on unit inputs."""
    first = paths[0]
    like = next(p for path in paths for p in path.parameters())
    space = (first.in_channels, *first.in_shape)
    inputs, outputs = prod(space), first.out_channels * first.pixels_out
    W = like.new_zeros(outputs, inputs, dtype=torch.float64)
    b = W.new_zeros(outputs)
    for path in paths:
        exact = copy.deepcopy(path).double()
        offset = exact(W.new_zeros(1, *space)).flatten()
        b += offset
        if isinstance(exact, FC):
            W += exact.linear.weight
            continue
        for start in range(0, inputs, BASIS_BATCH_SIZE):
            rows = torch.arange(min(BASIS_BATCH_SIZE, inputs - start), device=W.device)
            units = W.new_zeros(len(rows), inputs)
            units[rows, start + rows] = 1
            images = exact(units.unflatten(1, space)).flatten(1)
            W[:, start : start + BASIS_BATCH_SIZE] += (images - offset).T
    linear = nn.Linear(inputs, outputs, bias=_have_bias(paths), device="meta")
    linear.weight = new_parameter(W, like)
    if _have_bias(paths):
        linear.bias = new_parameter(b, like)
    shape = (first.out_channels, *first.out_shape)
    return nn.Sequential(nn.Flatten(), linear, nn.Unflatten(1, shape))


class Rewriter:
    """Replace the layers of this library in a copy of a model by plain torch modules.

    Args:
        model: the relaxed network; not changed.
        x: an input of the network.
        drop: name of a relaxed layer -> indices of paths to leave out.

    Attributes:
        terms: name of a relaxed layer -> indices of its kept paths, merged paths together.
    """

    def __init__(self, model: nn.Module, x: Input, drop: Mapping[str, set[int]]) -> None:
        self.drop, self._subsample_spaces = drop, _subsample_spaces(model, x)
        self.terms: dict[str, list[list[int]]] = {}
        # id of a module -> (module, replacement); holding the module keeps its id in use
        self._replaced: dict[int, tuple[nn.Module, nn.Module]] = {}

    def rewrite(self, module: nn.Module, name: str) -> nn.Module:
        """Return the plain form of a module; a module that is used twice remains shared."""
        if id(module) in self._replaced:
            return self._replaced[id(module)][1]
        plain = self._plain(module, name) if is_symrazor_module(module) else module
        self._replaced[id(module)] = (module, plain)
        if plain is module:
            module.__dict__.pop("_relaxation", None)  # set by `relax`, of a class of this library
            for key, child in child_modules(module).items():
                if child is not None:
                    child_name = f"{name}.{key}".removeprefix(".")
                    child_modules(module)[key] = self.rewrite(child, child_name)
        return plain

    def _plain(self, module: nn.Module, name: str) -> nn.Module:
        match module:
            case Relaxed():
                return self._sum_of_kept_paths(module, name)
            case Path():
                return merge([module])[0]
            case Subsample():
                return module.plain(self._subsample_spaces[name])
            case OrbitPooled():
                module.body = self.rewrite(module.body, f"{name}.body".removeprefix("."))
                return traced(module, "PlainOrbitPooled")
            case Hyper():
                holder = nn.Module()
                holder.register_buffer("value", module.value.detach())
                return holder
            case _:
                return traced(module, f"Plain{type(module).__name__}")

    def _sum_of_kept_paths(self, layer: Relaxed, name: str) -> nn.Module:
        kept = [i for i in range(len(layer.paths)) if i not in self.drop[name]]
        factor = 1 / len(layer.paths) if layer.mean else 1.0
        plain, terms = merge([layer.path(i) for i in kept], factor)
        self.terms[name] = [[kept[i] for i in term] for term in terms]
        return plain


def _subsample_spaces(model: nn.Module, x: Input) -> dict[str, tuple[int, ...]]:
    """Record (c, *size) of the input of every `Subsample` outside of a path, in a forward pass."""
    inside = {id(m) for path in model.modules() if isinstance(path, Path) for m in path.modules()}
    outside = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, Subsample) and id(m) not in inside
    }
    spaces: dict[str, set[tuple[int, ...]]] = {name: set() for name in outside}
    hooks = [
        m.register_forward_pre_hook(lambda m, args, name=name: spaces[name].add(args[0].shape[1:]))
        for name, m in outside.items()
    ]
    try:
        with torch.no_grad():
            call(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    for name, shapes in spaces.items():
        if len(shapes) != 1:
            raise ValueError(
                f"The subsampling {name!r} must receive inputs of one shape for the example input, "
                f"got {sorted(map(tuple, shapes)) or 'none'}."
            )
    return {name: tuple(*shapes) for name, shapes in spaces.items()}
