"""Start a relaxed network from a trained strict network that it contains.

A relaxed network contains the strict one: it computes the same outputs where the additional paths
are zero. Comparing the two from one trained state, instead of from two trainings, cancels most of
the noise in the difference of their evidences.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.layers.conv import AnyConv, Conv
from symrazor.layers.equivariant import EquivariantLinear, InvariantBias
from symrazor.layers.gconv import GConv
from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed, spatial_layers
from symrazor.layers.subsampling import GroupPool

NEARLY_CLOSED_PRECISION = 1e6
"""Default precision of opened paths: their output starts at about 1/1000 of its usual size."""
TOLERANCE = 1e-4
"""Part of a strict map, relative to its largest entry, that rounding may leave over."""


@torch.no_grad()
def open_paths(
    strict: nn.Module, relaxed: nn.Module, precision: float = NEARLY_CLOSED_PRECISION
) -> None:
    """Copy the weights of a strict network into a relaxed one, whose other paths start near zero.

    Modules are matched by name. In each relaxed layer, the paths that the strict layer has take its
    weights. If the relaxed layer splits the strict maps over the paths of several groups, each path
    takes its part. Free paths are drawn at their usual size and divided by sqrt(precision). The
    factors of a free path get equal norms, so that neither of them loses its gradient.

    Args:
        strict: a trained network; not changed.
        relaxed: the same network with more paths, such as `relax(strict, x)` or the relaxed
            candidate of `discover`; changed in place. It may have any weights.
        precision: the larger, the closer the outputs are to those of the strict network. With
            infinity they are equal up to rounding, and the gradient of the free paths is not
            zero.

    Raises:
        ValueError: if precision is not positive, or the relaxed network does not contain the strict
            one.
    """
    if not precision > 0:
        raise ValueError(f"precision must be positive, got {precision}.")
    layers = spatial_layers(relaxed)
    sources = dict(strict.named_modules())
    missing = sorted(layers.keys() - sources.keys())
    if missing:
        raise _not_contained(f"the strict network has no module {missing[0]!r}")
    inside = tuple(f"{name}." if name else "" for name in layers)
    state, shared = strict.state_dict(), relaxed.state_dict()
    for name, source in sources.items():
        if _averages_elements(source):
            pool, head = source[0], source[1]
            weight = head.weight.repeat(1, pool.elements) / pool.elements
            state |= {f"{name}.weight": weight, f"{name}.bias": head.bias}
    plain = {name for name in shared if not name.startswith(inside)} if inside else set(shared)
    for name in sorted(plain):
        if name not in state or state[name].shape != shared[name].shape:
            raise _not_contained(f"the strict network has no tensor {name!r} of the same shape")
        shared[name].copy_(state[name])
    for name, layer in layers.items():
        paths = layer.path_list if isinstance(layer, Relaxed) else [layer]
        try:
            _copy_layer(sources[name], paths)
        except ValueError as error:
            raise _not_contained(f"layer {name!r}: {error}") from error
        for path in paths:
            if path.group is None:
                _nearly_close(path, precision)


def _averages_elements(module: nn.Module) -> bool:
    """Return whether a module is the head of `group_convolutional`."""
    parts = list(module) if isinstance(module, nn.Sequential) else []
    kinds = [type(part) for part in parts]
    return kinds == [GroupPool, nn.Linear] and parts[0].how == "mean"


def _not_contained(reason: str) -> ValueError:
    return ValueError(
        f"The relaxed network does not contain the strict one: {reason}. Make it with "
        "symrazor.relax(strict, x)."
    )


def _copy_layer(source: nn.Module, paths: list[Path]) -> None:
    """Set the paths with a group such that their sum is the map of a strict layer."""
    strict = source.path_list if isinstance(source, Relaxed) else [source]
    if all(isinstance(path, EquivariantLinear) for path in strict):
        _copy_linear([path for path in strict if isinstance(path, EquivariantLinear)], paths)
        return
    if len(strict) != 1:
        raise ValueError("it has several paths that are not linear maps of positions")
    conv = strict[0].dense() if isinstance(strict[0], GConv) else strict[0]
    conv = conv.conv if isinstance(conv, Conv) else conv
    targets = [path for path in paths if isinstance(path, Conv)]
    if not isinstance(conv, AnyConv) or len(targets) != 1:
        raise ValueError("it needs one convolution, in the strict and in the relaxed network")
    target = targets[0].conv
    if target.weight.shape != conv.weight.shape or (conv.bias is None) != (target.bias is None):
        raise ValueError("the two convolutions have different shapes")
    target.load_state_dict(conv.state_dict())
    for path in sorted(paths, key=lambda path: -_order(path)):  # as `relax` splits them off
        if isinstance(path, GConv):
            path.take_from_(target)


def _order(path: Path) -> int:
    return path.point_group.order if isinstance(path, GConv) else 0


def _copy_linear(strict: list[EquivariantLinear], paths: list[Path]) -> None:
    """Project the maps and biases of strict linear layers onto the paths of a relaxed layer."""
    spaces = {path.spaces for path in (*strict, *paths)}
    if len(spaces) > 1:
        raise ValueError(f"the layers map between different spaces, {sorted(spaces)}")
    maps = torch.stack([_maps(path) for path in strict]).sum(0)
    biases = torch.stack([_biases(path) for path in strict]).sum(0)
    size = float(maps.abs().max())
    for path in paths:
        if not isinstance(path, EquivariantLinear):
            continue
        # Maps that do not commute with the strict group may still overlap with its maps.
        share = all(path.maps.commutes(*s.representations) for s in strict if s.representations)
        Q = path.maps.matrices() * share
        values = torch.einsum("bts,oits->oib", Q, maps) / path.maps.matrices().square().sum((1, 2))
        path.map.weight.copy_(values)
        maps = maps - torch.einsum("oib,bts->oits", values, Q)
        if isinstance(path.offset, InvariantBias):
            q = path.offset.basis.double().cpu()
            values = share * biases @ q.T / q.square().sum(1)
            path.offset.values.copy_(values)
            biases = biases - values @ q
    if max(float(maps.abs().max()), float(biases.abs().max())) > TOLERANCE * size:
        raise ValueError("its paths do not contain the maps of the strict layer")


def _maps(path: EquivariantLinear) -> Float[Tensor, "o i t s"]:
    W = path.map.matrix().double().cpu()
    shape = path.out_channels, path.map.t, path.in_channels, path.map.s
    return W.reshape(shape).transpose(1, 2)


def _biases(path: EquivariantLinear) -> Float[Tensor, "o t"]:
    offset = path.offset
    if not isinstance(offset, InvariantBias):
        return torch.zeros(path.out_channels, path.pixels_out, dtype=torch.float64)
    return (offset.values @ offset.basis).double().cpu()


def _nearly_close(path: Path, precision: float) -> None:
    """Make the output of a free path small but not zero, for a finite precision."""
    for parameter in path.output_weights:
        if parameter.dim() > 1 and not bool(parameter.any()):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    path.scale_(precision**-0.5)
    path.balance_()
