r"""Analysis of conserved quantities: spectrum, comparison with known ones, drift, exact invariants.

K learned quantities describe a subspace redundantly. Their stacked, flattened generators have
singular vectors, the learned directions, and singular values, which measure how long the flows
along them are.

`quadratic_invariants` computes all quadratic invariants without learning. C is conserved by H if
and only if $\{C, H\} = \nabla C \cdot J\nabla H = 0$ everywhere. For $C = \sum_j c_j \phi_j$ over
the monomials of degree one and two this is linear in c; sampled at many states, the invariants are
its null space. From trajectories alone, c lies in the null space of the monomials centred on each
trajectory.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.dynamics.algebra import Algebra, closure, from_generators, generators
from symrazor.dynamics.conserved import (
    FixedSpan,
    FreeSpan,
    Quadratic,
    matrices,
    monomial_gradients,
    monomials,
    span_basis,
)
from symrazor.dynamics.mechanics import Scalar, apply_symplectic_form, degrees_of_freedom, gradient
from symrazor.dynamics.systems import System
from symrazor.dynamics.trajectories import Trajectories, noise_variance

MIN_RELATIVE_SINGULAR_VALUE = 0.05
"""Directions with a singular value below this fraction of the largest do not count as learned."""
MIN_SINGULAR_VALUE = 0.25
"""Nor do directions below this value; a full rotation with a flow time of pi has 1.4."""
MAX_DRIFT = 0.3
"""Directions that drift more along true trajectories are not conserved. For small data sets the
bound also rewards short flows across the dynamics, because they smooth the energy."""
START_JITTER = 0.1
"""Noise added to a system's initial states, relative to their standard deviation."""


@dataclass(frozen=True)
class Spectrum:
    """Singular values of learned generators, descending, and their directions: unit generators."""

    values: Float[Tensor, "m"]
    directions: Float[Tensor, "m d e"]

    @property
    def dimension(self) -> int:
        """Number of learned directions."""
        largest = float(self.values[0])
        threshold = max(MIN_RELATIVE_SINGULAR_VALUE * largest, MIN_SINGULAR_VALUE)
        return int((self.values > threshold).sum())

    def learned(self) -> Algebra:
        """Return the learned directions as quantities."""
        A, b = from_generators(self.directions[: self.dimension])
        names = tuple(f"C{k + 1}" for k in range(self.dimension))
        return Algebra(names, A, b)


def spectrum(conserved: Quadratic) -> Spectrum:
    """Return the singular value decomposition of the learned generators, in float64."""
    stacked = generators(conserved.A, conserved.b)
    _, s, vectors = torch.linalg.svd(stacked.flatten(1), full_matrices=False)
    return Spectrum(s, vectors.unflatten(1, stacked.shape[1:]))


def parallelness(directions: Float[Tensor, "m d e"], known: Algebra) -> Float[Tensor, "m"]:
    r"""Return $\|P_g v\| / \|v\|$: 1 for a direction inside the known algebra, 0 if orthogonal."""
    flat, basis = directions.flatten(1), known.basis()
    if flat.shape[1] != basis.shape[1]:
        raise ValueError(
            f"The directions have {directions.shape[1]} variables, but the known quantities have "
            f"{known.A.shape[-1]}."
        )
    inside: Tensor = (flat @ basis.mT).norm(dim=1) / flat.norm(dim=1).clamp_min(1e-300)
    return inside


def recovered(quantities: Algebra, known: Algebra) -> Float[Tensor, "k"]:
    """Return the fraction of each known quantity that lies in the span of the quantities."""
    if not len(quantities):
        return torch.zeros(len(known), dtype=torch.float64)
    return parallelness(known.generators(), quantities)


def weighted_parallelness(learned: Spectrum, known: Algebra) -> float:
    r"""Return $\sqrt{\sum_k s_k^2 \|P v_k\|^2 / \sum_k s_k^2}$ over the singular directions."""
    weights = learned.values.square() / learned.values.square().sum()
    return float((weights * parallelness(learned.directions, known).square()).sum().sqrt())


def best_names(
    directions: Float[Tensor, "m d e"], known: Algebra, min_overlap: float = 0.9
) -> list[str]:
    """Name each direction after the known quantity it is most parallel to, or as a mixture."""
    flat = directions.flatten(1)
    unit = known.generators().flatten(1)
    unit = unit / unit.norm(dim=1, keepdim=True)
    names = []
    for direction in flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-300):
        overlap = unit @ direction
        order = overlap.abs().argsort(descending=True)
        inside = float((known.basis() @ direction).norm())
        if inside < min_overlap:
            names.append("unknown")
        elif overlap[order[0]].abs() >= min_overlap:
            names.append(known.names[int(order[0])])
        else:
            largest = [int(k) for k in order[:3] if overlap[k].abs() > 0.3] or [int(order[0])]
            names.append("mix of " + ", ".join(known.names[k] for k in largest))
    return names


def drift(quantity: Algebra, data: Trajectories) -> Float[Tensor, "k"]:
    """Return the standard deviation of each quantity along trajectories, divided by the overall.

    It is 0 for a conserved quantity and about 1 for any other.
    """
    values = _values(quantity, torch.nan_to_num(data.states.cpu()))
    observed = data.observed.cpu()
    along = _centred(values, observed)[observed].square().mean(0)
    overall = values[observed].var(dim=0, correction=0)
    return (along / overall.clamp_min(1e-300)).sqrt()


def _centred(values: Float[Tensor, "b t k"], observed: Bool[Tensor, "b t"]) -> Tensor:
    """Subtract the mean over the observed states of each trajectory."""
    weights = observed[..., None].to(values)
    mean = (values * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp_min(1)
    return values - mean


def drift_by_noise(quantity: Algebra, data: Trajectories) -> Float[Tensor, "k"]:
    r"""Return the `drift` that noise of `noise_variance` causes.

    $$ \sqrt{E \sum_i \sigma_i^2 (\partial_i C)^2 / \mathrm{Var}\, C} $$
    """
    x = data.states.cpu()[data.observed.cpu()]
    slopes = torch.einsum("kij,mj->mki", quantity.A, x) + quantity.b
    overall = _values(quantity, x).var(dim=0, correction=0).clamp_min(1e-300)
    caused = (slopes.square() * noise_variance(data)).sum(-1).mean(0)
    return (caused / overall).sqrt()


def _values(quantity: Algebra, x: Float[Tensor, "*m d"]) -> Float[Tensor, "*m k"]:
    return 0.5 * torch.einsum("...i,kij,...j->...k", x, quantity.A, x) + x @ quantity.b.mT


def describe(
    conserved: Quadratic, known: Algebra | None = None, held_out: Trajectories | None = None
) -> dict[str, Any]:
    """Return all figures about learned quantities as plain numbers.

    "dimension" is the number of directions with long flows. "span" is the dimension of the span
    that was selected as a whole (`FixedSpan`, `FreeSpan`). The span can be larger: products of
    conserved momenta follow from the momenta, and the bound does not depend on their flow lengths.
    "recovered" refers to the span.
    """
    learned = spectrum(conserved)
    quantities = selected = learned.learned()
    if isinstance(conserved, FixedSpan | FreeSpan):
        A, b = span_basis(conserved)
        selected = Algebra(("",) * len(b), A.double().cpu(), b.double().cpu())
    directions = learned.directions[: learned.dimension]
    report: dict[str, Any] = {
        "singular_values": learned.values.tolist(),
        "dimension": learned.dimension,
        "span": len(selected),
        "closure": closure(directions).outside,
    }
    if known is not None:
        report["parallelness"] = parallelness(learned.directions, known).tolist()
        report["recovered"] = recovered(selected, known).tolist()
        report["names"] = best_names(directions, known)
    if held_out is not None:
        report["drift"] = drift(quantities, held_out).tolist() if len(quantities) else []
        report["conserved"] = sum(value <= MAX_DRIFT for value in report["drift"])
    return report


# -------------------------------------------------------------------------------- exact invariants


@dataclass(frozen=True)
class Invariants:
    """Quadratic invariants.

    Args:
        algebra: the invariants, orthonormal in A and b.
        singular_values: of the linear map whose null space they are, ascending and relative to the
            largest. A gap separates the invariants from the rest.
    """

    algebra: Algebra
    singular_values: Float[Tensor, "m"]

    @property
    def dimension(self) -> int:
        """Number of invariants."""
        return len(self.algebra)


def quadratic_invariants(
    source: System | Trajectories | Scalar,
    phase: int | None = None,
    tolerance: float | None = None,
    samples: int = 400,
    seed: int = 0,
) -> Invariants:
    """Compute the quadratic invariants of a system, an energy function, or trajectories.

    Args:
        source: a `System`, a differentiable energy (then pass `phase` too), or `Trajectories`.
        phase: number of entries of a state, for an energy function.
        tolerance: relative singular value below which a direction counts as invariant. By default
            1e-8 for functions and 1e-4 for trajectories; raise it for noisy ones.
        samples: random states at which functions are evaluated.
        seed: of these states.

    Raises:
        ValueError: an energy function without `phase`, or too few states.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(source, Trajectories):
        values, default_tolerance = monomials(torch.nan_to_num(source.states)), 1e-4
        rows, d = _centred(values, source.observed)[source.observed], source.phase
    else:
        if isinstance(source, System):
            # Initial states may be special, such as the apsides of orbits: add noise to them.
            energy, x = source.energy, source.start(samples, generator)
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            x = x + START_JITTER * x.std(dim=0) * noise
        elif phase is None:
            raise ValueError("Pass phase=..., the number of entries of a state, with an energy.")
        else:
            energy, d = source, 2 * degrees_of_freedom(phase)
            x = torch.randn(samples, d, generator=generator, dtype=torch.float64)
        field = apply_symplectic_form(gradient(energy, x))
        rows, default_tolerance = (monomial_gradients(x) * field[:, None]).sum(-1), 1e-8
        d = x.shape[1]
    n_monomials = d * (d + 1) // 2 + d
    if len(rows) < n_monomials:
        raise ValueError(
            f"{n_monomials} monomials of {d} variables need at least {n_monomials} states, got "
            f"{len(rows)}. Add trajectories or samples."
        )
    size = rows.square().mean(0).sqrt().clamp_min(1e-12 * rows.abs().max() + 1e-300)
    _, s, vectors = torch.linalg.svd(rows / size, full_matrices=False)
    null = s <= (default_tolerance if tolerance is None else tolerance) * s.max()
    A, b = matrices(vectors[null] / size, d)
    norm = (A.square().sum((1, 2)) + b.square().sum(1)).sqrt()
    A, b = A / norm[:, None, None], b / norm[:, None]
    names = tuple(f"invariant {k + 1}" for k in range(len(A)))
    return Invariants(Algebra(names, A, b), (s / s.max()).flip(0))
