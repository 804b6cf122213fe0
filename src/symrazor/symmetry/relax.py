r"""Relax the convolutions of a network in one call.

$$ \mathrm{conv}(x) \;\longrightarrow\; \mathrm{conv}(x) + \sum_p \mathrm{free}_p(x) $$

Every convolution becomes the equivariant path of a `Relaxed` layer. The free paths beside it start
at zero: the outputs stay the same, and the evidence decides what the free paths contribute. Free
paths have weights for every position, so the relaxed network only accepts the spatial shape of the
example input.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import combinations
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from symrazor.accelerate.torch_internals import (
    BatchNorm,
    ConvTranspose,
    InstanceNorm,
    local_parameters,
)
from symrazor.core.parameters import Hyper
from symrazor.curvature.coverage import unsupported_reason
from symrazor.data.batches import Input
from symrazor.groups import Group
from symrazor.layers.conv import AnyConv, Conv
from symrazor.layers.factored import SFC
from symrazor.layers.fully_connected import FC, FFC
from symrazor.layers.path import Path
from symrazor.layers.point_group import PointGroup, point_group
from symrazor.layers.relaxed import (
    FromConv,
    Relaxed,
    relaxed_convolution,
    spatial_layers,
    split_off,
)
from symrazor.layers.sparse_conv import SConv
from symrazor.symmetry.breaking import (
    CONVS,
    ModuleCall,
    breaking_modules,
    network_error,
    record_calls,
)
from symrazor.symmetry.relax_linear import relax_linear
from symrazor.symmetry.replacement import (
    Relaxation,
    copy_model,
    replace_and_check,
)

TRANSLATIONS = ("translation",)
"""The groups that `relax` relaxes by default."""
POINT_GROUPS = ("p2", "p4", "pm", "p2m", "p4m", "O", "Oh")
"""Named groups of rotations and reflections of square and cubic grids."""


def grid_point_group(group: Group) -> PointGroup | None:
    """Return a matrix group as a point group if it maps the grid to itself, else None."""
    if group.permutations is not None or group.size not in (2, 3) or not group.is_discrete:
        return None
    points = point_group(group)
    return points if points.exact else None


def canonical_name(group: str | Group) -> str | Group:
    """Return the name of a group of the grid, as in p4 for cyclic(4); other groups unchanged."""
    points = None if isinstance(group, str) else grid_point_group(group)
    if points is None or points.name not in (*TRANSLATIONS, *POINT_GROUPS):
        return group
    return points.name


def check_groups(groups: object) -> None:
    """Raise ValueError for groups that convolutions cannot be relaxed with.

    These are groups that do not map the grid to itself, trivial groups, lists without translations,
    and lists with two groups of the same elements, which no data can distinguish.
    """
    requested: list[Any] = [*groups] if isinstance(groups, list | tuple | set) else [groups]
    known = [*TRANSLATIONS, *POINT_GROUPS]
    custom = [group for group in requested if isinstance(group, Group) and grid_point_group(group)]
    if not set(TRANSLATIONS) <= set(requested) or set(requested) - {*known, *custom}:
        misspelt = [group for group in requested if isinstance(group, str) and group not in known]
        close = [match for name in misspelt for match in get_close_matches(name, known, 1, 0.8)]
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"groups must include 'translation', and otherwise hold names among {known} or finite "
            f"groups of matrices that map the grid to itself, got {requested}.{hint}"
        )
    others = [point_group(group) for group in dict.fromkeys(requested) if group not in TRANSLATIONS]
    for group in others:
        if group.order == 1:
            raise ValueError(f"Group {group.name} has only the identity. Leave it out.")
    for group, other in combinations(others, 2):
        if group.order == other.order and group.group.is_subgroup_of(other.group):
            raise ValueError(
                f"Groups {group.name} and {other.name} have the same elements. Leave one of them "
                "out."
            )


def _sparse(conv: AnyConv, in_shape: Sequence[int]) -> Path:
    """Fit anchors to a convolution; keep the convolution if its stride or padding forbids it."""
    path = Conv.wrap(conv, in_shape)
    return SConv.from_conv(path) if SConv.can_fit(path) else path


EQUIVARIANT: dict[str, FromConv] = {"conv": Conv.wrap, "s-conv": _sparse}
"""Name -> constructor of a path from (convolution, in_shape)."""

FREE: dict[str, Callable[..., Path]] = {"f-fc": FFC, "fc": FC, "s-fc": SFC}
"""Name -> constructor of a path from (in_channels, out_channels, in_shape, out_shape=...)."""

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, InstanceNorm)
NOT_LISTED = (*NORMS, nn.PReLU, Hyper, ParametrizationList)
_log = logging.getLogger("symrazor")


def relax(
    model: nn.Module,
    example_input: Input,
    groups: Sequence[str | Group] = TRANSLATIONS,
    paths: str = "f-fc+conv",
    precision: float | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Return a copy of a network in which every convolution on a map is a `Relaxed` layer.

    The equivariant path is the convolution itself, with its stride, padding and frozen weights. The
    free paths map the same input to the same output shape, on the same device and with the same
    dtype. They are trainable even if the convolution is frozen. `relaxation(model)` lists which
    layers were changed, and why the others were not.

    Args:
        model: any module; it is not changed. Convolutions may be nested and called several times.
        example_input: one batch, whose spatial shape the network keeps; a tuple or dictionary of
            tensors is passed as the arguments of the model.
        groups: the symmetries to relax. ["translation"]; or with rotations and reflections, as in
            ["translation", "p4", "p4m"] ("O" and "Oh" in three dimensions); or with any finite
            group of matrices that map the grid to itself, as in ["translation",
            symrazor.groups.cyclic(4)]. For each further group, the part of a convolution that is
            equivariant to it becomes a separate path and the convolution keeps the remainder
            (`GConv.split_off`), the largest group first. Channels are a regular representation,
            (element, field); the first convolution acts on an image. If channels, strides or maps
            do not fit a group, the layer has no path for it, and `relaxation` gives the reason.
            Alternatively only `symrazor.groups.Group`s on n places: dense layers on c n features
            (channel, place), and dense layers that the places of [batch, n, c] share, then get a
            strict path for each group and a free path; `paths`, `precision` and `seed` have no
            effect here.
        paths: path names joined by "+", exactly one of them equivariant: "f-fc+conv", "fc+conv",
            "s-fc+conv", "s-fc+s-conv", "conv". S-CONV is fitted to the convolution by least
            squares, so the outputs change; convolutions with a stride stay CONV.
        precision: prior precision from which the free paths are drawn, relative to their usual
            initialisation, see `Relaxed.scale_free_paths`. None: the last factor of each free path
            is zero and the others are drawn, so the outputs are unchanged but the gradient is not
            zero.
        seed: random seed of this draw; None uses the global random state.

    Raises:
        ValueError: if an option is invalid, the model does not run on the example input, contains
            BatchNorm, has no layer to relax, or bypasses its modules in the forward pass.
    """
    given_groups: object = groups
    if isinstance(given_groups, Group):
        raise ValueError(f"groups must be a list: pass groups=[{given_groups!r}].")
    custom = [group for group in groups if isinstance(group, Group)] if groups else []
    on_maps = isinstance(example_input, Tensor) and example_input.dim() > 3
    # Point groups on maps need translations too; `check_groups` says so.
    point_groups = on_maps and all(grid_point_group(group) for group in custom)
    only_custom = bool(custom) and len(custom) == len(groups)
    if only_custom and not point_groups and isinstance(model, nn.Module):
        return relax_linear(model, example_input, custom)
    groups = [canonical_name(group) for group in groups] if custom else groups
    _check_options(model, example_input, groups, precision)
    listed = [groups] if isinstance(groups, str) else groups
    others = [group for group in listed if group not in TRANSLATIONS]
    equivariant, free = _parse(paths)
    relaxed = copy_model(model)
    coupled = [name for name, m in relaxed.named_modules() if isinstance(m, BatchNorm)]
    if coupled:
        raise ValueError(
            f"BatchNorm at {coupled} couples the inputs of a batch. Replace it first with "
            "symrazor.replace_batchnorm(model), or with fold=True if the model is trained."
        )
    before, calls = record_calls(relaxed, example_input)
    error, breaking = network_error(relaxed, example_input), breaking_modules(relaxed, calls)
    report = Relaxation({}, {}, error, breaking)
    new, missing = dict[int, Relaxed](), dict[int, str]()
    with torch.random.fork_rng([], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        for name, conv in _convolutions(relaxed, calls, report.left):
            if id(conv) not in new:
                call = calls[id(conv)][0]
                group_paths, reasons = split_off(conv, call.shape[2:], others, call.is_image)
                missing[id(conv)] = "".join(f"; no {g}: {why}" for g, why in reasons.items())
                layer = relaxed_convolution(conv, call.shape[2:], equivariant, free, group_paths)
                layer.scale_free_paths(math.inf if precision is None else precision)
                new[id(conv)] = layer
            report.changed[name] = _describe(new[id(conv)]) + missing[id(conv)]
    exact = precision is None and equivariant == Conv.wrap
    relaxed = replace_and_check(relaxed, {**new}, example_input, before if exact else None, report)
    _log.info("%s", report)
    return relaxed


def _convolutions(
    model: nn.Module, calls: Mapping[int, Sequence[ModuleCall]], left: dict[str, str]
) -> Iterator[tuple[str, AnyConv]]:
    """Yield the convolutions to relax; write to `left` why other layers are not relaxed."""
    existing = {id(layer): layer for layer in spatial_layers(model).values()}
    inside = {id(m) for layer in existing.values() for m in layer.modules()}
    done: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(not layer or name.startswith(f"{layer}.") for layer in done):
            continue
        if id(module) in existing:
            done.append(name)
            path = f"path: {type(module).__name__}"
            left[name] = f"already a {'relaxed layer' if isinstance(module, Relaxed) else path}"
            continue
        has_weights = isinstance(module, CONVS) or any(True for _ in module.parameters(False))
        if isinstance(module, NOT_LISTED) or not has_weights:
            continue
        reason = _reason_to_leave(module, calls.get(id(module), []))
        if id(module) in inside:
            reason = "already inside a relaxed layer"
        if reason is None:
            yield name, cast(AnyConv, module)
        else:
            left[name] = reason


def _check_options(model: object, example_input: object, groups: object, precision: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    check_groups(groups)
    number = isinstance(precision, int | float)
    if precision is not None and not (number and precision > 0):
        raise ValueError(f"precision must be a positive number or None, got {precision!r}.")
    if not isinstance(example_input, Tensor | Mapping | list | tuple):
        raise ValueError(
            "example_input must be a tensor, or a tuple or dictionary of tensors, got "
            f"{type(example_input).__name__}."
        )


def _parse(paths: str) -> tuple[FromConv, list[Callable[..., Path]]]:
    """Return the equivariant and the free paths of a string such as "f-fc+conv"."""
    value: object = paths
    if not isinstance(value, str):
        raise ValueError(f'paths must be a string such as "f-fc+conv", got {value!r}.')
    known = {name.replace("-", ""): name for name in (*FREE, *EQUIVARIANT)}
    parts = [part.strip().lower().replace("-", "") for part in paths.split("+")]
    if set(parts) - set(known):
        raise ValueError(f"paths must be names among {list(known.values())}, got {paths!r}.")
    names = [known[part] for part in parts]
    if sum(name in EQUIVARIANT for name in names) != 1 or len(set(names)) < len(names):
        raise ValueError(
            f"paths must name exactly one of {list(EQUIVARIANT)} and each of {list(FREE)} at most "
            f"once, got {paths!r}."
        )
    (equivariant,) = (EQUIVARIANT[name] for name in names if name in EQUIVARIANT)
    return equivariant, [FREE[name] for name in names if name in FREE]


def _reason_to_leave(module: nn.Module, calls: Sequence[ModuleCall]) -> str | None:
    """Return why a module with weights cannot be relaxed, or None if it can."""
    if isinstance(module, nn.Linear):
        if calls and all(call.is_map for call in calls):
            return "already free: separate weights for every position"
        if any(len(call.shape) > 2 for call in calls):
            return "shared by all positions: acts on features"
        return "no positions: acts on features"
    if not isinstance(module, CONVS):
        name = type(module).__name__
        transposed = isinstance(module, ConvTranspose)
        return "a transposed convolution" if transposed else f"{name} has no free path"
    if is_parametrized(module) or "weight" not in local_parameters(module):
        return "its weight is computed (parametrized, weight-normed or pruned)"
    shapes = {call.shape[2:] for call in calls}
    unsupported = unsupported_reason(module)
    reasons = {
        "never called for the example input": not calls,
        f"custom forward pass: {unsupported}": unsupported is not None,
        "called without a batch dimension, or not with one positional tensor": any(
            len(call.shape) != 2 + len(module.kernel_size) for call in calls
        ),
        f"called on maps of different shapes: {sorted(shapes)}": len(shapes) > 1,
        "only one position": any(prod(shape) == 1 for shape in shapes),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _describe(layer: Relaxed) -> str:
    """Describe shapes and parameter counts, as in "1x8x8 -> 4x8x8: Conv (40) + FFC (512)"."""
    first = cast(Path, layer.paths[0])
    c, in_shape, d, out_shape = first.spaces
    sizes = [
        f"{path.label} ({sum(p.numel() for p in path.parameters()):,})"
        for path in cast(Iterable[Path], layer.paths)
    ]
    note = "" if first.strict else ", equivariant up to borders and strides"
    spaces = f"{'x'.join(map(str, (c, *in_shape)))} -> {'x'.join(map(str, (d, *out_shape)))}"
    return f"{spaces}: {' + '.join(sizes)}{note}"
