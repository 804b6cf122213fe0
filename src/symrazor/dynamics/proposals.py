r"""Candidate conserved quantities: the ones a trained network changes least, and their rounding.

**Proposal.** Combinations of monomials, or of given functions, are ranked by

$$ E_x \{C, H\}^2 \,/\, E_x |\nabla C|^2 $$

over the states of the data: the mean squared rate at which the learned dynamics change C. This is a
generalised eigenvalue problem. The first m get flows about as long as the states. For quadratic
quantities they are the starting point of a learned span (`FreeSpan`).

**Rounding.** Coefficients are point estimates: the bound does not charge for them, and few noisy
data move them. The reduced row echelon form of a span of simple quantities (momenta, energies,
angular momenta in equal units) has small integer entries. Rounded to these, m quantities over f
monomials have $m (f - m)$ fewer parameters, each worth $\tfrac12 \log N$ nats (BIC).
"""

import math
from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.algebra import generators
from symrazor.dynamics.conserved import (
    ConservedQuantities,
    FixedSpan,
    FreeSpan,
    Quadratic,
    monomial_gradients,
)
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.observables import Combination

RELATIVE_FLOW_LENGTH = 1.0
"""Root mean square flow length of a proposal, relative to the root mean square of the states."""
RELATIVE_INTEGRATED_FLOW_LENGTH = 0.5
"""The same for flows that are integrated numerically, which may leave the data quickly."""
MAX_COUNT_ALWAYS_TRY_ONE = 3
"""If at most this many quantities may be proposed, a single one is always proposed."""
MIN_RATE_RATIO = 2.0
"""Smallest ratio of consecutive rates that justifies another proposal."""
MAX_STATES = 4096
"""States at which the dynamics are evaluated, at most."""
ROUNDING_TOLERANCE = 0.35
"""Largest distance between an entry of the echelon form and the nearest integer."""


class Proposals:
    """Candidate quantities, in the order in which a model conserves them.

    Args:
        template: a model with `Quadratic` or `Combination` quantities (others raise ValueError),
            which define the candidates; their values are not used.
        reference: the model whose dynamics rank the candidates.
        x: states of the data.
    """

    rates: Float[Tensor, "f"]
    """Mean squared rates of change, relative to the dynamics, ascending."""

    def __init__(
        self, template: SymmetrisedNetwork, reference: SymmetrisedNetwork, x: Float[Tensor, "n d"]
    ) -> None:
        conserved, times = template.conserved, template.times
        if not isinstance(conserved, Quadratic | Combination) or times is None:
            kind = "none" if conserved is None else type(conserved).__name__
            raise ValueError(
                f"The model must have Quadratic or Combination quantities to propose, got {kind}."
            )
        self.network, self.conserved, self.times = template.network, conserved, times
        self.states, field = mean_weight_field(reference, x)
        self.size = float(x.square().sum(-1).mean().sqrt())
        states = self.states.double()
        if isinstance(conserved, Quadratic):
            gradients = monomial_gradients(states)
        else:
            gradients = conserved.functions.gradients(states)
        self.rates, self.rows = most_conserved(gradients, field)

    @property
    def max_count(self) -> int:
        """Largest number of quantities that may be proposed."""
        return min(self.conserved.count, len(self.rates) - 1)

    def best_counts(self, number: int) -> list[int]:
        """Return the counts m with the largest gaps between consecutive rates, largest first."""
        counts = largest_gaps(self.rates, self.max_count)
        if self.max_count <= MAX_COUNT_ALWAYS_TRY_ONE:
            counts = [1, *(m for m in counts if m > 1)]
        return counts[:number]

    def next_count(self, count: int, tried: Collection[int]) -> int | None:
        """Return the untried count above `count` with the largest gap; None if all are small.

        For a reference model with `count` quantities, which it conserves by construction. If few
        quantities may be proposed, `best_counts` has covered nearly all counts.
        """
        if self.max_count <= MAX_COUNT_ALWAYS_TRY_ONE:
            return None
        rates = self.rates.clamp_min(1e-12)
        ratios = {m: float(rates[m] / rates[m - 1]) for m in range(count + 1, self.max_count + 1)}
        ratios = {m: r for m, r in ratios.items() if m not in tried and r >= MIN_RATE_RATIO}
        return max(ratios, key=lambda m: ratios[m], default=None)

    def model_with(self, m: int) -> SymmetrisedNetwork:
        """Return the network (shared) with the first m candidates.

        Quadratic candidates become a `FreeSpan`; combinations of functions are fixed.
        """
        times = self.times.with_dimension(m)
        template, rows = self.conserved, self.rows[:m]
        length = self.size / (template.scale * times.variance**0.5 * m**0.5)
        candidates: ConservedQuantities
        if isinstance(template, Quadratic):
            candidates = FreeSpan(rows, self.states, RELATIVE_FLOW_LENGTH * length, template)
        else:
            length *= RELATIVE_INTEGRATED_FLOW_LENGTH
            candidates = template.with_coefficients(length * rows)
        candidates.to(next(template.parameters()))
        return SymmetrisedNetwork(self.network, candidates, times)


def most_conserved(
    gradients: Float[Tensor, "m f d"], field: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k f"]]:
    r"""Return combinations of f functions, ordered by how little a vector field changes them.

    Args:
        gradients: of the functions at m states, in float64.
        field: $J\nabla H$ at these states.

    Returns:
        The mean squared rates, ascending, relative to the mean square of the field; and the
        coefficients of the combinations, normalised to $E|\nabla C|^2 = 1$.
    """
    field = field.double()
    size = gradients.square().sum(-1).mean(0).sqrt().clamp_min(1e-150)
    gradients = gradients / size[:, None]
    rates = (gradients * field[:, None]).sum(-1)
    metric = torch.einsum("mfd,mgd->fg", gradients, gradients) / len(gradients)
    values, vectors = torch.linalg.eigh(metric)
    independent = values > 1e-10 * values[-1]
    whitening = vectors[:, independent] / values[independent].sqrt()
    rate_matrix = whitening.mT @ (rates.mT @ rates / len(gradients)) @ whitening
    squared_rates, combinations = torch.linalg.eigh(rate_matrix)
    relative = squared_rates.clamp_min(0) / field.square().sum(-1).mean()
    return relative, (whitening @ combinations).mT / size


@torch.no_grad()
def mean_weight_field(
    model: SymmetrisedNetwork, x: Float[Tensor, "n d"], flows: int = 256
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m d"]]:
    """Return up to `MAX_STATES` of the states and the model's vector field there, on the CPU.

    The model has its mean weights, and is averaged over its flows if it has any.
    """
    mean = model.network.posteriors[0].mean
    x = x[:: -(-len(x) // MAX_STATES)].to(mean)
    energy = model.mean(flows, torch.Generator(mean.device).manual_seed(0))
    field = torch.cat([energy.field(chunk[None])[0] for chunk in x.split(256)])
    return x.cpu(), field.cpu()


def largest_gaps(rates: Float[Tensor, "f"], max_count: int) -> list[int]:
    """Return the m of 1..max_count by the ratio of rate m + 1 to rate m, largest first."""
    positive = rates.clamp_min(1e-12)
    ratio = positive[1 : max_count + 1] / positive[:-1][:max_count]
    return [int(m) + 1 for m in ratio.argsort(descending=True)]


# ---------------------------------------------------------------------------------------- rounding


@torch.no_grad()
def round_quantities(model: SymmetrisedNetwork) -> SymmetrisedNetwork | None:
    """Return the network (shared) with its quantities projected on a span of integer coefficients.

    The quantities are fixed. Returns None if there is no such span nearby.
    """
    conserved = model.conserved
    rounded: ConservedQuantities
    if isinstance(conserved, Combination):
        rows = conserved.coefficients.detach().double().cpu()
        basis = integer_rows(rows, (1, 2))  # halves for energies such as p^2 / 2 - 1 / r
        if basis is None:
            return None
        rounded = conserved.with_coefficients(_coordinates(rows, basis) @ basis, rounded=True)
        rounded.to(conserved.coefficients)
    elif isinstance(conserved, Quadratic) and not conserved.commutators:
        span = integer_span(conserved)
        if span is None:
            return None
        learned = generators(conserved.A, conserved.b).flatten(1)
        mix = _coordinates(learned, generators(*span).flatten(1))
        A, b, mix = (part.to(conserved.A) for part in (*span, mix))
        rounded = FixedSpan(A, b, mix, conserved)
    else:
        return None
    return SymmetrisedNetwork(model.network, rounded.requires_grad_(False), model.times)


def _coordinates(rows: Float[Tensor, "k f"], basis: Float[Tensor, "m f"]) -> Float[Tensor, "k m"]:
    """Return the coordinates of the projections of rows on the span of a basis."""
    coordinates: Tensor = torch.linalg.lstsq(basis.mT, rows.mT, driver="gels").solution.mT
    return coordinates


@torch.no_grad()
def integer_span(conserved: Quadratic) -> tuple[Tensor, Tensor] | None:
    """Return A and b of a basis with integer entries near the learned span, or None.

    The basis depends on the rounded span only, not on the learned quantities.
    """
    rows = integer_rows(_upper_triangle(conserved.A, conserved.b))
    return None if rows is None else _symmetric(canonical_rows(rows), conserved.A.shape[-1])


@torch.no_grad()
def canonical_span(
    A: Float[Tensor, "m d d"], b: Float[Tensor, "m d"], template: Quadratic
) -> FixedSpan:
    """Return known quantities in the basis that rounding the same span would give.

    The template defines dtype, flow time scale and norm cap.
    """
    basis = _symmetric(canonical_rows(_upper_triangle(A, b)), A.shape[-1])
    A, b = (part.to(template.A) for part in basis)
    return FixedSpan(A, b, torch.eye(len(A)).to(A), template).requires_grad_(False)


def integer_rows(
    rows: Float[Tensor, "m f"], denominators: Sequence[int] = (1,)
) -> Float[Tensor, "m f"] | None:
    """Return rows with integer entries and nearly the same span, or None if there are none.

    Denominators are tried in order; with 2, entries are multiples of 1/2. The rank must be full.
    """
    entries = echelon(rows)
    for denominator in denominators:
        rounded = (denominator * entries).round() / denominator
        if float((entries - rounded).abs().max()) <= ROUNDING_TOLERANCE / denominator:
            return rounded
    return None


def echelon(rows: Float[Tensor, "m f"]) -> Float[Tensor, "m f"]:
    """Return a reduced row echelon form of full-rank rows, choosing the largest pivots first."""
    rows = rows.clone()
    unused = torch.ones(rows.shape[0], dtype=torch.bool)
    for _ in range(len(rows)):
        size = torch.where(unused[:, None], rows.abs(), 0.0)
        i, j = divmod(int(size.argmax()), rows.shape[1])
        unused[i] = False
        _eliminate(rows, i, j)
    return rows


def canonical_rows(rows: Float[Tensor, "m f"]) -> Float[Tensor, "rank f"]:
    """Return the unique reduced row echelon form of a span, with pivots from the left."""
    rows, rank = rows.clone(), 0
    for j in range(rows.shape[1]):
        if rank == len(rows):
            break
        i = rank + int(rows[rank:, j].abs().argmax())
        if float(rows[i, j].abs()) < 1e-9:
            continue
        rows[[rank, i]] = rows[[i, rank]]
        _eliminate(rows, rank, j)
        rank += 1
    return rows[:rank]


def _eliminate(rows: Float[Tensor, "m f"], i: int, j: int) -> None:
    """Scale row i to 1 in column j, and clear that column in all other rows, in place."""
    rows[i] = rows[i] / rows[i, j]
    others = torch.arange(len(rows)) != i
    rows[others] -= rows[others, j : j + 1] * rows[i]


def _upper_triangle(A: Float[Tensor, "m d d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "m f"]:
    """Return the entries of A on and above the diagonal, then b, in float64."""
    i, j = torch.triu_indices(A.shape[-1], A.shape[-1]).unbind()
    return torch.cat([A.cpu()[:, i, j], b.cpu()], dim=1).double()


def _symmetric(rows: Float[Tensor, "m f"], d: int) -> tuple[Tensor, Tensor]:
    """Return A and b from `_upper_triangle`."""
    i, j = torch.triu_indices(d, d).unbind()
    A = rows.new_zeros(len(rows), d, d)
    A[:, i, j] = A[:, j, i] = rows[:, : len(i)]
    return A, rows[:, len(i) :]


def coefficient_cost(conserved: ConservedQuantities | None, n_data: int) -> float:
    """Return the BIC cost in nats of the free coefficients; 0 for a rounded span."""
    if conserved is None or conserved.rounded:
        return 0.0
    if isinstance(conserved, Combination):
        return bic_cost(conserved.count, len(conserved.functions), n_data)
    assert isinstance(conserved, Quadratic)
    d = conserved.A.shape[-1]
    return bic_cost(conserved.count, d * (d + 3) // 2, n_data)


def bic_cost(m: int, f: int, n_data: int) -> float:
    r"""Return $\tfrac12 m (f - m) \log N$, the cost of an m-dimensional span of f functions."""
    return 0.5 * m * (f - m) * math.log(max(n_data, 2))
