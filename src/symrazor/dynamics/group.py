r"""The group that quantities with integer coefficients generate, and averages over all of it.

Quantities that are closed under the Poisson bracket generate a group. The generator matrices
determine how long the flows have to be. A generator with an imaginary spectrum rotates the state
and has a period. A nilpotent generator translates or shears it without bound; its flow covers the
spread of the data. A shear along directions that are translated anyway, such as the flow of a
product of two conserved momenta, reaches no new state and is left out of the average.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.algebra import closure, generators
from symrazor.dynamics.conserved import FixedSpan
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.measures import FlowTimes

FlowKind = Literal["rotation", "translation", "shear"]
FLOW_ORDER: tuple[FlowKind, ...] = ("rotation", "translation", "shear")
CLOSURE_TOLERANCE = 1e-9
"""Largest fraction of the commutators outside the span, for matrices with integer entries."""
DOUBLINGS = 20
"""Doublings of half a turn: a rotation is still bounded after a million half turns."""
MAX_ROTATION_NORM = 1e3
"""Largest norm of a rotation; even linear growth leads far above after `DOUBLINGS`."""
MAX_PERIODS = 6
"""Periods of the lowest frequency after which all other frequencies must be periodic too."""


class GroupOrbits(FixedSpan):
    """Quantities of an algebra, averaged over the flows of the first few.

    Args:
        span: the quantities, and the flow time scale.
        order: permutation of the quantities; those to average over come first.
        lengths: flow lengths, in the order of `span`.
        times: flow times; their dimension is the number of flows.
    """

    def __init__(
        self, span: FixedSpan, order: Sequence[int], lengths: Float[Tensor, "k"], times: FlowTimes
    ) -> None:
        index = torch.tensor(order, device=span.A_basis.device)
        mix = torch.diag(lengths.to(span.mix)[index])
        super().__init__(span.A_basis[index], span.b_basis[index], mix, span)
        self.n_flows = times.dimension
        # Raise the cap to the longest possible flow, so that none is cut short.
        stacked = self.flow_generators().detach().double().flatten(1)
        longest = self.scale * float(torch.linalg.matrix_norm(stacked, 2))
        if times.measure in ("cube", "gaussian"):
            longest *= math.sqrt(self.n_flows)
        self.norm_cap = max(span.norm_cap, longest)

    @property
    def flow_count(self) -> int:
        """Number of quantities that are averaged over."""
        return self.n_flows

    def flow_generators(self) -> Float[Tensor, "m e e"]:
        """Return square generators on (x, 1) of the quantities that are averaged over."""
        return super().flow_generators()[: self.n_flows]


@torch.no_grad()
def full_group(
    model: SymmetrisedNetwork, x: Float[Tensor, "n d"]
) -> tuple[GroupOrbits, FlowTimes] | None:
    """Return the group that the rounded quantities of a model generate, and its flow times.

    Args:
        model: with rounded quantities (`FixedSpan`).
        x: states of the data.

    Returns:
        Quantities with flows over full periods, or over the spread of the data. None if the
        quantities are not rounded, not closed, or have unbounded flows that are not translations
        or shears, as of an indefinite energy.
    """
    span, times = model.conserved, model.times
    if not isinstance(span, FixedSpan) or times is None:
        return None
    G = generators(span.A_basis, span.b_basis)
    kinds = [classify_flow(g) for g in G]
    if None in kinds or closure(G).outside > CLOSURE_TOLERANCE:
        return None
    order = sorted(range(len(G)), key=lambda k: FLOW_ORDER.index(kinds[k] or "shear"))
    averaged = [k for k in order if kinds[k] != "shear"]
    if not generate_same_orbits(G, averaged):
        averaged = order
    states = x.detach().double().cpu()
    lengths = [half_range(g, states, kind == "rotation") for g, kind in zip(G, kinds, strict=True)]
    group_times = FlowTimes(len(averaged), times.measure, times.draws)
    if len(averaged) == 1:
        group_times = FlowTimes(1, "cube", "quasi")
    group = GroupOrbits(span, order, torch.tensor(lengths) / span.scale, group_times)
    return group.requires_grad_(False), group_times


def classify_flow(generator: Float[Tensor, "d e"]) -> FlowKind | None:
    r"""Classify the flow of $(JA \mid Jb)$; None if states may grow without bound."""
    G = _square(generator)
    G = G / G.norm().clamp_min(1e-300)
    if torch.linalg.matrix_power(G, len(G)).norm() < CLOSURE_TOLERANCE:
        return "shear" if bool(generator[:, :-1].any()) else "translation"
    flow = torch.linalg.matrix_exp(math.pi * G / torch.linalg.eigvals(G).abs().max())
    for _ in range(DOUBLINGS):
        flow = flow @ flow
    return "rotation" if float(flow.norm()) < MAX_ROTATION_NORM else None


def half_range(generator: Float[Tensor, "d e"], x: Float[Tensor, "n d"], rotation: bool) -> float:
    """Return half the range of flow times.

    For a rotation it is half a period, else the spread of the coordinates that move divided by
    their root mean square speed.
    """
    if rotation:
        return period(_square(generator)) / 2
    moving = generator.abs().sum(dim=1) > 0
    spread = x[:, moving].var(dim=0, correction=0).sum()
    speed = (x @ generator[:, :-1].mT + generator[:, -1]).square().sum(dim=1).mean()
    return float((spread / speed).sqrt())


def period(square: Float[Tensor, "e e"]) -> float:
    """Return the period of a rotation, or that of its lowest frequency if it is not periodic."""
    rates = torch.linalg.eigvals(square).imag.abs()
    rates = rates[rates > 1e-6 * rates.max()]
    lowest = rates.min()
    for periods in range(1, MAX_PERIODS + 1):
        turns = periods * rates / lowest
        if float((turns - turns.round()).abs().max()) < 1e-4:
            return 2 * math.pi * periods / float(lowest)
    return 2 * math.pi / float(lowest)


def generate_same_orbits(G: Float[Tensor, "k d e"], subset: Sequence[int]) -> bool:
    """Return whether a subset of generators is closed and spans the same directions at each state.

    Checked at random states, where both must have tangent spaces of the same rank.
    """
    few = G[list(subset)]
    if not len(few) or closure(few).outside > CLOSURE_TOLERANCE:
        return False
    random = torch.Generator().manual_seed(0)
    x = torch.randn(8, G.shape[1], generator=random, dtype=G.dtype)

    def orbit_dimension(generator: Tensor) -> Tensor:
        tangents = torch.einsum("kij,nj->nki", generator[..., :-1], x) + generator[..., -1]
        rank: Tensor = torch.linalg.matrix_rank(tangents)
        return rank

    return bool((orbit_dimension(few) == orbit_dimension(G)).all())


def _square(generator: Float[Tensor, "d e"]) -> Float[Tensor, "e e"]:
    return torch.nn.functional.pad(generator, (0, 0, 0, 1))
