r"""Filters turned by the elements of a point group.

A filter $\psi$ on a square or cubic grid of offsets is made of values v by $\psi_g[\delta] =
\sum_p v[p]\, T_g[p, \delta]$, the function that v stands for, turned by g:
$\psi_g(\delta) = \psi(R_g^{-1} \delta)$.

| values | $T_g$ |
|---|---|
| the filter itself, quarter turns and reflections | a permutation: exact |
| the filter itself, other angles | bilinear interpolation, zero outside |
| anchors of a `Basis` | the basis at turned anchors: a continuous filter, exact at any angle |
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.layers.basis import Basis, evaluate, grid
from symrazor.layers.point_group import PointGroup


@dataclass(frozen=True)
class Turns:
    """The maps T_g: an index where they are permutations, psi_g = v[index_g], else matrices."""

    index: Int[Tensor, "g s"] | None = None
    matrices: Float[Tensor, "g p s"] | None = None


def turns(group: PointGroup, kernel: int) -> Turns:
    """How a filter, of `kernel` values in every dimension, is turned."""
    matrices = interpolation(group, kernel)
    if group.exact:
        return Turns(index=matrices.argmax(1))
    return Turns(matrices=matrices)


def interpolation(group: PointGroup, kernel: int) -> Float[Tensor, "g p s"]:
    r"""$T_g[p, \delta] = \prod_d \max(0, 1 - |(R_g^{-1} \delta - p)_d|)$, in float64."""
    # Not `core.resampling.resample`: the layer needs the weights, in float64 and in 3 dimensions.
    places = grid((kernel,) * group.dims)
    sources = torch.einsum("gij,sj->gsi", torch.linalg.inv(group.matrices), places)
    apart = (sources.unsqueeze(1) - places[:, None]).abs()
    return (1 - apart).clamp_min(0).prod(-1)


def turned_basis(rotations: Float[Tensor, "g d d"], basis: Basis) -> Float[Tensor, "g p s"]:
    r"""$\Phi_g[p, \delta] = \Phi[p, R_g^{-1} \delta]$: the basis of anchors at $R_g z_p$.

    The basis depends on distances alone, which an orthogonal $R_g$ keeps.
    """
    z, omega = basis.anchors, basis.value("omega")
    moved = torch.einsum("gij,pj->gpi", rotations.to(z), z)
    return torch.stack([evaluate(places, basis.shape, omega, basis.form) for places in moved])


def interpolation_error(group: PointGroup, kernel: int) -> float:
    r"""Relative error of turning a smooth filter, the worst over elements; 0 for exact groups.

    The filter is a Gaussian of width k / 6, an eighth of the kernel away from its middle: coarse
    grids cannot hold it at other angles, fine ones can.
    """
    places, width = grid((kernel,) * group.dims), kernel / 6
    centre = torch.tensor([kernel / 2 ** (3 + d) for d in range(group.dims)], dtype=torch.float64)

    def bump(at: Tensor) -> Tensor:
        return torch.exp(-(places - at).square().sum(-1) / (2 * width**2))

    matrices = interpolation(group, kernel)
    errors = []
    for R, T in zip(group.matrices, matrices, strict=True):
        wanted = bump(R @ centre)
        errors.append(float((bump(centre) @ T - wanted).norm() / wanted.norm()))
    return max(errors)
