r"""Learned directions rounded to simple coefficients, if the evidence does not mind.

The quantities are point estimates: the bound charges nothing for their coefficients, and few noisy
data turn them a little too far. Rounding is the razor for these. The m learned directions span a
subspace of the f entries of A and b; its reduced row echelon form has small
whole numbers if the quantities are simple (momenta, energies, angular momenta in equal units).
The rounded span has $m (f - m)$ fewer free parameters, worth $\tfrac12 \log N$ each (BIC).
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.algebra import generators
from symrazor.dynamics.conserved import FixedSpan, Quadratic
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork

NEAR = 0.35
"""Farthest an entry of the echelon form may be from a whole number."""


def echelon(rows: Float[Tensor, "m f"]) -> Float[Tensor, "m f"]:
    """Reduced row echelon form of full-rank rows, with the largest pivots first."""
    rows = rows.clone()
    free = torch.ones(rows.shape[0], dtype=torch.bool)
    for _ in range(len(rows)):
        size = torch.where(free[:, None], rows.abs(), 0.0)
        i, j = divmod(int(size.argmax()), rows.shape[1])
        free[i] = False
        rows[i] = rows[i] / rows[i, j]
        others = torch.arange(len(rows)) != i
        rows[others] -= rows[others, j : j + 1] * rows[i]
    return rows


def canonical(rows: Float[Tensor, "m f"]) -> Float[Tensor, "m f"]:
    """The one reduced row echelon form of a span, pivots from the left."""
    rows, done = rows.clone(), 0
    for j in range(rows.shape[1]):
        if done == len(rows):
            break
        i = done + int(rows[done:, j].abs().argmax())
        if float(rows[i, j].abs()) < 1e-9:
            continue
        rows[[done, i]] = rows[[i, done]]
        rows[done] = rows[done] / rows[done, j]
        others = torch.arange(len(rows)) != done
        rows[others] -= rows[others, j : j + 1] * rows[done]
        done += 1
    return rows[:done]


def whole_rows(
    rows: Float[Tensor, "m f"], parts: Sequence[int] = (1,)
) -> Float[Tensor, "m f"] | None:
    """Rows with whole entries that nearly span the same, if there are any.

    Args:
        rows: of full rank.
        parts: 1 for whole entries, 2 for halves as well, ..., in the order of preference.
    """
    entries = echelon(rows)
    for part in parts:
        whole = (part * entries).round() / part
        if float((entries - whole).abs().max()) <= NEAR / part:
            return whole
    return None


@torch.no_grad()
def simple_span(conserved: Quadratic) -> tuple[Tensor, Tensor] | None:
    """A, b of a basis with whole entries near the learned span, if there is one.

    It depends on the rounded span alone.
    """
    whole = whole_rows(_entries(conserved.A, conserved.b))
    return None if whole is None else _matrices(canonical(whole), conserved.A.shape[-1])


def _entries(A: Float[Tensor, "m d d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "m f"]:
    """Those of A on and above its diagonal, and b, in float64."""
    i, j = torch.triu_indices(A.shape[-1], A.shape[-1]).unbind()
    return torch.cat([A.cpu()[:, i, j], b.cpu()], dim=1).double()


def _matrices(rows: Float[Tensor, "m f"], d: int) -> tuple[Tensor, Tensor]:
    i, j = torch.triu_indices(d, d).unbind()
    A = rows.new_zeros(len(rows), d, d)
    A[:, i, j] = A[:, j, i] = rows[:, : len(i)]
    return A, rows[:, len(i) :]


@torch.no_grad()
def exact(A: Float[Tensor, "m d d"], b: Float[Tensor, "m d"], like: Quadratic) -> FixedSpan:
    """Known quantities in the form in which learned ones with the same span would be rounded.

    Args:
        A: of the known quantities.
        b: linear parts.
        like: where type, scale and cap come from.
    """
    A, b = (part.to(like.A) for part in _matrices(canonical(_entries(A, b)), A.shape[-1]))
    made = FixedSpan(A, b, torch.eye(len(A)).to(A), like)
    return made.requires_grad_(False)


@torch.no_grad()
def simplified(model: SymmetrisedNetwork) -> SymmetrisedNetwork | None:
    """The same network with quantities in the rounded span; None if none is near.

    The quantities start as the learned ones, projected.
    """
    conserved = model.conserved
    if not isinstance(conserved, Quadratic) or conserved.commutators:
        return None
    found = simple_span(conserved)
    if found is None:
        return None
    A, b = found
    basis, learned = generators(A, b).flatten(1), generators(conserved.A, conserved.b).flatten(1)
    mix = torch.linalg.lstsq(basis.mT, learned.mT).solution.mT
    like = conserved.A
    made = FixedSpan(A.to(like), b.to(like), mix.to(like), conserved)
    return SymmetrisedNetwork(model.network, made, model.times)


def worth(m: int, f: int, n_data: int) -> float:
    r"""Nats that rounding m directions of f coefficients saves: $\tfrac12 m (f - m) \log N$."""
    return 0.5 * m * (f - m) * math.log(max(n_data, 2))
