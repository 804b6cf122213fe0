"""A relaxed layer: the sum of paths between the same spaces, each with a prior of its own."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.cuda_graphs import run_on_streams
from symrazor.accelerate.torch_internals import has_hooks
from symrazor.core.parameters import weights
from symrazor.layers.conv import Filtered, convolved
from symrazor.layers.path import Path
from symrazor.layers.subsampling import ADAPTIVE


def joint(paths: Sequence[nn.Module], least: int = 2) -> list[list[nn.Module]]:
    """Paths by their subsampling: filters that are shrunk alike are shrunk together.

    Each of them alone would keep the component with its own largest norm, and a shift would move
    their outputs by different steps: the sum would not be equivariant though every term is.

    Args:
        paths: of a layer.
        least: filters with a smaller stride stay alone.
    """
    found: dict[object, list[nn.Module]] = {}
    for i, path in enumerate(paths):
        key: object = i
        if isinstance(path, Filtered) and path.shrink.stride >= least:
            alone = path.shrink.stride == 1 and has_hooks(path)
            key = i if alone else (path.shrink.stride, path.shrink.reduction)
        found.setdefault(key, []).append(path)
    return list(found.values())


def _together(paths: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The sum of paths that are shrunk together."""
    filters = [path for path in paths if isinstance(path, Filtered)]
    if len(filters) < 2:
        y: Tensor = paths[0](x)
        return y
    filters[0].check(x)
    y = filters[0].shrink(convolved([path.conv for path in filters], x))
    return y


class Relaxed(nn.Module):
    r"""$y = \sum_p \mathrm{path}_p(x)$; filters with a stride are added up before they are shrunk.

    The sum, not the mean: with the mean of two paths, one of them small, every layer halves the
    signal, and eight of them do not start to train.

    Start near the symmetric solution: `scale_free_paths(precision)` draws the paths without a group
    from their prior, while the equivariant one keeps its He initialisation. Not at zero: a product
    of two factors has a saddle there, and the evidence would switch off a path that never had a
    chance.

    Args:
        paths: at least one, all between the same spaces; different groups by different names.
        mean: divide by the number of paths.

    Attributes:
        disabled: paths whose output is known to be zero; they are not computed.
    """

    disabled: frozenset[int] = frozenset()

    def __init__(self, paths: Sequence[Path], mean: bool = False) -> None:
        """Check that the paths fit together."""
        super().__init__()
        if not isinstance(paths, Sequence | nn.ModuleList):
            raise ValueError(f"expected a sequence of paths, got {type(paths).__name__}")
        if not paths:
            raise ValueError("expected at least one path, got none")
        given: list[object] = [*paths]
        others = [type(path).__name__ for path in given if not isinstance(path, Path)]
        if others:
            raise ValueError(
                f"expected paths of symrazor.layers, got {others}; for a torch.nn convolution: "
                "Conv.wrap(convolution, in_shape)"
            )
        if len({id(path) for path in paths}) < len(paths):
            raise ValueError("expected distinct paths, got one of them twice")
        spaces = {path.spaces for path in paths}
        if len(spaces) > 1:
            raise ValueError(f"expected paths between the same spaces, got {sorted(spaces)}")
        _check_names(paths)
        _check_choices(paths)
        self.paths = nn.ModuleList(paths)
        self.mean = mean

    def forward(self, x: Float[Tensor, "n c *size"]) -> Float[Tensor, "n d *small"]:
        """Add the paths up."""
        heard = [path for i, path in enumerate(self.paths) if i not in self.disabled]
        terms = run_on_streams(
            [partial(_together, paths, x) for paths in joint(heard, least=1)], [x]
        )
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total / len(self.paths) if self.mean else total

    def path(self, i: int) -> Path:
        """The i-th path."""
        path = self.paths[i]
        assert isinstance(path, Path)
        return path

    def removable_paths(self) -> list[int]:
        """Paths beside a stricter one: free ones, and those of a smaller group than another's."""
        paths = [self.path(i) for i in range(len(self.paths))]
        return [
            i
            for i, one in enumerate(paths)
            if any(
                other.group is not None
                and (
                    one.group is None
                    or (other.is_equivariant_under(one) and not one.is_equivariant_under(other))
                )
                for other in paths
            )
        ]

    @torch.no_grad()
    def scale_free_paths(self, precision: float) -> None:
        """Draw the paths without a group from a prior of this precision relative to their start.

        Their output shrinks by sqrt(precision). Infinity makes it zero, exactly; it is still no
        saddle, because only the last factor of a product is scaled: the first one keeps its size,
        and with it the last one has a gradient.
        """
        if not precision > 0:
            raise ValueError(f"expected a positive precision, got {precision}")
        for path in self.paths:
            if path.group is None:
                path.scale_(precision**-0.5)


def _check_names(paths: Sequence[Path]) -> None:
    """Readings tell groups apart by name: two of one name would be taken for one."""
    for i, one in enumerate(paths):
        for other in paths[:i]:
            alike = one.group is None or one.group != other.group
            if not alike and not (
                one.is_equivariant_under(other) and other.is_equivariant_under(one)
            ):
                raise ValueError(
                    f"expected a name of its own for each group of a layer, got {one.group!r} for "
                    "two that act differently; do: give one of them another name"
                )


def _check_choices(paths: Sequence[Path]) -> None:
    """Two choices of a component: shifts move their outputs by different steps."""
    shrunk = [path.shrink for path in paths if isinstance(path, Filtered)]
    found = {one.reduction for one in shrunk if one.stride > 1 and one.reduction in ADAPTIVE}
    if len(found) > 1:
        raise ValueError(
            f"expected one reduction for all paths of a layer, got {' and '.join(sorted(found))}: "
            "each is equivariant, and their sum is not; do: use one of them"
        )


def spatial_layers(model: nn.Module) -> dict[str, Relaxed | Path]:
    """Every relaxed layer, and every path outside of one, by name."""
    found: dict[str, Relaxed | Path] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, (Relaxed, Path)) and not inside:
            found[name] = module
    return found


def path_groups(model: nn.Module) -> dict[str, list[str]]:
    """Prior groups with one precision per path; what `Razor(..., prior_groups="path")` uses.

    All tensors of a path share a group, so that the two factors of `FFC` are tied and its biases
    count where its weights do; lengthscales and anchors of sparse paths have groups of their own.
    Every tensor outside of a path is a group of its own.
    """
    theta = weights(model)
    groups: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Path):
            start = f"{prefix}." if prefix else ""
            for role, names in module.prior_groups().items():
                own = [start + name for name in names if start + name in theta]
                if own:
                    groups[".".join(part for part in (prefix or "path", role) if part)] = own
    inside = {name for names in groups.values() for name in names}
    return groups | {name: [name] for name in theta if name not in inside}


def free_groups(model: nn.Module) -> set[str]:
    """Those groups of `path_groups` that a relaxed layer with a stricter path could lack."""
    free: set[str] = set()
    for prefix, layer in spatial_layers(model).items():
        start = f"{prefix}." if prefix else ""
        loose = layer.removable_paths() if isinstance(layer, Relaxed) else []
        free |= {f"{start}paths.{i}" for i in loose}
    return free


def balance_(model: nn.Module, group_of: Mapping[str, str]) -> None:
    """Balance the factors of every path whose factors share a prior group; see `Path.balance_`."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, Path) and module.balanced:
            groups = {group_of.get(name_of[id(factor)]) for factor in module.balanced}
            if len(groups) == 1 and None not in groups:
                module.balance_()


FREE_PATH_PRECISION = 30.0
"""Precision of loose paths near the symmetric network: loose enough to learn what is left, tight
enough not to learn what the equivariant path can (docs/results.md)."""

START_RATIO = 0.1
"""Output of a loose path near the symmetric network, over that of the stricter paths."""


def _size(y: Tensor) -> float:
    """Root mean square."""
    return float(y.square().mean().sqrt())


@torch.no_grad()
def start_near_(model: nn.Module, x: Tensor) -> None:
    """Scale the output of loose paths to a tenth of that of the stricter paths beside them.

    The ratio is that of root mean squares on the inputs x, layer after layer: whatever the scale a
    loose path was drawn with, it starts alike. An output that is zero stays so. Where a convolution
    is among the loose paths, the stricter ones take over from it: they add up to what the largest
    of all paths with a group had, and not to the sum, which would grow from layer to layer.
    """

    def scale(layer: nn.Module, args: tuple[Tensor]) -> None:
        assert isinstance(layer, Relaxed)
        outputs, loose = (
            [layer.path(i)(args[0]) for i in range(len(layer.paths))],
            layer.removable_paths(),
        )
        strict = [i for i in range(len(outputs)) if i not in loose]
        wanted = _size(torch.stack([outputs[i] for i in strict]).sum(0))
        if not loose or not wanted:
            return
        if any(layer.path(i).group for i in loose):
            largest = max(_size(y) for i, y in enumerate(outputs) if layer.path(i).group)
            for i in strict:
                layer.path(i).scale_(largest / wanted)
            wanted = largest
        for i in loose:
            size = _size(outputs[i])
            if size > 0:
                layer.path(i).scale_(wanted * START_RATIO / size)

    layers = [module for module in model.modules() if isinstance(module, Relaxed)]
    handles = [layer.register_forward_pre_hook(scale) for layer in layers]
    try:
        if layers:
            model(x)
    finally:
        for handle in handles:
            handle.remove()
