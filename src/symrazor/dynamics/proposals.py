r"""Conserved quantities to be judged: what a trained network changes least.

Of all quadratic functions, or of all combinations of given functions, the first m in the order of

$$ E_x \{C, H\}^2 \,/\, E_x |\nabla C|^2 $$

over the states of the data are those along whose flows the learned energy changes least. This is a
generalised eigenvalue problem. They get flows about as long as the states. Quadratic ones are only
where the evidence starts to learn their span (`FreeSpan`).
"""

from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.conserved import (
    ConservedQuantities,
    FixedSpan,
    FreeSpan,
    Quadratic,
    monomial_gradients,
)
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.observables import Combination
from symrazor.dynamics.rounding import simplified, whole_rows, worth

LENGTH = 1.0
"""Root mean square length of the flows of a proposal, relative to that of the states."""
SOLVED = 0.5
"""The same for flows that are solved for, which may leave the data fast."""
FEW = 3
"""With so few quantities on offer a single one is always proposed."""
RISE = 2.0
"""Least ratio of two rates for another proposal."""
MOST = 4096
"""States that are looked at."""


class Proposals:
    """All combinations of what is on offer, in the order in which a model conserves them.

    Args:
        offered: a model with quadratic quantities, or a combination of functions; its values are
            not used.
        judge: whose dynamics are looked at.
        x: states of the data.

    Raises:
        ValueError: quantities of another kind.
    """

    rates: Float[Tensor, "f"]
    """Mean squared rates, relative to the dynamics, ascending."""

    def __init__(
        self, offered: SymmetrisedNetwork, judge: SymmetrisedNetwork, x: Float[Tensor, "n d"]
    ) -> None:
        """Solve the eigenvalue problem."""
        like, times = offered.conserved, offered.times
        if not isinstance(like, Quadratic | Combination) or times is None:
            kind = "none" if like is None else type(like).__name__
            raise ValueError(f"expected Quadratic or Combination quantities on offer, got {kind}")
        self.offered, self.like, self.times = offered, like, times
        self.states, field = mean_field(judge, x)
        self.size = float(x.square().sum(-1).mean().sqrt())
        wide = self.states.double()
        if isinstance(like, Quadratic):
            slopes = monomial_gradients(wide)
        else:
            slopes = like.functions.slopes(wide)
        self.rates, self.rows = slowest(slopes, field)

    def jumps(self, count: int) -> list[int]:
        """The m, up to the number on offer, where the rates rise most; the steepest first."""
        most = min(self.like.count, len(self.rates) - 1)
        found = jumps(self.rates, most, most)
        if most <= FEW:
            found = [1, *(m for m in found if m > 1)]
        return found[:count]

    def beyond(self, count: int, tried: Collection[int]) -> int | None:
        """The steepest jump at a number above `count` that was not tried; None if all are low.

        For a look at a model with `count` quantities, which conserves these by itself. With few on
        offer the first look has tried nearly all numbers.
        """
        most = min(self.like.count, len(self.rates) - 1)
        if most <= FEW:
            return None
        safe = self.rates.clamp_min(1e-12)
        rises = {m: float(safe[m] / safe[m - 1]) for m in range(count + 1, most + 1)}
        rises = {m: rise for m, rise in rises.items() if m not in tried and rise >= RISE}
        return max(rises, key=lambda m: rises[m], default=None)

    def first(self, m: int) -> SymmetrisedNetwork:
        """The offered network (shared) with the first m: a span to learn, or held as they are."""
        own = FlowTimes(m, self.times.measure, self.times.draws)
        if m == 1:
            own = FlowTimes(1, "cube", "quasi")
        like, rows = self.like, self.rows[:m]
        reach = LENGTH if isinstance(like, Quadratic) else SOLVED
        length = reach * self.size / (like.scale * own.variance**0.5 * m**0.5)
        made: ConservedQuantities
        if isinstance(like, Quadratic):
            made = FreeSpan(rows, self.states, length, like)
        else:
            made = like.with_coefficients(length * rows)
        made.to(next(like.parameters()))
        return SymmetrisedNetwork(self.offered.network, made, own)


def rounded(model: SymmetrisedNetwork) -> SymmetrisedNetwork | None:
    """The same network (shared) with whole coefficients near those of its quantities, held.

    The quantities stay what they are, projected on the span with whole coefficients; None where
    there is none near.
    """
    conserved, found = model.conserved, None
    if isinstance(conserved, Quadratic):
        found = simplified(model)
    elif isinstance(conserved, Combination):
        rows = conserved.coefficients.detach().double().cpu()
        whole = whole_rows(rows, (1, 2))  # as in p^2 / 2 - 1 / r
        if whole is not None:
            near = torch.linalg.lstsq(whole.mT, rows.mT).solution.mT @ whole
            made = conserved.with_coefficients(near, rounded=True)
            found = SymmetrisedNetwork(model.network, made.to(conserved.coefficients), model.times)
    if found is not None and found.conserved is not None:
        found.conserved.requires_grad_(False)
    return found


def slowest(
    slopes: Float[Tensor, "m f d"], field: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k f"]]:
    r"""Combinations of f functions, those that a vector field changes least first.

    Args:
        slopes: gradients of the functions at m states, in float64.
        field: $J\nabla H$ there.

    Returns:
        The mean squared rates, ascending, relative to the mean square of the field; and the
        coefficients of combinations with $E|\nabla C|^2 = 1$.
    """
    field = field.double()
    size = slopes.square().sum(-1).mean(0).sqrt().clamp_min(1e-150)
    slopes = slopes / size[:, None]
    rates = (slopes * field[:, None]).sum(-1)
    metric = torch.einsum("mfd,mgd->fg", slopes, slopes) / len(slopes)
    values, vectors = torch.linalg.eigh(metric)
    keep = values > 1e-10 * values[-1]
    white = vectors[:, keep] / values[keep].sqrt()
    inner = white.mT @ (rates.mT @ rates / len(slopes)) @ white
    slow, combination = torch.linalg.eigh(inner)
    relative = slow.clamp_min(0) / field.square().sum(-1).mean()
    return relative, (white @ combination).mT / size


@torch.no_grad()
def mean_field(
    model: SymmetrisedNetwork, x: Float[Tensor, "n d"], flows: int = 256
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m d"]]:
    """Up to `MOST` of the states, and the dynamics there of a model with mean weights, on the CPU.

    Args:
        model: its flows, if it has any, are averaged over.
        x: states of the data.
        flows: of that average.
    """
    mean = model.network.posteriors[0].mean
    x = x[:: -(-len(x) // MOST)].to(mean)
    energy = model.mean(flows, torch.Generator(mean.device).manual_seed(0))
    field = torch.cat([energy.field(part[None])[0] for part in x.split(256)])
    return x.cpu(), field.cpu()


def jumps(rates: Float[Tensor, "f"], most: int, count: int) -> list[int]:
    """The m of 1..most with the largest ratio of the next rate to the m-th, best first."""
    safe = rates.clamp_min(1e-12)
    ratio = safe[1 : most + 1] / safe[:-1][:most]
    return [int(m) + 1 for m in ratio.argsort(descending=True)[:count]]


def is_rounded(conserved: ConservedQuantities | None) -> bool:
    """Whether the span of the quantities was rounded to whole coefficients."""
    return isinstance(conserved, FixedSpan) or (
        isinstance(conserved, Combination) and conserved.rounded
    )


def charge(conserved: ConservedQuantities | None, n_data: int) -> float:
    """Nats for the free coefficients of the span; nothing for a rounded one."""
    if conserved is None or is_rounded(conserved):
        return 0.0
    if isinstance(conserved, Quadratic):
        d = conserved.A.shape[-1]
        return worth(conserved.count, d * (d + 3) // 2, n_data)
    assert isinstance(conserved, Combination)
    return worth(conserved.count, len(conserved.functions), n_data)
