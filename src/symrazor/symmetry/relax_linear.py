r"""An ordinary network with its dense layers relaxed: `relax(model, x, groups=[group, ...])`.

A dense layer on vectors of c n numbers, ordered (channel, place), or one that all places of a set
[batch, n, c] share, is a matrix W on channels and places. The part of it that commutes with a group
becomes a path of its own, and a free path keeps the rest:

$$ u[o, i, b] = \frac1t \langle Q_b, W[o, i] \rangle, \qquad
   W = \sum_b u[\cdot, \cdot, b]\, Q_b + W_{\text{free}} . $$

They are orthogonal, and the network computes what it did.
"""

from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.curvature.tape import Input
from symrazor.groups import Group, defining, equivariant_maps, invariant
from symrazor.layers.equivariant import EquivariantLinear, InvariantBias, relaxed_over
from symrazor.layers.fully_connected import FC
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.batchnorm import copy_of
from symrazor.symmetry.relaxation import Relaxation, replaced, watch


@torch.no_grad()
def split_dense(
    weight: Float[Tensor, "ot is"],
    bias: Float[Tensor, " ot"] | None,
    groups: Sequence[Group],
    pool: bool = False,
) -> Relaxed:
    """A dense matrix on (channel, place) as a strict path for every group and a free one.

    Args:
        weight: with outputs (channel, place), or channels alone if they are invariant.
        bias: of every output, or none.
        groups: on the same n places.
        pool: whether outputs are invariant, for one group.
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
    left = weight.detach().clone().reshape(d, t, c, n)
    rest = weight.new_zeros(d, t) if bias is None else bias.detach().clone().reshape(d, t)
    *strict_paths, free = layer.paths
    for path in strict_paths:
        assert isinstance(path, EquivariantLinear)
        path.map.weight.copy_(
            torch.einsum("bts,otis->oib", path.maps.matrices().to(left), left) / t
        )
        left = left - path.map.written().reshape(d, t, c, n)
        if isinstance(path.offset, InvariantBias):
            basis = path.offset.basis
            path.offset.values.copy_(rest @ basis.T / basis.square().sum(1))
            rest = rest - path.offset.values @ basis
    assert isinstance(free, FC)
    free.linear.weight.copy_(left.reshape(d * t, c * n))
    free.linear.bias.copy_(rest.reshape(-1))
    return layer


class Swap(nn.Module):
    """Places and channels of [batch, places, channels] exchanged."""

    def forward(self, x: Float[Tensor, "n a b"]) -> Float[Tensor, "n b a"]:
        """Exchange them."""
        return x.transpose(1, 2)


def _relaxed(
    linear: nn.Linear, shape: Sequence[int], groups: Sequence[Group], last: bool
) -> nn.Module | str:
    """A dense layer that was called on inputs of a shape, relaxed; or why it is not."""
    n = groups[0].size
    if len(shape) == 3 and shape[1] == n:
        one = torch.eye(n).to(linear.weight)
        own = linear._parameters["bias"]
        bias = None if own is None else own.repeat_interleave(n)
        layer = split_dense(torch.kron(linear.weight.detach().contiguous(), one), bias, groups)
        return nn.Sequential(Swap(), layer, Swap())
    inputs, outputs = linear.in_features, linear.out_features
    if len(shape) != 2 or inputs % n:
        return f"expected inputs [batch, c x {n}] or [batch, {n}, c], got {list(shape)}"
    pool = bool(outputs % n)
    if pool and not last:
        return f"expected a number of outputs that {n} places divide, got {outputs}"
    if pool and len(groups) > 1:
        return f"expected one group for outputs that {n} places do not divide, got {len(groups)}"
    if pool and not equivariant_maps(defining(groups[0]), invariant(groups[0])).count:
        return f"no linear map of {n} numbers to one that {groups[0].name} leaves alone"
    layer = split_dense(linear.weight, linear.bias, groups, pool)
    return nn.Sequential(nn.Unflatten(1, (inputs // n, n)), layer, nn.Flatten(1))


def relax_linear(model: nn.Module, example_input: Input, groups: Sequence[Group]) -> nn.Module:
    """A copy of a network in which dense layers have a path for each of some groups.

    See `symrazor.relax`, which calls it.

    Raises:
        ValueError: groups on different numbers of places, or no layer to relax.
    """
    sizes = sorted({group.size for group in groups})
    if len(sizes) > 1:
        raise ValueError(f"expected groups on the same places, got {sizes} of them")
    relaxed = copy_of(model)
    before, calls = watch(relaxed, example_input)
    linears = {name: m for name, m in relaxed.named_modules() if isinstance(m, nn.Linear)}
    order = [key for key in calls if key in {id(m) for m in linears.values()}]
    account, new = Relaxation({}, {}), dict[int, nn.Module]()
    for name, module in linears.items():
        shapes = {seen.shape[1:]: seen.shape for seen in calls.get(id(module), [])}
        if len(shapes) != 1 or type(module) is not nn.Linear or not module.weight.requires_grad:
            account.left[name] = "never called, called on several shapes, frozen, or a subclass"
            continue
        (shape,) = shapes.values()
        found = _relaxed(module, shape, groups, id(module) == order[-1])
        if isinstance(found, str):
            account.left[name] = found
            continue
        new[id(module)] = found.train(module.training)
        parts = [p for m in found.modules() if isinstance(m, Relaxed) for p in m.paths]
        sizes_of = [f"{p.label} ({sum(prod(w.shape) for w in p.parameters()):,})" for p in parts]
        account.changed[name] = " + ".join(sizes_of)
    return replaced(relaxed, new, example_input, before, account)
