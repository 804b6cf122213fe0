r"""What the learned conserved quantities are.

K learned quantities are a redundant description of a subspace: their generators, stacked and
flattened, have singular values (how far a direction is used) and singular vectors (the directions).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.algebra import Algebra, generators, quantities, span
from symrazor.dynamics.conserved import FixedSpan, FreeSpan, Quadratic, span_basis
from symrazor.dynamics.trajectories import Trajectories, noise_variance

THRESHOLD = 0.05
"""Singular values below this share of the largest do not count."""
LEAST = 0.25
"""Nor do those below this: with a flow time of pi a full rotation has the singular value 1.4."""


COMMUTES = 0.2
"""Norm of the commutators of unit generators below which they are hardly any."""
DRIFT = 0.3
"""A direction that drifts more along true trajectories is not conserved: short flows across the
dynamics serve to smooth the energy, which the bound likes where data are few."""


@dataclass(frozen=True)
class Spectrum:
    """Singular values and directions of learned generators.

    Args:
        values: descending.
        directions: [m, 2n, 2n + 1], unit generators.
    """

    values: Float[Tensor, "m"]
    directions: Float[Tensor, "m d e"]

    @property
    def dimension(self) -> int:
        """How many directions were learned."""
        largest = float(self.values[0])
        return int((self.values > max(THRESHOLD * largest, LEAST)).sum())

    def learned(self) -> Algebra:
        """The directions that count, as quantities."""
        A, b = quantities(self.directions[: self.dimension])
        names = tuple(f"C{k + 1}" for k in range(self.dimension))
        return Algebra(names, A, b)


def spectrum(conserved: Quadratic) -> Spectrum:
    """Singular value decomposition of the learned generators, in float64."""
    stacked = generators(conserved.A, conserved.b)
    _, s, vectors = torch.linalg.svd(stacked.flatten(1), full_matrices=False)
    return Spectrum(s, vectors.unflatten(1, stacked.shape[1:]))


def parallelness(directions: Float[Tensor, "m d e"], known: Algebra) -> Float[Tensor, "m"]:
    r"""$\|P_g v\| / \|v\|$: 1 for a direction inside the known algebra, 0 for one across it.

    Raises:
        ValueError: directions of another phase space.
    """
    flat, basis = directions.flatten(1), known.basis()
    if flat.shape[1] != basis.shape[1]:
        own, theirs = directions.shape[1], known.A.shape[-1]
        raise ValueError(f"expected known quantities of {own} variables, got {theirs}")
    norm = flat.norm(dim=1).clamp_min(1e-300)
    inside: Tensor = (flat @ basis.mT).norm(dim=1) / norm
    return inside


def recovered(found: Spectrum, known: Algebra) -> Float[Tensor, "k"]:
    """The other way round: how much of each known quantity lies in the learned span."""
    if found.dimension == 0:
        return torch.zeros(len(known), dtype=torch.float64)
    return parallelness(known.generators(), found.learned())


def weighted_parallelness(found: Spectrum, known: Algebra) -> float:
    r"""One number for all: $\sqrt{\sum_k s_k^2 \|P v_k\|^2 / \sum_k s_k^2}$."""
    share = found.values.square() / found.values.square().sum()
    return float((share * parallelness(found.directions, known).square()).sum().sqrt())


def best_names(directions: Float[Tensor, "m d e"], known: Algebra, least: float = 0.9) -> list[str]:
    """For each direction the known quantity it is most parallel to, or a sum of the largest."""
    flat = directions.flatten(1)
    unit = known.generators().flatten(1)
    unit = unit / unit.norm(dim=1, keepdim=True)
    names = []
    for direction in flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-300):
        overlap = unit @ direction
        order = overlap.abs().argsort(descending=True)
        inside = float((known.basis() @ direction).norm())
        if inside < least:
            names.append("unknown")
        elif overlap[order[0]].abs() >= least:
            names.append(known.names[int(order[0])])
        else:
            most = [int(k) for k in order[:3] if overlap[k].abs() > 0.3] or [int(order[0])]
            names.append("mix of " + ", ".join(known.names[k] for k in most))
    return names


@dataclass(frozen=True)
class Closure:
    r"""$[G_i, G_j] = \sum_k c_{ijk} G_k$ plus what lies outside.

    Args:
        constants: structure constants [m, m, m] in the orthonormal basis.
        outside: norm of all that lies outside the span, relative to all commutators or, where these
            nearly vanish, to `COMMUTES`; 0 for an algebra.
    """

    constants: Float[Tensor, "m m m"]
    outside: float

    @property
    def commutes(self) -> bool:
        """Whether the algebra is commutative."""
        return bool(self.constants.abs().max() < 1e-6) if self.constants.numel() else True


def commutators(directions: Float[Tensor, "m d e"]) -> Float[Tensor, "m m d e"]:
    """All commutators of affine generators."""
    square = torch.nn.functional.pad(directions, (0, 0, 0, 1))
    products = square[:, None] @ square[None]
    return (products - products.transpose(0, 1))[..., :-1, :]


def closure(directions: Float[Tensor, "m d e"]) -> Closure:
    """Structure constants, and how far the directions are from an algebra."""
    if not len(directions):
        return Closure(torch.zeros(0, 0, 0, dtype=torch.float64), 0.0)
    basis = span(directions)
    unit = basis.unflatten(1, directions.shape[1:])
    brackets = commutators(unit).flatten(2)
    constants = brackets @ basis.mT
    outside = (brackets - constants @ basis).norm()
    return Closure(constants, float(outside / brackets.norm().clamp_min(COMMUTES)))


def drift(quantity: Algebra, data: Trajectories) -> Float[Tensor, "k"]:
    """How far each quantity varies along trajectories, relative to its variation between states.

    0 for a conserved quantity, about 1 for any other.
    """
    x = torch.nan_to_num(data.states.cpu())
    values = 0.5 * torch.einsum("bti,kij,btj->btk", x, quantity.A, x) + x @ quantity.b.mT
    seen = data.observed.cpu()[..., None].to(values)
    mean = (values * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True).clamp_min(1)
    along = ((values - mean).square() * seen).sum((0, 1)) / seen.sum((0, 1))
    overall = values[data.observed.cpu()].var(dim=0, correction=0)
    return (along / overall.clamp_min(1e-300)).sqrt()


def drift_by_noise(quantity: Algebra, data: Trajectories) -> Float[Tensor, "k"]:
    r"""The `drift` that noise of `noise_variance` causes.

    $$ \sqrt{E \sum_i \sigma_i^2 (\partial_i C)^2 / \mathrm{Var}\, C} $$
    """
    x = data.states.cpu()[data.observed.cpu()]
    slopes = torch.einsum("kij,mj->mki", quantity.A, x) + quantity.b
    values = 0.5 * torch.einsum("mi,kij,mj->mk", x, quantity.A, x) + x @ quantity.b.mT
    overall = values.var(dim=0, correction=0).clamp_min(1e-300)
    caused = (slopes.square() * noise_variance(data)).sum(-1).mean(0)
    return (caused / overall).sqrt()


def _within(conserved: Quadratic, found: Spectrum, known: Algebra) -> Float[Tensor, "k"]:
    """How much of each known quantity lies in the span that was taken, or else in the learned."""
    if not isinstance(conserved, FixedSpan | FreeSpan):
        return recovered(found, known)
    A, b = span_basis(conserved)
    span = Algebra(("",) * len(b), A.double().cpu(), b.double().cpu())
    return parallelness(known.generators(), span)


def describe(
    conserved: Quadratic, known: Algebra | None = None, held_out: Trajectories | None = None
) -> dict[str, Any]:
    """Everything about the learned quantities as plain numbers.

    "dimension" counts the directions with long flows; "span" those of the span that was taken as a
    whole, where there is one (`FixedSpan`, `FreeSpan`): some of it may follow from the rest, as
    products of conserved momenta do, and then the bound does not care how long its flows are.
    "recovered" is about the span.
    """
    found = spectrum(conserved)
    learned = found.learned()
    as_whole = isinstance(conserved, FixedSpan | FreeSpan)
    report: dict[str, Any] = {
        "singular_values": found.values.tolist(),
        "dimension": found.dimension,
        "span": len(span_basis(conserved)[1]) if as_whole else found.dimension,
        "closure": closure(found.directions[: found.dimension]).outside,
    }
    if known is not None:
        report["parallelness"] = parallelness(found.directions, known).tolist()
        report["recovered"] = _within(conserved, found, known).tolist()
        report["names"] = best_names(found.directions[: found.dimension], known)
    if held_out is not None:
        drifts = drift(learned, held_out).tolist() if len(learned) else []
        report["drift"] = drifts
        report["conserved"] = sum(value <= DRIFT for value in drifts)
    return report
