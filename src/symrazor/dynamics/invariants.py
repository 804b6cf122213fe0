r"""All quadratic invariants, without any learning: the null space of a linear map.

C is conserved by H if and only if $\{C, H\} = \nabla C \cdot J\nabla H = 0$ everywhere. For
$C = \sum_j c_j \phi_j$ over the monomials of degree one and two this is linear in c; sampled at
many states its null space is the answer. From trajectories alone: C is conserved if it does not
change along them, so c is in the null space of the centred features.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.algebra import Algebra
from symrazor.dynamics.conserved import matrices, monomial_gradients, monomials
from symrazor.dynamics.mechanics import Scalar, apply_symplectic_form, degrees_of_freedom, gradient
from symrazor.dynamics.systems import System
from symrazor.dynamics.trajectories import Trajectories

ASIDE = 0.1
"""How far random states are from a system's starts, relative to the spread of these."""


@dataclass(frozen=True)
class Invariants:
    """The quadratic invariants that were found.

    Args:
        algebra: an orthonormal basis of them (in A and b).
        singular_values: of the map, ascending, relative to the largest: those of the invariants
            first, then the gap.
    """

    algebra: Algebra
    singular_values: Float[Tensor, "m"]

    @property
    def dimension(self) -> int:
        """How many."""
        return len(self.algebra)


def quadratic_invariants(
    source: System | Trajectories | Scalar,
    phase: int | None = None,
    tolerance: float | None = None,
    samples: int = 400,
    seed: int = 0,
) -> Invariants:
    """Quadratic invariants of a system, of any energy function, or of trajectories.

    Args:
        source: a `System`, a differentiable energy (then `phase` too), or `Trajectories`.
        phase: entries of a state, for an energy function.
        tolerance: relative singular value below which a direction counts as invariant; 1e-8 for
            functions, 1e-4 for trajectories: raise it for noisy ones.
        samples: random states for functions.
        seed: of them.

    Raises:
        ValueError: an energy function without `phase`, or too few states to tell.
    """
    if isinstance(source, Trajectories):
        rows, limit = _changes(source), 1e-4
        d = source.phase
    else:
        if isinstance(source, System):
            energy, d = source.energy, 2 * source.n
            x = _anywhere(source, samples, torch.Generator().manual_seed(seed))
        elif phase is None:
            raise ValueError("expected phase=..., the entries of a state, for an energy function")
        else:
            energy, d = source, 2 * degrees_of_freedom(phase)
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(samples, d, generator=generator, dtype=torch.float64)
        slopes = monomial_gradients(x)
        rows, limit = (slopes * apply_symplectic_form(gradient(energy, x))[:, None]).sum(-1), 1e-8
    features = d * (d + 1) // 2 + d
    if len(rows) < features:
        raise ValueError(
            f"expected at least {features} independent states for {features} monomials of "
            f"{d} variables, got {len(rows)}"
        )
    size = rows.square().mean(0).sqrt().clamp_min(1e-12 * rows.abs().max() + 1e-300)
    _, s, vectors = torch.linalg.svd(rows / size, full_matrices=False)
    small = s <= (limit if tolerance is None else tolerance) * s.max()
    A, b = matrices(vectors[small] / size, d)
    norm = (A.square().sum((1, 2)) + b.square().sum(1)).sqrt()
    A, b = A / norm[:, None, None], b / norm[:, None]
    names = tuple(f"invariant {k + 1}" for k in range(len(A)))
    return Invariants(Algebra(names, A, b), (s / s.max()).flip(0))


def _anywhere(system: System, samples: int, generator: torch.Generator) -> Float[Tensor, "m d"]:
    """States near the system's starts, which may be special, as those of orbits at an apsis."""
    x = system.start(samples, generator)
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return x + ASIDE * x.std(dim=0) * noise


def _changes(data: Trajectories) -> Float[Tensor, "m f"]:
    """Features minus their mean along each trajectory, at the states that were seen."""
    features = monomials(torch.nan_to_num(data.states))
    seen = data.observed[..., None].to(features)
    mean = (features * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True).clamp_min(1)
    return (features - mean)[data.observed]
