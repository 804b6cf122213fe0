r"""Lie algebras of quadratic conserved quantities, and the groups that they generate.

Quadratic functions of the state are closed under Poisson brackets. As generators $(JA \mid Jb)$
they form a matrix algebra; the inner product is the Frobenius product.

Quantities that are closed under the Poisson bracket generate a group. The generator matrices
determine how long the flows have to be. A generator with an imaginary spectrum rotates the state
and has a period. A nilpotent generator translates or shears it without bound; its flow covers the
spread of the data. A shear along directions that are translated anyway, such as the flow of a
product of two conserved momenta, reaches no new state and is left out of the average.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.conserved import FixedSpan, Quadratic, span_basis
from symrazor.dynamics.hamiltonian import FlowTimes, SymmetrisedNetwork
from symrazor.dynamics.mechanics import apply_symplectic_form

FlowKind = Literal["rotation", "translation", "shear"]
FLOW_ORDER: tuple[FlowKind, ...] = ("rotation", "translation", "shear")
CLOSURE_TOLERANCE = 1e-9
"""Largest fraction of the commutators outside the span, for matrices with integer entries."""
MAX_ESTIMATED_OUTSIDE = 0.1
"""Largest fraction of the commutators outside the span, for estimated matrices."""
DOUBLINGS = 20
"""Doublings of half a turn: a rotation is still bounded after a million half turns."""
MAX_ROTATION_NORM = 1e3
"""Largest norm of a rotation; even linear growth leads far above after `DOUBLINGS`."""
MAX_PERIODS = 6
"""Periods of the lowest frequency after which all other frequencies must be periodic too."""
MIN_COMMUTATOR_NORM = 0.2
"""Lower bound of the denominator of `Closure.outside`, for generators that nearly commute."""
AXES = "xyzwuv"
Term = tuple[str, Sequence[tuple[Tensor, Tensor]], Tensor | None]
"""A quantity: its name, its products of linear forms, and its linear part."""


@dataclass(frozen=True)
class Algebra:
    r"""Named quantities $\tfrac12 x^\top A_k x + b_k^\top x$ with symmetric $A_k$, in float64."""

    names: tuple[str, ...]
    A: Float[Tensor, "k d d"]
    b: Float[Tensor, "k d"]

    def __len__(self) -> int:
        return len(self.names)

    def generators(self) -> Float[Tensor, "k d e"]:
        r"""Return $(J A_k \mid J b_k)$."""
        return generators(self.A, self.b)

    def basis(self) -> Float[Tensor, "m de"]:
        """Return an orthonormal basis of the span of the flattened generators."""
        return span(self.generators())

    def quadratic(self) -> Quadratic:
        """Return the quantities as fixed conserved quantities of a model."""
        return Quadratic.fixed(self.A, self.b)


def generators(A: Float[Tensor, "k d d"], b: Float[Tensor, "k d"]) -> Float[Tensor, "k d e"]:
    r"""Return $(J A \mid J b)$ in float64 on the CPU."""
    A_and_b = torch.cat([A, b[..., None]], dim=-1).detach().double().cpu()
    return apply_symplectic_form(A_and_b, dim=-2)


def from_generators(generator: Float[Tensor, "k d e"]) -> tuple[Tensor, Tensor]:
    r"""Return A [k, d, d] and b [k, d] from $(JA \mid Jb)$, by $J^{-1} = -J$."""
    A_and_b = -apply_symplectic_form(generator, dim=-2)
    return A_and_b[..., :-1], A_and_b[..., -1]


def span(generator: Float[Tensor, "k d e"], tolerance: float = 1e-9) -> Float[Tensor, "m de"]:
    """Return orthonormal rows with the span of the flattened generators."""
    _, s, vectors = torch.linalg.svd(generator.flatten(1), full_matrices=False)
    rows: Tensor = vectors[s > tolerance * s.max()]
    return rows


@dataclass(frozen=True)
class Closure:
    r"""How far generators are from closing under commutators.

    $[G_i, G_j] = \sum_k c_{ijk} G_k + R_{ij}$ in an orthonormal basis of the span.

    Args:
        constants: structure constants $c$, [m, m, m].
        outside: $\|R\| / \|[G, G]\|$, with a lower bound of `MIN_COMMUTATOR_NORM` on the
            denominator; 0 for an algebra.
    """

    constants: Float[Tensor, "m m m"]
    outside: float

    @property
    def commutes(self) -> bool:
        """Whether the algebra is commutative."""
        return bool(self.constants.abs().max() < 1e-6) if self.constants.numel() else True


def square_generators(generator: Float[Tensor, "*m d e"]) -> Float[Tensor, "*m e e"]:
    """Append a row of zeros: the generators of affine flows as matrices that act on (x, 1)."""
    return torch.nn.functional.pad(generator, (0, 0, 0, 1))


def commutators(directions: Float[Tensor, "m d e"]) -> Float[Tensor, "m m d e"]:
    """Return all commutators of affine generators."""
    square = square_generators(directions)
    products = square[:, None] @ square[None]
    return (products - products.transpose(0, 1))[..., :-1, :]


def closure(directions: Float[Tensor, "m d e"]) -> Closure:
    """Return the structure constants, and how far the generators are from an algebra."""
    if not len(directions):
        return Closure(torch.zeros(0, 0, 0, dtype=torch.float64), 0.0)
    basis = span(directions)
    brackets = commutators(basis.unflatten(1, directions.shape[1:])).flatten(2)
    constants = brackets @ basis.mT
    residual = (brackets - constants @ basis).norm()
    return Closure(constants, float(residual / brackets.norm().clamp_min(MIN_COMMUTATOR_NORM)))


# ---------------------------------------------------------------------------------- known algebras


def _algebra(phase: int, terms: Sequence[Term]) -> Algebra:
    r"""Return the quantities $\sum (u \cdot x)(v \cdot x) + b \cdot x$."""
    zero = torch.zeros(phase, dtype=torch.float64)
    matrices, linear = [], []
    for _, products, b in terms:
        A = torch.zeros(phase, phase, dtype=torch.float64)
        for u, v in products:
            A = A + torch.outer(u, v) + torch.outer(v, u)
        matrices.append(A)
        linear.append(zero if b is None else b)
    return Algebra(tuple(name for name, *_ in terms), torch.stack(matrices), torch.stack(linear))


def unitary(n: int) -> Algebra:
    r"""Return u(n), the $n^2$ quadratic invariants of n equal oscillators; so(2) for n = 1.

    These are the energies $\tfrac12(q_i^2 + p_i^2)$, the exchanges $q_i q_j + p_i p_j$ and the
    angular momenta $q_i p_j - q_j p_i$.
    """
    q, p = torch.eye(2 * n, dtype=torch.float64).chunk(2)
    terms: list[Term] = []
    for i in range(n):
        name = f"energy {i + 1}" if n > 1 else "energy (rotation of phase space)"
        terms.append((name, [(q[i] / 2, q[i]), (p[i] / 2, p[i])], None))
    for i, j in combinations(range(n), 2):
        terms.append((f"exchange {i + 1}{j + 1}", [(q[i], q[j]), (p[i], p[j])], None))
        terms.append((f"angular momentum {i + 1}{j + 1}", [(q[i], p[j]), (-q[j], p[i])], None))
    return _algebra(2 * n, terms)


def energies(n: int) -> Algebra:
    """Return u(1)^n, the energies of n oscillators with different frequencies."""
    algebra = unitary(n)
    return Algebra(algebra.names[:n], algebra.A[:n], algebra.b[:n])


def translations(bodies: int, dimension: int) -> Algebra:
    """Return the algebra of T(d): the total momentum."""
    return _algebra(2 * bodies * dimension, _momenta(bodies, dimension))


def rotations(dimension: int) -> Algebra:
    """Return the algebra of SO(d) about the origin: the angular momentum of one body."""
    return _algebra(2 * dimension, _angular_momenta(1, dimension))


def euclidean(bodies: int, dimension: int) -> Algebra:
    """Return the algebra of SE(d): total momentum and total angular momentum."""
    terms = _momenta(bodies, dimension) + _angular_momenta(bodies, dimension)
    return _algebra(2 * bodies * dimension, terms)


def nbody_invariants(bodies: int, dimension: int, masses: Sequence[float] | None = None) -> Algebra:
    """Return every quadratic invariant of bodies with pairwise central forces.

    These are the total momenta, the total angular momenta, the angular momenta of the centre of
    mass, and the products of total momenta: $2d + 3d(d-1)/2$ in d dimensions, 7 in the plane.
    """
    X, P = _centre_and_momentum(bodies, dimension, masses)
    terms = _momenta(bodies, dimension) + _angular_momenta(bodies, dimension)
    for i, j in combinations(range(dimension), 2):
        name = f"angular momentum of the centre of mass {_plane(i, j, dimension)}".rstrip()
        terms.append((name, [(X[i], P[j]), (-X[j], P[i])], None))
    for i, j in combinations_with_replacement(range(dimension), 2):
        terms.append((f"momentum {AXES[i]} x momentum {AXES[j]}", [(P[i], P[j])], None))
    return _algebra(2 * bodies * dimension, terms)


def _centre_and_momentum(
    bodies: int, dimension: int, masses: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Return coefficients of the centre of mass and of the total momentum, a row for each axis."""
    mass = torch.tensor([1.0] * bodies if masses is None else list(masses), dtype=torch.float64)
    identity = torch.eye(dimension, dtype=torch.float64)
    zero = torch.zeros(dimension, bodies * dimension, dtype=torch.float64)
    X = torch.kron(mass / mass.sum(), identity)
    P = torch.kron(torch.ones(bodies, dtype=torch.float64), identity)
    return torch.cat([X.view(dimension, -1), zero], 1), torch.cat([zero, P.view(dimension, -1)], 1)


def _momenta(bodies: int, dimension: int) -> list[Term]:
    _, P = _centre_and_momentum(bodies, dimension)
    return [(f"momentum {AXES[axis]}", [], row) for axis, row in enumerate(P)]


def _angular_momenta(bodies: int, dimension: int) -> list[Term]:
    q, p = torch.eye(2 * bodies * dimension, dtype=torch.float64).chunk(2)
    terms: list[Term] = []
    for i, j in combinations(range(dimension), 2):
        products = []
        for first in range(0, bodies * dimension, dimension):
            products += [(q[first + i], p[first + j]), (-q[first + j], p[first + i])]
        terms.append((f"angular momentum {_plane(i, j, dimension)}".rstrip(), products, None))
    return terms


def _plane(i: int, j: int, dimension: int) -> str:
    return AXES[i] + AXES[j] if dimension > 2 else ""


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
        self.rounded = span.rounded
        self.flow_count = times.dimension
        # Raise the cap to the longest possible flow, so that none is cut short.
        stacked = self.flow_generators().detach().double().flatten(1)
        longest = self.scale * float(torch.linalg.matrix_norm(stacked, 2))
        if times.measure in ("cube", "gaussian"):
            longest *= math.sqrt(self.flow_count)
        self.norm_cap = max(span.norm_cap, longest)

    def flow_generators(self) -> Float[Tensor, "m e e"]:
        """Return square generators on (x, 1) of the quantities that are averaged over."""
        return super().flow_generators()[: self.flow_count]


@torch.no_grad()
def full_group(
    model: SymmetrisedNetwork, x: Float[Tensor, "n d"]
) -> tuple[GroupOrbits, FlowTimes] | None:
    """Return the group that the quantities of a model generate, and its flow times.

    Flows cover full periods, or the spread of the states x of the data. For estimated
    coefficients, the group is that of the exact ones up to estimation errors. Returns None if the
    quantities are not closed, or have unbounded flows that are not translations or shears, such as
    those of an indefinite energy.
    """
    conserved, times = model.conserved, model.times
    if not isinstance(conserved, Quadratic) or times is None:
        return None
    A, b = span_basis(conserved)
    span = FixedSpan(A, b, torch.eye(len(A)).to(A), conserved)
    span.rounded = conserved.rounded
    G = generators(A, b)
    tolerance = CLOSURE_TOLERANCE if conserved.rounded else MAX_ESTIMATED_OUTSIDE
    kinds = [classify_flow(g, tolerance) for g in G]
    if None in kinds or closure(G).outside > tolerance:
        return None
    order = sorted(range(len(G)), key=lambda k: FLOW_ORDER.index(kinds[k] or "shear"))
    averaged = [k for k in order if kinds[k] != "shear"]
    if not generate_same_orbits(G, averaged):
        averaged = order
    states = x.detach().double().cpu()
    lengths = [half_range(g, states, kind == "rotation") for g, kind in zip(G, kinds, strict=True)]
    group_times = times.with_dimension(len(averaged))
    group = GroupOrbits(span, order, torch.tensor(lengths) / span.scale, group_times)
    return group.requires_grad_(False), group_times


def classify_flow(
    generator: Float[Tensor, "d e"], tolerance: float = CLOSURE_TOLERANCE
) -> FlowKind | None:
    r"""Classify the flow of $(JA \mid Jb)$; None if states may grow without bound.

    With a `tolerance`, estimated coefficients have the flow of exact ones nearby.
    """
    G = square_generators(generator)
    G = G / G.norm().clamp_min(1e-300)
    if torch.linalg.matrix_power(G, len(G)).norm() < tolerance:
        linear = float(generator[:, :-1].norm() / generator.norm().clamp_min(1e-300))
        return (
            "shear"
            if linear > (0 if tolerance == CLOSURE_TOLERANCE else tolerance)
            else "translation"
        )
    rates = torch.linalg.eigvals(G)
    if float(rates.real.abs().max()) > max(tolerance, 1e-6) * float(rates.abs().max()):
        return None
    if tolerance > CLOSURE_TOLERANCE:
        return "rotation"
    flow = torch.linalg.matrix_exp(math.pi * G / rates.abs().max())
    for _ in range(DOUBLINGS):
        flow = flow @ flow
    return "rotation" if float(flow.norm()) < MAX_ROTATION_NORM else None


def half_range(generator: Float[Tensor, "d e"], x: Float[Tensor, "n d"], rotation: bool) -> float:
    """Return half the range of flow times.

    For a rotation it is half a period, else the spread of the coordinates that move divided by
    their root mean square speed.
    """
    if rotation:
        return period(square_generators(generator)) / 2
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

    ranks = []
    for generator in (few, G):
        tangents = torch.einsum("kij,nj->nki", generator[..., :-1], x) + generator[..., -1]
        ranks.append(torch.linalg.matrix_rank(tangents))
    return torch.equal(*ranks)
