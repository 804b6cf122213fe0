r"""An ordinary network with its convolutions relaxed, in one call.

$$ \mathrm{conv}(x) \;\longrightarrow\; \mathrm{conv}(x) + \sum_p \mathrm{free}_p(x) $$

Every convolution becomes the equivariant path of a `Relaxed` layer; the free paths beside it start
at zero, so that the network computes what it did before and the evidence decides what they may add.
A relaxed layer knows its positions one by one: the network then takes inputs of the example's
spatial shape only.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from symrazor.core.parameters import Hyper
from symrazor.curvature.coverage import unsupported_reason
from symrazor.curvature.tape import Input
from symrazor.groups import Group
from symrazor.layers.conv import AnyConv, Conv
from symrazor.layers.fully_connected import FC, FFC
from symrazor.layers.gconv import GConv
from symrazor.layers.path import Path
from symrazor.layers.point_group import PointGroup, point_group
from symrazor.layers.relaxed import Relaxed, spatial_layers
from symrazor.layers.sparse_conv import SConv
from symrazor.layers.sparse_factored import SFC
from symrazor.symmetry.batchnorm import copy_of
from symrazor.symmetry.relax_linear import relax_linear
from symrazor.symmetry.relaxation import CONVS, Call, Relaxation, replaced, watch

TRANSLATIONS = ("translation",)
POINT_GROUPS = ("p2", "p4", "pm", "p2m", "p4m", "O", "Oh")
"""Groups of square and cubic grids with more than translations."""


def of_the_grid(group: Group) -> PointGroup | None:
    """A finite group of matrices that map square or cubic grids to themselves; None for others."""
    if group.permutations is not None or group.size not in (2, 3) or not group.is_discrete:
        return None
    own = point_group(group)
    return own if own.exact else None


def named(group: str | Group) -> str | Group:
    """A group of the grid by its name, if we have one, as in p4 for cyclic(4); else as it is."""
    own = None if isinstance(group, str) else of_the_grid(group)
    return group if own is None or own.name not in (*TRANSLATIONS, *POINT_GROUPS) else own.name


def check_groups(groups: object) -> None:
    """Raise ValueError for what no convolution can be relaxed with.

    That is a group that is none of the grid, none at all, one that moves nothing, or two with the
    same elements: data cannot tell these apart.
    """
    wanted: list[Any] = [*groups] if isinstance(groups, list | tuple | set) else [groups]
    known = [*TRANSLATIONS, *POINT_GROUPS]
    own = [group for group in wanted if isinstance(group, Group) and of_the_grid(group)]
    if not set(TRANSLATIONS) <= set(wanted) or set(wanted) - {*known, *own}:
        raise ValueError(
            f"expected groups among {known}, or finite ones of matrices that map the grid to "
            f"itself, translation in any case, got {wanted}"
        )
    others = [point_group(group) for group in dict.fromkeys(wanted) if group not in TRANSLATIONS]
    for one in others:
        if one.order == 1:
            raise ValueError(
                f"expected groups that turn or mirror the grid, got {one.name}, which leaves all "
                "as it is; do: leave it out"
            )
    for one, other in combinations(others, 2):
        if one.order == other.order and one.group.is_subgroup_of(other.group):
            raise ValueError(
                f"expected groups with different elements, got {one.name} and {other.name}, which "
                "have the same; do: leave one of them out"
            )


FromConv = Callable[[AnyConv, Sequence[int]], Path]


def _sparse(conv: AnyConv, in_shape: Sequence[int]) -> Path:
    """Anchors fitted to a convolution; where a stride or padding forbids it, the convolution."""
    path = Conv.wrap(conv, in_shape)
    return SConv.from_conv(path) if SConv.can_fit(path) else path


EQUIVARIANT: dict[str, FromConv] = {"conv": Conv.wrap, "s-conv": _sparse}
"""Name -> a path made of (convolution, in_shape); its `out_shape` is the convolution's."""

FREE: dict[str, Callable[..., Path]] = {"f-fc": FFC, "fc": FC, "s-fc": SFC}
"""Name -> a path made of (in_channels, out_channels, in_shape, out_shape=...)."""

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _InstanceNorm)
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
    """A copy of a network in which every convolution on a map is a `Relaxed` layer.

    The equivariant path is the convolution itself, with its stride, padding and frozen weights; the
    free paths map the same input to the same output shape, in its precision and on its device. They
    are trainable even where the convolution is frozen. `relaxation(model)` says what was changed
    and what was left, and why.

    Args:
        model: any module; it stays as it is. Convolutions may be nested and called several times.
        example_input: one batch, whose spatial shape becomes that of the network; a tuple or
            dictionary of tensors is spread over the arguments of the model.
        groups: the symmetries to relax: ["translation"], or with rotations and reflections as in
            ["translation", "p4", "p4m"] (in three dimensions "O" and "Oh", those of a
            cube); or with any finite group of matrices that map the grid to itself, as in
            ["translation", symrazor.groups.cyclic(4)]. For each of these the
            part of a convolution that is equivariant to it becomes a path of its own,
            and the convolution keeps the rest (`GConv.split_off`), the largest group
            first served.
            Channels are taken as a regular representation, (element, field);
            the first convolution sees an image. Where channels, strides or maps do not fit the
            group, there is no such path, and the account says why. Or `symrazor.groups.Group`s,
            on n places: then dense layers on c n features (channel, place), and those that the
            places of [batch, n, c] share, get a strict path for each, and a free one for the rest;
            `paths`, `precision` and `seed` are not used.
        paths: names joined by "+", one of them equivariant: "f-fc+conv", "fc+conv", "s-fc+conv",
            "s-fc+s-conv", "conv". S-CONV is fitted to the convolution by least squares, so that
            outputs change; convolutions with a stride of their own stay CONV.
        precision: free paths are drawn from a prior of this precision, relative to their usual
            start, see `Relaxed.scale_free_paths`. None: the last factor of each is zero and the
            others are drawn, so that the outputs are those of `model`, yet no saddle.
        seed: of that draw; None for the global random state, which nothing else here moves.

    Raises:
        ValueError: bad options, an input that the model cannot take, BatchNorm, no layer to relax,
            or a forward pass that reaches around its modules.
    """
    alone: object = groups
    if isinstance(alone, Group):
        raise ValueError(f"expected a list of groups, got {alone!r}; do: put it into a list")
    given = [group for group in groups if isinstance(group, Group)] if groups else []
    on_maps = isinstance(example_input, Tensor) and example_input.dim() > 3
    turns = on_maps and all(of_the_grid(group) for group in given)  # translations are missing
    if given and len(given) == len(groups) and not turns and isinstance(model, nn.Module):
        return relax_linear(model, example_input, given)
    groups = [named(group) for group in groups] if given else groups
    _check_options(model, example_input, groups, precision)
    listed = [groups] if isinstance(groups, str) else groups
    equivariant, free = _parse(paths)
    relaxed = copy_of(model)
    coupled = [name for name, m in relaxed.named_modules() if isinstance(m, _BatchNorm)]
    if coupled:
        raise ValueError(
            f"expected a model that treats data one by one, got BatchNorm at {coupled}; replace it "
            "first: symrazor.replace_batchnorm(model), or with fold=True if the model is trained"
        )
    before, calls = watch(relaxed, example_input)
    account, new, missing = Relaxation({}, {}), dict[int, Relaxed](), dict[int, str]()
    with torch.random.fork_rng([], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        for name, conv in _convolutions(relaxed, calls, account.left):
            if id(conv) not in new:
                seen = calls[id(conv)][0]
                turned, missing[id(conv)] = _split(conv, seen, listed)
                layer = _relaxed(conv, seen.shape[2:], equivariant, free, turned)
                layer.scale_free_paths(math.inf if precision is None else precision)
                new[id(conv)] = layer
            account.changed[name] = _describe(new[id(conv)]) + missing[id(conv)]
    exact = precision is None and equivariant == Conv.wrap
    relaxed = replaced(relaxed, {**new}, example_input, before if exact else None, account)
    _log.info("%s", account)
    return relaxed


def _convolutions(
    model: nn.Module, calls: Mapping[int, Sequence[Call]], left: dict[str, str]
) -> Iterator[tuple[str, AnyConv]]:
    """Those to relax, by name; why other modules with weights are not is written to `left`."""
    old = {id(layer): layer for layer in spatial_layers(model).values()}
    inside = {id(m) for layer in old.values() for m in layer.modules()}
    done: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(not layer or name.startswith(f"{layer}.") for layer in done):
            continue
        if id(module) in old:
            done.append(name)
            left[name] = _already(module)
            continue
        weighty = isinstance(module, CONVS) or any(True for _ in module.parameters(False))
        if isinstance(module, NOT_LISTED) or not weighty:
            continue
        reason = _reason_to_leave(module, calls.get(id(module), []))
        if id(module) in inside:
            reason = "already inside a relaxed layer"
        if reason is None:
            yield name, cast(AnyConv, module)
        else:
            left[name] = reason


def _already(layer: nn.Module) -> str:
    """Why a layer of this library is left."""
    kind = "relaxed layer" if isinstance(layer, Relaxed) else f"path: {type(layer).__name__}"
    return f"already a {kind}"


def _check_options(model: object, example_input: object, groups: object, precision: Any) -> None:
    """Raise ValueError for what no network can be relaxed with."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}")
    check_groups(groups)
    number = isinstance(precision, int | float)
    if precision is not None and not (number and precision > 0):
        raise ValueError(f"expected a positive precision or None, got {precision!r}")
    if not isinstance(example_input, Tensor | Mapping | list | tuple):
        raise ValueError(
            "expected example_input as a tensor, or a tuple or dictionary of tensors, got "
            f"{type(example_input).__name__}"
        )


def _parse(paths: str) -> tuple[FromConv, list[Callable[..., Path]]]:
    """The equivariant path and the free ones of a string such as "f-fc+conv"."""
    given: object = paths
    if not isinstance(given, str):
        raise ValueError(f'expected paths as a string such as "f-fc+conv", got {given!r}')
    known = {name.replace("-", ""): name for name in (*FREE, *EQUIVARIANT)}
    parts = [part.strip().lower().replace("-", "") for part in paths.split("+")]
    if set(parts) - set(known):
        raise ValueError(f"expected paths among {list(known.values())}, got {paths!r}")
    names = [known[part] for part in parts]
    if sum(name in EQUIVARIANT for name in names) != 1 or len(set(names)) < len(names):
        raise ValueError(
            f"expected exactly one path among {list(EQUIVARIANT)} and each of {list(FREE)} at most "
            f"once, got {paths!r}"
        )
    (equivariant,) = (EQUIVARIANT[name] for name in names if name in EQUIVARIANT)
    return equivariant, [FREE[name] for name in names if name in FREE]


def _reason_to_leave(module: nn.Module, calls: Sequence[Call]) -> str | None:
    """Why a module with weights cannot be relaxed, or None."""
    if isinstance(module, nn.Linear):
        if calls and all(seen.is_map for seen in calls):
            return "already free: every position has its own weights"
        if any(len(seen.shape) > 2 for seen in calls):
            return "shared by all positions: acts on features"
        return "no positions: acts on features"
    if not isinstance(module, CONVS):
        turned = isinstance(module, _ConvTransposeNd)
        return "a transposed convolution" if turned else f"{type(module).__name__} has no free path"
    if is_parametrized(module) or "weight" not in module._parameters:
        return "its weight is computed from others (parametrized, weight-normed or pruned)"
    shapes = {seen.shape[2:] for seen in calls}
    unsupported = unsupported_reason(module)
    reasons = {
        "never called for the example input": not calls,
        f"a forward pass of its own: {unsupported}": unsupported is not None,
        "called without a batch dimension, or not with one positional tensor": any(
            len(seen.shape) != 2 + len(module.kernel_size) for seen in calls
        ),
        f"called on maps of different shapes: {sorted(shapes)}": len(shapes) > 1,
        "only one position": any(prod(shape) == 1 for shape in shapes),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _relaxed(
    conv: AnyConv,
    in_shape: Sequence[int],
    equivariant: FromConv,
    free: Sequence[Callable[..., Path]],
    turned: Sequence[Path] = (),
) -> Relaxed:
    """The sum of all paths, where and in what precision the convolution is."""
    mode, like = conv.training, conv.weight
    first = equivariant(conv, in_shape)
    channels = conv.in_channels, conv.out_channels
    with torch.device("cpu"):  # one draw for all devices
        others = [make(*channels, in_shape, out_shape=first.out_shape) for make in free]
    return Relaxed([first, *turned, *others]).to(like).train(mode)


def _split(conv: AnyConv, seen: Call, groups: Sequence[str | Group]) -> tuple[list[Path], str]:
    """Paths for the groups with rotations, the largest group first served; and why some are not."""
    found: list[Path] = []
    missing = ""
    others = dict.fromkeys(group for group in groups if group not in TRANSLATIONS)
    for group in sorted(others, key=lambda one: -point_group(one).order):
        try:
            found.insert(0, GConv.split_off(conv, seen.shape[2:], group, seen.is_image))
        except ValueError as error:
            missing += f"; no {point_group(group).name}: {error}"
    return found, missing


def _describe(layer: Relaxed) -> str:
    """Spaces and numbers of parameters, as in "1x8x8 -> 4x8x8: Conv (40) + FFC (512)"."""
    first = cast(Path, layer.paths[0])
    c, in_shape, d, out_shape = first.spaces
    sizes = [
        f"{path.label} ({sum(p.numel() for p in path.parameters()):,})"
        for path in cast(Iterable[Path], layer.paths)
    ]
    near = "" if first.strict else ", equivariant up to borders and strides"
    spaces = f"{'x'.join(map(str, (c, *in_shape)))} -> {'x'.join(map(str, (d, *out_shape)))}"
    return f"{spaces}: {' + '.join(sizes)}{near}"
