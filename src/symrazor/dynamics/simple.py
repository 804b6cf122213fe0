r"""Learned directions rounded to simple coefficients, if the evidence does not mind.

The quantities are point estimates: the bound charges nothing for their coefficients, and few noisy
data turn them a little too far. Rounding is the razor for these. The m learned directions span a
subspace of the f entries of A and b; its reduced row echelon form has small
whole numbers if the quantities are simple (momenta, energies, angular momenta in equal units).
The rounded span has $m (f - m)$ fewer free parameters, worth $\tfrac12 \log N$ each (BIC).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.algebra import generators
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.phase import freedom, symplectic_form
from symrazor.dynamics.symmetrised import SymmetrisedNetwork

NEAR = 0.35
"""Farthest an entry of the echelon form may be from a whole number."""


class WithinSpan(Quadratic):
    r"""K quadratic quantities that are combinations of m given ones.

    Args:
        A: [m, d, d] of the given.
        b: [m, d].
        mix: [K, m] at the start; learned.
        like: where the scale and the cap come from.
    """

    A_given: Tensor
    b_given: Tensor

    def __init__(self, A: Tensor, b: Tensor, mix: Tensor, like: Quadratic) -> None:
        """Hold the span."""
        nn.Module.__init__(self)
        self.scale, self.norm_cap, self.commutators = like.scale, like.norm_cap, False
        self.mix = nn.Parameter(mix.clone())
        self.register_buffer("A_given", A)
        self.register_buffer("b_given", b)
        form = symplectic_form(freedom(A.shape[-1])).to(mix)
        self.register_buffer("J", form, persistent=False)

    @property
    def A(self) -> Float[Tensor, "k d d"]:
        """Symmetric matrices."""
        return torch.einsum("km,mij->kij", self.mix, self.A_given)

    @property
    def b(self) -> Float[Tensor, "k d"]:  # type: ignore[override]
        """Linear parts."""
        return self.mix @ self.b_given


def spanned(conserved: Quadratic) -> tuple[Float[Tensor, "m d d"], Float[Tensor, "m d"]]:
    """A and b of the given quantities, or of the quantities themselves where none were given."""
    if isinstance(conserved, WithinSpan):
        return conserved.A_given, conserved.b_given
    return conserved.A.detach(), conserved.b.detach()


def echelon(rows: Float[Tensor, "m f"]) -> Float[Tensor, "m f"]:
    """Reduced row echelon form of full-rank rows, with the largest pivots first."""
    rows = rows.clone()
    free = torch.ones(rows.shape[0], dtype=torch.bool)
    for _ in range(len(rows)):
        size = torch.where(free[:, None], rows.abs(), 0.0)
        i, j = divmod(int(size.argmax()), rows.shape[1])
        free[i] = False
        rows[i] = rows[i] / rows[i, j]
        others = torch.arange(len(rows)) != i
        rows[others] -= rows[others, j : j + 1] * rows[i]
    return rows


def whole_rows(rows: Float[Tensor, "m f"]) -> Float[Tensor, "m f"] | None:
    """Rows with whole entries that nearly span the same, if there are any."""
    entries = echelon(rows)
    whole = entries.round()
    return whole if float((entries - whole).abs().max()) <= NEAR else None


@torch.no_grad()
def simple_span(conserved: Quadratic) -> tuple[Tensor, Tensor] | None:
    """A, b of a basis with whole entries near the learned span, if there is one."""
    A, b = conserved.A.double().cpu(), conserved.b.double().cpu()
    d = A.shape[-1]
    i, j = torch.triu_indices(d, d).unbind()
    whole = whole_rows(torch.cat([A[:, i, j], b], dim=1))
    if whole is None:
        return None
    A = torch.zeros_like(A)
    A[:, i, j] = A[:, j, i] = whole[:, : len(i)]
    return A, whole[:, len(i) :]


@torch.no_grad()
def simplified(model: SymmetrisedNetwork) -> SymmetrisedNetwork | None:
    """The same network with quantities in the rounded span; None if none is near.

    The quantities start as the learned ones, projected.
    """
    conserved = model.conserved
    if not isinstance(conserved, Quadratic) or conserved.commutators:
        return None
    found = simple_span(conserved)
    if found is None:
        return None
    A, b = found
    basis, learned = generators(A, b).flatten(1), generators(conserved.A, conserved.b).flatten(1)
    mix = torch.linalg.lstsq(basis.mT, learned.mT).solution.mT
    like = conserved.A
    made = WithinSpan(A.to(like), b.to(like), mix.to(like), conserved)
    return SymmetrisedNetwork(model.network, made, model.times)


def worth(m: int, f: int, n_data: int) -> float:
    r"""Nats that rounding m directions of f coefficients saves: $\tfrac12 m (f - m) \log N$."""
    return 0.5 * m * (f - m) * math.log(max(n_data, 2))
