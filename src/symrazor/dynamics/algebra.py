r"""Lie algebras of quadratic conserved quantities: known ones, and closure under commutators.

Quadratic functions of the state are closed under Poisson brackets. As generators $(JA \mid Jb)$
they form a matrix algebra; the inner product is the Frobenius product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.mechanics import degrees_of_freedom, symplectic_form

MIN_COMMUTATOR_NORM = 0.2
"""Lower bound of the denominator of `Closure.outside`, for generators that nearly commute."""
AXES = "xyzwuv"


@dataclass(frozen=True)
class Algebra:
    r"""Named quantities $\tfrac12 x^\top A_k x + b_k^\top x$, in float64.

    Args:
        names: of the quantities.
        A: symmetric matrices.
        b: linear parts.
    """

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
    A, b = A.detach().double().cpu(), b.detach().double().cpu()
    J = symplectic_form(degrees_of_freedom(A.shape[-1]))
    return torch.cat([J @ A, (b @ J.mT)[..., None]], dim=-1)


def from_generators(
    generator: Float[Tensor, "k d e"],
) -> tuple[Float[Tensor, "k d d"], Float[Tensor, "k d"]]:
    r"""Return A and b from $(JA \mid Jb)$, by $J^{-1} = -J$."""
    J = symplectic_form(degrees_of_freedom(generator.shape[-2]))
    A_and_b = -J @ generator
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


def commutators(directions: Float[Tensor, "m d e"]) -> Float[Tensor, "m m d e"]:
    """Return all commutators of affine generators."""
    square = torch.nn.functional.pad(directions, (0, 0, 0, 1))
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


class _Builder:
    """Collects named sums of products of coordinates."""

    def __init__(self, phase: int) -> None:
        self.phase = phase
        self.names: list[str] = []
        self.A: list[Tensor] = []
        self.b: list[Tensor] = []

    def add(
        self,
        name: str,
        products: Sequence[tuple[Tensor, Tensor]] = (),
        linear: Tensor | None = None,
    ) -> None:
        r"""Add the quantity $\sum (u \cdot x)(v \cdot x) + b \cdot x$."""
        A = torch.zeros(self.phase, self.phase, dtype=torch.float64)
        for u, v in products:
            A = A + torch.outer(u, v) + torch.outer(v, u)
        self.names.append(name)
        self.A.append(A)
        self.b.append(torch.zeros(self.phase, dtype=torch.float64) if linear is None else linear)

    def build(self) -> Algebra:
        return Algebra(tuple(self.names), torch.stack(self.A), torch.stack(self.b))


def unitary(n: int) -> Algebra:
    r"""Return u(n), the $n^2$ quadratic invariants of n equal oscillators; so(2) for n = 1.

    These are the energies $\tfrac12(q_i^2 + p_i^2)$, the exchanges $q_i q_j + p_i p_j$ and the
    angular momenta $q_i p_j - q_j p_i$.
    """
    unit = torch.eye(2 * n, dtype=torch.float64)
    q, p = unit[:n], unit[n:]
    builder = _Builder(2 * n)
    for i in range(n):
        name = f"energy {i + 1}" if n > 1 else "energy (rotation of phase space)"
        builder.add(name, [(q[i] / 2, q[i]), (p[i] / 2, p[i])])
    for i, j in combinations(range(n), 2):
        builder.add(f"exchange {i + 1}{j + 1}", [(q[i], q[j]), (p[i], p[j])])
        builder.add(f"angular momentum {i + 1}{j + 1}", [(q[i], p[j]), (-q[j], p[i])])
    return builder.build()


def energies(n: int) -> Algebra:
    """Return u(1)^n, the energies of n oscillators with different frequencies."""
    algebra = unitary(n)
    return Algebra(algebra.names[:n], algebra.A[:n], algebra.b[:n])


def translations(bodies: int, dimension: int) -> Algebra:
    """Return the algebra of T(d): the total momentum."""
    builder = _Builder(2 * bodies * dimension)
    _add_momenta(builder, _centre_and_momentum(bodies, dimension)[1])
    return builder.build()


def euclidean(bodies: int, dimension: int) -> Algebra:
    """Return the algebra of SE(d): total momentum and total angular momentum."""
    builder = _Builder(2 * bodies * dimension)
    _add_momenta(builder, _centre_and_momentum(bodies, dimension)[1])
    _add_angular_momenta(builder, bodies, dimension)
    return builder.build()


def nbody_invariants(bodies: int, dimension: int, masses: Sequence[float] | None = None) -> Algebra:
    """Return every quadratic invariant of bodies with pairwise central forces.

    These are the total momenta, the total angular momenta, the angular momenta of the centre of
    mass, and the products of total momenta: $2d + 3d(d-1)/2$ in d dimensions, 7 in the plane.
    """
    builder = _Builder(2 * bodies * dimension)
    X, P = _centre_and_momentum(bodies, dimension, masses)
    _add_momenta(builder, P)
    _add_angular_momenta(builder, bodies, dimension)
    for i, j in combinations(range(dimension), 2):
        name = f"angular momentum of the centre of mass {_plane(i, j, dimension)}".rstrip()
        builder.add(name, [(X[i], P[j]), (-X[j], P[i])])
    for i, j in combinations_with_replacement(range(dimension), 2):
        builder.add(f"momentum {AXES[i]} x momentum {AXES[j]}", [(P[i], P[j])])
    return builder.build()


def rotations(dimension: int) -> Algebra:
    """Return the algebra of SO(d) about the origin: the angular momentum of one body."""
    builder = _Builder(2 * dimension)
    _add_angular_momenta(builder, 1, dimension)
    return builder.build()


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


def _add_momenta(builder: _Builder, P: Float[Tensor, "axes d"]) -> None:
    for axis, row in enumerate(P):
        builder.add(f"momentum {AXES[axis]}", linear=row)


def _add_angular_momenta(builder: _Builder, bodies: int, dimension: int) -> None:
    n = bodies * dimension
    unit = torch.eye(2 * n, dtype=torch.float64)
    for i, j in combinations(range(dimension), 2):
        products = []
        for body in range(bodies):
            a, b = body * dimension + i, body * dimension + j
            products += [(unit[a], unit[n + b]), (-unit[b], unit[n + a])]
        builder.add(f"angular momentum {_plane(i, j, dimension)}".rstrip(), products)


def _plane(i: int, j: int, dimension: int) -> str:
    return AXES[i] + AXES[j] if dimension > 2 else ""
