r"""Correct the bound for permutations of hidden units.

All permutations of the h units of a hidden layer give the same network, so the posterior has h!
equivalent modes, of which a Gaussian covers one. The mixture
$q_s(\theta) = \frac{1}{h!} \sum_g q(g\theta)$
covers all of them. Likelihood and prior do not depend on g, so its bound is higher by

$$ I = \mathrm{E}_q \Big[ \log q(\theta) - \log \tfrac{1}{h!} \sum_g q(g \theta) \Big] ,
   \qquad 0 \le I \le \log h! , $$

the information that a sample has about its permutation. The largest of three lower bounds of I is
used:

- all permutations, if they are few: exact up to sampling;
- K permutations, the identity and K - 1 random ones: at most $\log K$;
- posteriors whose units are independent, $q = \prod_i q_i$: the sum over permutations is the
  permanent of $Q_{ij} = q_i(\theta_j)$, at most the product of its row sums, so
  $I \ge \log h! - \sum_i \mathrm{E} \log \sum_j q_i(\theta_j) / q_i(\theta_i)$, which reaches
  $\log h!$ where units are well separated. The incoming weights alone give a valid bound, because
  they have less information about the permutation than all weights.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.inference.variational.gaussian import GaussianPosterior, Point
from symrazor.inference.variational.posteriors import BlockCholesky, Diagonal, Full

Part = tuple[GaussianPosterior, int]
"""A posterior, and the dimension of its tensor along which the hidden units lie."""


@torch.no_grad()
def permutation_gain(
    parts: Sequence[Part],
    draws: int = 16,
    permutations: int = 720,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """Return the nats to add to the bound for permutations of the units of one hidden layer.

    The prior must have one precision for all weights of a tensor.

    Args:
        parts: the tensors that the units are rows or columns of, as in
            `[(q_in, 0), (q_bias, 0), (q_out, 1)]`; some of them give a smaller gain. Different
            numbers of units raise ValueError.
        draws: number of weight samples.
        permutations: largest number of permutations.
        generator: random generator.
    """
    h = _units(parts)
    if draws < 1 or permutations < 1:
        raise ValueError(
            f"draws and permutations must be at least 1, got {draws} and {permutations}."
        )
    gain = _by_orders(parts, _orders(h, permutations, generator, parts[0][0]), draws, generator)
    independent = [part for part in parts if _independent(*part)]
    if math.factorial(h) > permutations and independent:
        gain = torch.maximum(gain, _by_row_sums(independent, h, draws, generator))
    return gain


def hidden_units(
    posteriors: Mapping[str, GaussianPosterior], first: str, second: str
) -> list[Part]:
    """Return the tensors of the units that are outputs of one linear layer, inputs of another.

    Layers without a posterior, or with a point estimate, which fixes the order, raise ValueError.
    """
    tensors = [(f"{first}.weight", 0), (f"{first}.bias", 0), (f"{second}.weight", 1)]
    for name in (f"{first}.weight", f"{second}.weight"):
        if name not in posteriors:
            raise ValueError(
                f"{name!r} has no posterior. hidden=... must name two layers with posteriors "
                f"among {', '.join(posteriors)}."
            )
    points = [n for n, _ in tensors if n in posteriors and isinstance(posteriors[n], Point)]
    if points:
        raise ValueError(
            f"Point estimates of {points} fix the order of the hidden units. Give these tensors "
            "posteriors, or leave their layers out of hidden=...."
        )
    return [(posteriors[name], dim) for name, dim in tensors if name in posteriors]


def _units(parts: Sequence[Part]) -> int:
    sizes = {q.shape[dim] if dim < len(q.shape) else None for q, dim in parts}
    if len(sizes) != 1 or None in sizes or any(q.batch is not None for q, _ in parts):
        shapes = [(list(q.shape), dim) for q, dim in parts]
        raise ValueError(f"The posteriors must be over the same hidden units, got {shapes}.")
    return parts[0][0].shape[parts[0][1]]


def _orders(
    h: int, max_orders: int, generator: torch.Generator | None, q: GaussianPosterior
) -> Int[Tensor, "k h"]:
    """Return all permutations, or the identity and random ones if there are more than `most`."""
    device = q.mean.device
    if math.factorial(h) <= max_orders:
        return torch.tensor(list(itertools.permutations(range(h))), device=device)
    place = generator.device if generator is not None else device
    random = [torch.randperm(h, generator=generator, device=place) for _ in range(max_orders - 1)]
    return torch.stack([torch.arange(h, device=place), *random]).to(device)


def _independent(q: GaussianPosterior, dim: int) -> bool:
    """Return whether the posterior of a tensor is a product over hidden units."""
    rows = isinstance(q, BlockCholesky) and not isinstance(q, Full) and len(q.shape) > 1
    return isinstance(q, Diagonal) or (rows and dim == 0)


def _by_orders(
    parts: Sequence[Part], orders: Int[Tensor, "k h"], draws: int, generator: torch.Generator | None
) -> Tensor:
    drawn = [(q, dim, q.sample(draws, generator)) for q, dim in parts]
    densities = torch.stack(
        [
            torch.stack([q.log_prob(w.index_select(dim + 1, order)) for q, dim, w in drawn]).sum(0)
            for order in orders
        ]
    )
    gains = densities[0] - densities.logsumexp(0) + math.log(len(orders))
    return gains.mean()


def _by_row_sums(
    parts: Sequence[Part], h: int, draws: int, generator: torch.Generator | None
) -> Tensor:
    tables = [_densities(q, dim, q.sample(draws, generator)) for q, dim in parts]
    table = torch.stack(tables).sum(0)
    excess = table.logsumexp(-1) - table.diagonal(dim1=-2, dim2=-1)
    return math.lgamma(h + 1) - excess.sum(-1).mean()


def _densities(q: GaussianPosterior, dim: int, w: Tensor) -> Float[Tensor, "s h h"]:
    r"""Return $\log q_i(\theta_j)$, the weights of unit j at the position of unit i."""
    h = q.shape[dim]
    units = w.movedim(dim + 1, 1).reshape(len(w), h, -1)
    mean = q.mean.movedim(dim, 0).reshape(h, -1)
    apart = (units.unsqueeze(1) - mean.unsqueeze(1)).double()  # [s, i, j, d]
    constant = apart.shape[-1] * math.log(2 * math.pi)
    if isinstance(q, Diagonal):
        log_scale = q.log_scale.movedim(dim, 0).reshape(h, 1, -1).double()
        z = apart / log_scale.exp()
        return -0.5 * (z.square().sum(-1) + 2 * log_scale.sum(-1) + constant)
    assert isinstance(q, BlockCholesky)
    root = q.root.matrix().double()  # [i, d, d]
    white: Tensor = torch.linalg.solve_triangular(root, apart.mT, upper=False)  # [s, i, d, j]
    return -0.5 * (white.square().sum(-2) + q.root.log_det().unsqueeze(-1) + constant)
