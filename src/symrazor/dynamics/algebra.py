r"""Known algebras of quadratic conserved quantities, as matrices and names.

Quadratic functions of the state are closed under Poisson brackets; as generators $(JA \mid Jb)$
they are an algebra of matrices, with the Frobenius product as inner product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.mechanics import degrees_of_freedom, symplectic_form


@dataclass(frozen=True)
class Algebra:
    r"""Quantities $\tfrac12 x^\top A_k x + b_k^\top x$ with names, in float64.

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
        r"""$(J A_k \mid J b_k)$."""
        return generators(self.A, self.b)

    def basis(self) -> Float[Tensor, "m de"]:
        """An orthonormal basis of the span of the generators, flattened."""
        return span(self.generators())

    def quadratic(self) -> Quadratic:
        """The same as fixed conserved quantities of a model."""
        return Quadratic.fixed(self.A, self.b)


def generators(A: Float[Tensor, "k d d"], b: Float[Tensor, "k d"]) -> Float[Tensor, "k d e"]:
    r"""$(J A \mid J b)$ in float64."""
    wide, shift = A.detach().double().cpu(), b.detach().double().cpu()
    J = symplectic_form(degrees_of_freedom(wide.shape[-1]))
    return torch.cat([J @ wide, (shift @ J.mT)[..., None]], dim=-1)


def quantities(
    generator: Float[Tensor, "k d e"],
) -> tuple[Float[Tensor, "k d d"], Float[Tensor, "k d"]]:
    r"""A and b back from $(JA \mid Jb)$: $J^{-1} = -J$."""
    J = symplectic_form(degrees_of_freedom(generator.shape[-2]))
    back = -J @ generator
    return back[..., :-1], back[..., -1]


def span(generator: Float[Tensor, "k d e"], tolerance: float = 1e-9) -> Float[Tensor, "m de"]:
    """Orthonormal rows with the same span as the flattened generators."""
    _, s, vectors = torch.linalg.svd(generator.flatten(1), full_matrices=False)
    rows: Tensor = vectors[s > tolerance * s.max()]
    return rows


class _Builder:
    """Collects named products of coordinates."""

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
        r"""$\sum (u \cdot x)(v \cdot x) + b \cdot x$."""
        A = torch.zeros(self.phase, self.phase, dtype=torch.float64)
        for u, v in products:
            A = A + torch.outer(u, v) + torch.outer(v, u)
        self.names.append(name)
        self.A.append(A)
        self.b.append(torch.zeros(self.phase, dtype=torch.float64) if linear is None else linear)

    def done(self) -> Algebra:
        return Algebra(tuple(self.names), torch.stack(self.A), torch.stack(self.b))


def unitary(n: int) -> Algebra:
    r"""u(n), the $n^2$ quadratic invariants of n equal oscillators; so(2) for n = 1.

    Energies $\tfrac12(q_i^2 + p_i^2)$, exchanges $q_i q_j + p_i p_j$ and rotations
    $q_i p_j - q_j p_i$.
    """
    unit = torch.eye(2 * n, dtype=torch.float64)
    q, p = unit[:n], unit[n:]
    made = _Builder(2 * n)
    for i in range(n):
        name = f"energy {i + 1}" if n > 1 else "energy (rotation of phase space)"
        made.add(name, [(q[i] / 2, q[i]), (p[i] / 2, p[i])])
    for i, j in combinations(range(n), 2):
        made.add(f"exchange {i + 1}{j + 1}", [(q[i], q[j]), (p[i], p[j])])
        made.add(f"angular momentum {i + 1}{j + 1}", [(q[i], p[j]), (-q[j], p[i])])
    return made.done()


def energies(n: int) -> Algebra:
    """The n energies of oscillators with different frequencies: u(1)^n."""
    whole = unitary(n)
    return Algebra(whole.names[:n], whole.A[:n], whole.b[:n])


AXES = "xyzwuv"


def translations(bodies: int, dimension: int) -> Algebra:
    """T(d): the total momentum of bodies in d dimensions."""
    made = _Builder(2 * bodies * dimension)
    for axis, P in enumerate(_totals(bodies, dimension)[1]):
        made.add(f"momentum {AXES[axis]}", linear=P)
    return made.done()


def euclidean(bodies: int, dimension: int) -> Algebra:
    """SE(d): total momentum and total angular momentum."""
    made = _Builder(2 * bodies * dimension)
    for axis, P in enumerate(_totals(bodies, dimension)[1]):
        made.add(f"momentum {AXES[axis]}", linear=P)
    _add_angular(made, bodies, dimension)
    return made.done()


def nbody_invariants(bodies: int, dimension: int, masses: Sequence[float] | None = None) -> Algebra:
    """Every quadratic invariant of bodies that attract each other: SE(d) and what P generates.

    Momenta, angular momentum of the whole, angular momentum of the centre of mass, products of
    momenta: $2d + 3d(d-1)/2$ of them, 7 in the plane.
    """
    made = _Builder(2 * bodies * dimension)
    X, P = _totals(bodies, dimension, masses)
    for axis in range(dimension):
        made.add(f"momentum {AXES[axis]}", linear=P[axis])
    _add_angular(made, bodies, dimension)
    for i, j in combinations(range(dimension), 2):
        plane = AXES[i] + AXES[j] if dimension > 2 else ""
        name = f"angular momentum of the centre of mass {plane}".rstrip()
        made.add(name, [(X[i], P[j]), (-X[j], P[i])])
    for i, j in combinations_with_replacement(range(dimension), 2):
        made.add(f"momentum {AXES[i]} x momentum {AXES[j]}", [(P[i], P[j])])
    return made.done()


def angular(dimension: int) -> Algebra:
    """SO(d) about the origin: the angular momentum of one body."""
    made = _Builder(2 * dimension)
    _add_angular(made, 1, dimension)
    return made.done()


def _totals(
    bodies: int, dimension: int, masses: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Coefficients of the centre of mass and of the total momentum, one row for each axis."""
    mass = torch.tensor([1.0] * bodies if masses is None else list(masses), dtype=torch.float64)
    one = torch.eye(dimension, dtype=torch.float64)
    zero = torch.zeros(dimension, bodies * dimension, dtype=torch.float64)
    X = torch.kron(mass / mass.sum(), one)
    P = torch.kron(torch.ones(bodies, dtype=torch.float64), one)
    return torch.cat([X.view(dimension, -1), zero], 1), torch.cat([zero, P.view(dimension, -1)], 1)


def _add_angular(made: _Builder, bodies: int, dimension: int) -> None:
    n = bodies * dimension
    unit = torch.eye(2 * n, dtype=torch.float64)
    for i, j in combinations(range(dimension), 2):
        products = []
        for body in range(bodies):
            a, b = body * dimension + i, body * dimension + j
            products += [(unit[a], unit[n + b]), (-unit[b], unit[n + a])]
        plane = AXES[i] + AXES[j] if dimension > 2 else ""
        made.add(f"angular momentum {plane}".rstrip(), products)
