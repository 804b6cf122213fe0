"""Define `Relaxed`, the sum of paths between the same spaces, each with its own prior."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.devices import run_on_streams
from symrazor.accelerate.torch_internals import has_hooks
from symrazor.core.parameters import weights
from symrazor.groups import Group
from symrazor.layers.conv import AnyConv, Conv, FilterPath, sum_of_convolutions
from symrazor.layers.fully_connected import FFC
from symrazor.layers.gconv import GConv
from symrazor.layers.path import Path
from symrazor.layers.point_group import point_group
from symrazor.layers.subsampling import ADAPTIVE_REDUCTIONS

FREE_PATH_PRECISION = 30.0
"""Prior precision of removable paths that start near the symmetric network.

Low enough to learn what the equivariant path cannot represent, high enough not to learn what it can
(docs/benchmarks-all.md).
"""

START_RATIO = 0.1
"""Initial output of a removable path, relative to the output of the paths that remain."""


def paths_by_subsampling(paths: Sequence[nn.Module], min_stride: int = 2) -> list[list[nn.Module]]:
    """Group filter paths with the same subsampling, which must be applied to their sum.

    Separately, each path would keep the component with its own largest norm. A shift could then
    move the outputs by different steps, and the sum would not be equivariant although every term
    is. Filter paths with a stride below `min_stride` are not grouped.
    """
    groups: dict[object, list[nn.Module]] = {}
    for i, path in enumerate(paths):
        key: object = i
        if isinstance(path, FilterPath) and path.subsampling.stride >= min_stride:
            separate = path.subsampling.stride == 1 and has_hooks(path)
            key = i if separate else (path.subsampling.stride, path.subsampling.reduction)
        groups.setdefault(key, []).append(path)
    return list(groups.values())


def _sum_of_paths(paths: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return the output of one path, or of several filter paths with a common subsampling."""
    filters = [path for path in paths if isinstance(path, FilterPath)]
    if len(filters) < 2:
        y: Tensor = paths[0](x)
        return y
    filters[0].check(x)
    return filters[0].subsampled(sum_of_convolutions([path.conv for path in filters], x))


class Relaxed(nn.Module):
    r"""Relaxed layer: $y = \sum_p \mathrm{path}_p(x)$, where each path has its own prior.

    Filters with a stride are added before the subsampling. The paths are summed, not averaged: with
    the mean of two paths, one of which is small, every layer would halve the signal, and a network
    of eight layers would not start to train.

    Start near the symmetric solution: `scale_free_paths(precision)` shrinks the paths without a
    group, while the equivariant path keeps its He initialisation. Do not start at zero: a product
    of two factors has a saddle point there, and the evidence would remove a path before it could
    learn.

    Args:
        paths: at least one path, all between the same spaces; different groups need different
            names.
        mean: divide the sum by the number of paths.

    Attributes:
        disabled: indices of paths whose output is known to be zero; they are not computed.
    """

    disabled: frozenset[int] = frozenset()

    def __init__(self, paths: Sequence[Path], mean: bool = False) -> None:
        super().__init__()
        if not isinstance(paths, Sequence | nn.ModuleList):
            raise ValueError(f"paths must be a sequence of paths, got {type(paths).__name__}.")
        if not paths:
            raise ValueError("A relaxed layer needs at least one path.")
        modules: list[object] = [*paths]
        invalid = [type(module).__name__ for module in modules if not isinstance(module, Path)]
        if invalid:
            raise ValueError(
                f"paths must contain paths of symrazor.layers, got {invalid}. For a torch.nn "
                "convolution, use Conv.wrap(convolution, in_shape)."
            )
        if len({id(path) for path in paths}) < len(paths):
            raise ValueError("paths contains the same path twice.")
        spaces = {path.spaces for path in paths}
        if len(spaces) > 1:
            raise ValueError(f"All paths must map between the same spaces, got {sorted(spaces)}.")
        _check_group_names(paths)
        _check_reductions(paths)
        self.paths = nn.ModuleList(paths)
        self.mean = mean

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Return the sum of the enabled paths."""
        enabled = [path for i, path in enumerate(self.paths) if i not in self.disabled]
        groups = paths_by_subsampling(enabled, min_stride=1)
        terms = run_on_streams([partial(_sum_of_paths, paths, x) for paths in groups], [x])
        total = sum(terms[1:], terms[0])
        return total / len(self.paths) if self.mean else total

    def path(self, i: int) -> Path:
        """Return the i-th path."""
        return self.path_list[i]

    @property
    def path_list(self) -> list[Path]:
        """All paths, in order."""
        return [path for path in self.paths if isinstance(path, Path)]

    def removable_paths(self) -> list[int]:
        """Return the indices of paths with less symmetry than another path of the layer.

        These are free paths beside an equivariant path, and paths of a subgroup of another's group.
        """
        return [
            i
            for i, path in enumerate(self.path_list)
            if any(_has_more_symmetry(other, path) for other in self.path_list)
        ]

    @torch.no_grad()
    def scale_free_paths(self, precision: float) -> None:
        """Divide the output of paths without a group by sqrt(precision).

        Infinity makes their output exactly zero. This is not a saddle point, because only the last
        factor of a product is scaled: the first factor keeps its size and gives the last factor a
        gradient.
        """
        if not precision > 0:
            raise ValueError(f"precision must be positive, got {precision}.")
        for path in self.path_list:
            if path.group is None:
                path.scale_(precision**-0.5)

    def __repr__(self) -> str:
        labels = " + ".join(path.label for path in self.path_list)
        return f"Relaxed({self.path(0).describe_spaces()}: {labels})"


def _has_more_symmetry(path: Path, other: Path) -> bool:
    if path.group is None:
        return False
    if other.group is None:
        return True
    return path.is_equivariant_under(other) and not other.is_equivariant_under(path)


def _check_group_names(paths: Sequence[Path]) -> None:
    """Raise ValueError if two different groups have the same name, which readings would confuse."""
    for other, path in combinations(paths, 2):
        if path.group is None or path.group != other.group:
            continue
        if not (path.is_equivariant_under(other) and other.is_equivariant_under(path)):
            raise ValueError(
                f"Two different groups of the layer are called {path.group!r}. Rename one of them."
            )


def _check_reductions(paths: Sequence[Path]) -> None:
    """Raise ValueError for two adaptive reductions, whose outputs a shift moves differently."""
    strided = [p.subsampling for p in paths if isinstance(p, FilterPath) and p.stride > 1]
    adaptive = {s.reduction for s in strided if s.reduction in ADAPTIVE_REDUCTIONS}
    if len(adaptive) > 1:
        raise ValueError(
            f"Paths with different reductions are equivariant, but their sum is not: "
            f"{' and '.join(sorted(adaptive))}. Use the same reduction for all paths of a layer."
        )


def spatial_layers(model: nn.Module) -> dict[str, Relaxed | Path]:
    """Return by name every relaxed layer, and every path outside of a relaxed layer."""
    layers: dict[str, Relaxed | Path] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, (Relaxed, Path)) and not inside:
            layers[name] = module
    return layers


def path_groups(model: nn.Module) -> dict[str, list[str]]:
    """Return prior groups with one precision per path, as `Razor(..., prior_groups="path")` uses.

    All tensors of a path share a group: the two factors of `FFC` are tied, and biases count where
    the weights do. Lengthscales and anchors of sparse paths have separate groups, and so has every
    tensor outside of a path.
    """
    theta = weights(model)
    groups: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, Path):
            continue
        start = f"{prefix}." if prefix else ""
        for role, names in module.prior_groups().items():
            members = [start + name for name in names if start + name in theta]
            if members:
                groups[".".join(part for part in (prefix or "path", role) if part)] = members
    inside = {name for names in groups.values() for name in names}
    return groups | {name: [name] for name in theta if name not in inside}


def free_groups(model: nn.Module) -> set[str]:
    """Return the groups of `path_groups` that belong to removable paths."""
    free: set[str] = set()
    for prefix, layer in spatial_layers(model).items():
        start = f"{prefix}." if prefix else ""
        removable = layer.removable_paths() if isinstance(layer, Relaxed) else []
        free |= {f"{start}paths.{i}" for i in removable}
    return free


def balance_(model: nn.Module, group_of: Mapping[str, str]) -> None:
    """Balance every path whose factors share a prior group; see `Path.balance_`."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, Path) and module.balanced_parameters:
            groups = {group_of.get(name_of[id(factor)]) for factor in module.balanced_parameters}
            if len(groups) == 1 and None not in groups:
                module.balance_()


def _root_mean_square(y: Tensor) -> float:
    return float(y.square().mean().sqrt())


@torch.no_grad()
def start_near_(model: nn.Module, x: Tensor) -> None:
    """Scale the output of removable paths to a tenth of the output of the paths that remain.

    The ratio is one of root mean squares on the inputs x, layer by layer, so that the start does
    not depend on the initial scale of the removable paths. Outputs that are zero remain zero. If a
    convolution is removable, the remaining paths replace it: their sum is scaled to the largest
    output of all paths with a group. The sum of all would grow from layer to layer.
    """

    def scale(layer: nn.Module, args: tuple[Tensor]) -> None:
        assert isinstance(layer, Relaxed)
        paths, removable = layer.path_list, layer.removable_paths()
        outputs = [path(args[0]) for path in paths]
        remaining = [i for i in range(len(paths)) if i not in removable]
        target = _root_mean_square(torch.stack([outputs[i] for i in remaining]).sum(0))
        if not target:
            return
        if any(paths[i].group for i in removable):
            with_group = [y for path, y in zip(paths, outputs, strict=True) if path.group]
            largest = max(map(_root_mean_square, with_group))
            for i in remaining:
                paths[i].scale_(largest / target)
            target = largest
        for i in removable:
            size = _root_mean_square(outputs[i])
            if size > 0:
                paths[i].scale_(target * START_RATIO / size)

    relaxed = [module for module in model.modules() if isinstance(module, Relaxed)]
    layers = [layer for layer in relaxed if layer.removable_paths()]
    handles = [layer.register_forward_pre_hook(scale) for layer in layers]
    try:
        if layers:
            model(x)
    finally:
        for handle in handles:
            handle.remove()


FromConv = Callable[[AnyConv, Sequence[int]], Path]
"""Constructor of an equivariant path from a convolution and the size of its input."""


def relaxed_convolution(
    conv: AnyConv,
    in_shape: Sequence[int],
    equivariant: FromConv = Conv.wrap,
    free: Sequence[Callable[..., Path]] = (FFC,),
    group_paths: Sequence[Path] = (),
) -> Relaxed:
    """Return the sum of a convolution and other paths, with its device and dtype.

    Args:
        conv: the convolution.
        in_shape: size of its input.
        equivariant: makes the first path from the convolution.
        free: each makes a free path between the same spaces.
        group_paths: paths for further groups, from `split_off`.
    """
    mode, like = conv.training, conv.weight
    first = equivariant(conv, in_shape)
    channels = conv.in_channels, conv.out_channels
    with torch.device("cpu"):  # the same random draw on every device
        free_paths = [make(*channels, in_shape, out_shape=first.out_shape) for make in free]
    return Relaxed([first, *group_paths, *free_paths]).to(like).train(mode)


def split_off(
    conv: AnyConv, in_shape: Sequence[int], groups: Sequence[str | Group], is_image: bool
) -> tuple[list[Path], dict[str, str]]:
    """Split off a path for each point group, the largest first, from a convolution.

    Returns the paths, and for each group that does not fit the layer its name and the reason.
    """
    paths: list[Path] = []
    reasons: dict[str, str] = {}
    for group in sorted(dict.fromkeys(groups), key=lambda group: -point_group(group).order):
        try:
            paths.insert(0, GConv.split_off(conv, in_shape, group, is_image))
        except ValueError as error:
            reasons[point_group(group).name] = str(error).removesuffix(".")
    return paths, reasons
