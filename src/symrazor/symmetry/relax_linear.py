r"""Relax the dense layers of a network: `relax(model, x, groups=[group, ...])`.

A dense layer on vectors of c n numbers, ordered (channel, place), or a dense layer that all places
of a set [batch, n, c] share, is a matrix W on channels and places. Its projection onto the matrices
that commute with a group becomes one path; a free path keeps the remainder:

$$ u[o, i, b] = \frac1t \langle Q_b, W[o, i] \rangle, \qquad
   W = \sum_b u[\cdot, \cdot, b]\, Q_b + W_{\text{free}} . $$

The paths are orthogonal, and the outputs stay the same.
"""

from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import local_parameters
from symrazor.data.batches import Input
from symrazor.groups import Group, defining, equivariant_maps, invariant
from symrazor.layers.equivariant import EquivariantLinear, InvariantBias, relaxed_over
from symrazor.layers.fully_connected import FC
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.breaking import record_calls
from symrazor.symmetry.replacement import Relaxation, copy_model, replace_and_check


@torch.no_grad()
def split_dense(
    weight: Float[Tensor, "ot is"],
    bias: Float[Tensor, " ot"] | None,
    groups: Sequence[Group],
    pool: bool = False,
) -> Relaxed:
    """Split a dense matrix on (channel, place) into a strict path for every group and a free path.

    Args:
        weight: matrix whose outputs are (channel, place), or channels only if they are invariant.
        bias: bias of every output, or None.
        groups: groups on the same n places.
        pool: whether the outputs are invariant; for a single group.
    """
    n = groups[0].size
    t = 1 if pool else n
    d, c = len(weight) // t, weight.shape[1] // n
    if pool:
        (group,) = groups
        strict = EquivariantLinear(c, d, defining(group), invariant(group))
        layer = Relaxed([strict, FC(c, d, (n,), out_shape=(1,))])
    else:
        layer = relaxed_over(c, d, groups)
    layer.to(weight)
    remainder = weight.detach().clone().reshape(d, t, c, n)
    remaining_bias = weight.new_zeros(d, t) if bias is None else bias.detach().clone().reshape(d, t)
    *strict_paths, free = layer.paths
    for path in strict_paths:
        assert isinstance(path, EquivariantLinear)
        path.map.weight.copy_(
            torch.einsum("bts,otis->oib", path.maps.matrices().to(remainder), remainder) / t
        )
        remainder = remainder - path.map.matrix().reshape(d, t, c, n)
        if isinstance(path.offset, InvariantBias):
            basis = path.offset.basis
            path.offset.values.copy_(remaining_bias @ basis.T / basis.square().sum(1))
            remaining_bias = remaining_bias - path.offset.values @ basis
    assert isinstance(free, FC)
    free.linear.weight.copy_(remainder.reshape(d * t, c * n))
    free.linear.bias.copy_(remaining_bias.reshape(-1))
    return layer


class Swap(nn.Module):
    """Exchange places and channels of [batch, places, channels]."""

    def forward(self, x: Float[Tensor, "n a b"]) -> Float[Tensor, "n b a"]:
        """Transpose the last two dimensions."""
        return x.transpose(1, 2)


def _relaxed(
    linear: nn.Linear, shape: Sequence[int], groups: Sequence[Group], last: bool
) -> nn.Module | str:
    """Return a relaxed dense layer, or the reason why it cannot be relaxed."""
    n = groups[0].size
    if len(shape) == 3 and shape[1] == n:
        identity = torch.eye(n).to(linear.weight)
        shared_bias = local_parameters(linear)["bias"]
        bias = None if shared_bias is None else shared_bias.repeat_interleave(n)
        weight = torch.kron(linear.weight.detach().contiguous(), identity)
        layer = split_dense(weight, bias, groups)
        return nn.Sequential(Swap(), layer, Swap())
    inputs, outputs = linear.in_features, linear.out_features
    if len(shape) != 2 or inputs % n:
        return f"acts on {list(shape)}, not on [batch, c x {n}] or [batch, {n}, c]"
    pool = bool(outputs % n)
    if pool and not last:
        return f"its {outputs} outputs are not a multiple of {n} places"
    if pool and len(groups) > 1:
        return f"its {outputs} outputs are not a multiple of {n} places, which needs a single group"
    if pool and not equivariant_maps(defining(groups[0]), invariant(groups[0])).count:
        return f"no linear map of {n} numbers is invariant to {groups[0].name}"
    layer = split_dense(linear.weight, linear.bias, groups, pool)
    return nn.Sequential(nn.Unflatten(1, (inputs // n, n)), layer, nn.Flatten(1))


def relax_linear(model: nn.Module, example_input: Input, groups: Sequence[Group]) -> nn.Module:
    """Return a copy of a network in which dense layers have a path for each group, for `relax`."""
    sizes = sorted({group.size for group in groups})
    if len(sizes) > 1:
        raise ValueError(f"The groups act on different numbers of places: {sizes}.")
    relaxed = copy_model(model)
    before, calls = record_calls(relaxed, example_input)
    linears = {name: m for name, m in relaxed.named_modules() if isinstance(m, nn.Linear)}
    order = [key for key in calls if key in {id(m) for m in linears.values()}]
    report, new = Relaxation({}, {}), dict[int, nn.Module]()
    for name, module in linears.items():
        shapes = {call.shape[1:]: call.shape for call in calls.get(id(module), [])}
        if len(shapes) != 1 or type(module) is not nn.Linear or not module.weight.requires_grad:
            report.left[name] = "never called, called on several shapes, frozen, or a subclass"
            continue
        (shape,) = shapes.values()
        layer = _relaxed(module, shape, groups, id(module) == order[-1])
        if isinstance(layer, str):
            report.left[name] = layer
            continue
        new[id(module)] = layer.train(module.training)
        parts = [p for m in layer.modules() if isinstance(m, Relaxed) for p in m.paths]
        descriptions = [
            f"{p.label} ({sum(prod(w.shape) for w in p.parameters()):,})" for p in parts
        ]
        report.changed[name] = " + ".join(descriptions)
    return replace_and_check(relaxed, new, example_input, before, report)
