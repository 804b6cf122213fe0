r"""Conserved quantities of a fitted vector field.

$C = c^\top \phi$ is conserved by $\dot x = f(x)$ if $\nabla C \cdot f = 0$. Over the states of the
data, with coordinates in units of their spread,

$$ \lambda = \frac{E\, (\nabla C \cdot f)^2}{E\, |\nabla C|^2\, E\, |f|^2} $$

is stationary at generalised eigenvectors. The parameters of f are estimates, so that $\lambda$ of a
conserved quantity is not zero: it is about as large as the changes of $\lambda$ when the parameters
are drawn from their uncertainty, and much larger otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.dynamics.fields import ParametricField
from symrazor.dynamics.library import Library
from symrazor.dynamics.shooting import Fit

MAX_STATES = 1000
"""States at which the field is evaluated, at most."""
DRAWS = 12
MAX_RATIO = 20.0
"""Largest eigenvalue of a conserved quantity relative to that which errors of the parameters cause
on average."""
MAX_RATE, MAX_UNDECIDED_RATE = 1e-4, 1e-2
"""Largest eigenvalue, its uncertainty included, of a conserved quantity, and largest one of a
combination that is not clearly refuted."""
NUMERICAL_RATE = 1e-8
"""Eigenvalue that errors of the integrator may cause."""
RANK_TOLERANCE = 1e-10
REWEIGHTINGS = 25
"""Iterations that make combinations sparse."""
MIN_COEFFICIENT = 1e-6
"""Contributions below this fraction of the largest are zero."""


@dataclass(frozen=True)
class Combinations:
    """Combinations of the functions of a library.

    Args:
        library: the functions.
        vectors: [k, m], coefficients; the largest contribution of each is 1.
        errors: [k, m], standard errors of the coefficients.
        rates: [k], their eigenvalues.
    """

    library: Library
    vectors: Float[Tensor, "k m"]
    errors: Float[Tensor, "k m"]
    rates: Float[Tensor, "k"]

    def only(self, kept: Bool[Tensor, "k"]) -> "Combinations":
        """Return the combinations for which `kept` is true."""
        return Combinations(self.library, self.vectors[kept], self.errors[kept], self.rates[kept])

    def after(self, vector: Float[Tensor, "m"], errors: Float[Tensor, "m"]) -> "Combinations":
        """Return these combinations after another one, which is conserved exactly."""
        return Combinations(
            self.library,
            torch.cat([vector[None], self.vectors]),
            torch.cat([errors[None], self.errors]),
            torch.cat([torch.zeros(1, dtype=vector.dtype), self.rates]),
        )


def field_invariants(
    fit: Fit, library: Library, x: Float[Tensor, "n d"]
) -> tuple[Combinations, Combinations]:
    """Return the combinations that a field conserves, and those that it may conserve."""
    problem = _Problem(library, x[:: -(-len(x) // MAX_STATES)])
    drawn = fit.draws(DRAWS)
    rates, vectors = problem.solve(fit.field)
    candidates = int((rates < MAX_UNDECIDED_RATE).sum())
    if not candidates:
        return (problem.describe(vectors[:, :0], [], rates[:0]),) * 2
    others = [problem.solve(field) for field in drawn]
    by_errors = torch.stack([values for values, _ in others]).mean(0) - rates
    noise = by_errors.clamp_min(NUMERICAL_RATE)
    consistent = rates <= MAX_RATIO * noise
    conserved = consistent & (rates + MAX_RATIO * noise < MAX_RATE)
    unclear = consistent & ~conserved
    count = leading_count(conserved[:candidates])
    doubtful = count + leading_count(unclear[count:candidates])
    return (
        problem.describe(vectors[:, :count], [v[:, :count] for _, v in others], rates[:count]),
        problem.describe(
            vectors[:, count:doubtful],
            [v[:, count:doubtful] for _, v in others],
            rates[count:doubtful],
        ),
    )


def leading_count(true: Tensor) -> int:
    """Return the number of leading entries that are true."""
    return int(true.to(torch.int).cumprod(0).sum())


class _Problem:
    """The eigenproblem of a library at fixed states."""

    def __init__(self, library: Library, x: Float[Tensor, "n d"]) -> None:
        self.library, self.x = library, x
        self.spread = x.std(0).clamp_min(1e-300)
        gradients = library.gradients(x)
        usable = gradients.isfinite().all(-1).all(0)
        size = (gradients * self.spread).square().sum(-1).mean(0).sqrt()
        self.kept = (usable & (size > 0)).nonzero()[:, 0]
        self.size = size[self.kept]
        self.gradients = gradients[:, self.kept] / self.size[:, None]
        scaled = self.gradients * self.spread
        metric = torch.einsum("nkd,nld->kl", scaled, scaled) / len(x)
        values, vectors = torch.linalg.eigh(metric)
        independent = values > RANK_TOLERANCE * values[-1]
        self.whitening = vectors[:, independent] / values[independent].sqrt()

    def solve(self, field: ParametricField) -> tuple[Float[Tensor, "k"], Float[Tensor, "m k"]]:
        """Return the eigenvalues of a field, ascending, and the combinations."""
        velocity = field(self.x)
        rates = torch.einsum("nkd,nd->nk", self.gradients, velocity) @ self.whitening
        speed = (velocity / self.spread).square().sum(-1).mean()
        values, vectors = torch.linalg.eigh(rates.mT @ rates / len(self.x))
        return values.clamp_min(0) / speed.clamp_min(1e-300), self.whitening @ vectors

    def describe(
        self, vectors: Float[Tensor, "m k"], others: Sequence[Float[Tensor, "m k"]], rates: Tensor
    ) -> Combinations:
        """Return a sparse basis of the span, with errors from the spans of other fields."""
        if not vectors.shape[1]:
            empty = torch.zeros(0, len(self.library), dtype=vectors.dtype)
            return Combinations(self.library, empty, empty, rates)
        basis = sparse_basis(vectors)
        pivots = basis.abs().argmax(0)
        columns = torch.arange(basis.shape[1])
        basis = basis / basis[pivots, columns]
        moved = []
        for other in others:
            nearest = other @ torch.linalg.lstsq(other, basis, driver="gelsd").solution
            moved.append(nearest / nearest[pivots, columns])
        errors = (torch.stack(moved) - basis).square().mean(0).sqrt()
        full, full_errors = (
            torch.zeros(basis.shape[1], len(self.library), dtype=basis.dtype) for _ in range(2)
        )
        scale = self.size[:, None] / self.size[pivots]
        full[:, self.kept] = (basis / scale).mT
        full_errors[:, self.kept] = (errors / scale).mT
        # The term that comes first in the formula is positive.
        first = (full * self.library(self.x).std(0)).abs().argmax(1, keepdim=True)
        full = full * full.gather(1, first).sign()
        return Combinations(self.library, full, full_errors, rates)


def sparse_basis(vectors: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
    """Return a basis of the span in which each combination has few functions.

    For every function, the combination with coefficient 1 and the smallest sum of absolute values
    is computed by reweighted least squares. The sparsest ones that span the space are taken.
    """
    m, k = vectors.shape
    basis: Tensor = torch.linalg.qr(vectors)[0]
    reach = basis.square().sum(1)  # a function outside of the span cannot have coefficient 1
    pivots = (reach > 1e-3).nonzero()[:, 0]
    rows = basis[pivots]  # [p, k]
    c = rows / reach[pivots, None]
    for _ in range(REWEIGHTINGS):
        values = c @ basis.mT  # [p, m]
        weights = 1 / (values.abs() + 1e-7 * values.abs().amax(1, keepdim=True))
        gram = torch.einsum("pm,mk,ml->pkl", weights, basis, basis)
        solution = torch.linalg.solve(gram, rows.unsqueeze(-1)).squeeze(-1)
        c = solution / (solution * rows).sum(1, keepdim=True)
    values = c @ basis.mT
    values = values / values.abs().amax(1, keepdim=True)
    values = torch.where(values.abs() < MIN_COEFFICIENT, 0.0, values)
    terms = (values.abs() > 10 * MIN_COEFFICIENT).sum(1).double() + values.abs().sum(1) / m
    chosen: list[Tensor] = []
    for p in terms.argsort():
        tried = torch.stack([*chosen, values[p] / values[p].norm()], 1)
        if float(torch.linalg.svdvals(tried)[-1]) > 0.05:
            chosen.append(values[p] / values[p].norm())
        if len(chosen) == k:
            return torch.stack(chosen, 1)
    return basis
