r"""Quadratic quantities of which only the span is free.

The evidence judges what m quantities span, with flows of one length: with free lengths the bound
also likes short flows across the dynamics, which only smooth the energy. So coefficients c of the
monomials are put in the metric $g = E\,\nabla\phi\,\nabla\phi^\top$ of the data,

$$ \hat c = \ell\, (c\, g\, c^\top)^{-1/2} c, $$

after which $E\,\nabla C_i \cdot \nabla C_j = \ell^2 \delta_{ij}$ whatever c is. What is left free
is a point of a Grassmann manifold, of dimension $m (f - m)$.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.invariants import feature_gradients, matrices
from symrazor.dynamics.phase import freedom, symplectic_form

ITERATIONS = 10
"""Of the inverse root: some to bring small eigenvalues near 1, the others double the digits."""


class FreeSpan(Quadratic):
    """m quantities with flows of one length; their span is learned.

    Args:
        rows: coefficients of the monomials (`symrazor.dynamics.invariants.monomials`) at the start.
        x: states of the data.
        length: root mean square of each gradient over the data.
        like: where the scale and the cap come from.
    """

    metric: Tensor
    parts: Tensor

    def __init__(
        self,
        rows: Float[Tensor, "m f"],
        x: Float[Tensor, "n d"],
        length: float,
        like: Quadratic,
    ) -> None:
        """Start from a span."""
        nn.Module.__init__(self)
        self.scale, self.norm_cap, self.commutators = like.scale, like.norm_cap, False
        self.length, self.phase = length, x.shape[1]
        slopes = feature_gradients(x.double().cpu())
        metric = torch.einsum("nfd,ngd->fg", slopes, slopes) / len(x)
        self.rows = nn.Parameter(evened(rows.double().cpu(), metric).float())
        self.register_buffer("metric", metric.float())
        one = torch.eye(len(metric))  # A and b are linear in the coefficients
        self.register_buffer("parts", torch.cat(_columns(one, self.phase), -1), persistent=False)
        form = symplectic_form(freedom(self.phase)).float()
        self.register_buffer("J", form, persistent=False)

    @property
    def even(self) -> Float[Tensor, "m f"]:
        """Coefficients of quantities with equal lengths."""
        return self.length * evened(self.rows, self.metric)

    @property
    def count(self) -> int:
        """How many."""
        return len(self.rows)

    @property
    def A(self) -> Float[Tensor, "m d d"]:
        """Symmetric matrices."""
        return self._both()[..., :-1]

    @property
    def b(self) -> Float[Tensor, "m d"]:  # type: ignore[override]
        """Linear parts."""
        return self._both()[..., -1]

    def generators(self) -> Float[Tensor, "m d e"]:
        r"""$(J A_k \mid J b_k)$."""
        both = self._both()
        return self.J.to(both) @ both

    def _both(self) -> Float[Tensor, "m d e"]:
        r"""$(A_k \mid b_k)$, without indices: a step of training may be recorded on a GPU."""
        return torch.einsum("mf,fij->mij", self.even, self.parts)


def _columns(rows: Float[Tensor, "m f"], d: int) -> tuple[Tensor, Tensor]:
    A, b = matrices(rows, d)
    return A, b[..., None]


def evened(rows: Float[Tensor, "m f"], metric: Float[Tensor, "f f"]) -> Float[Tensor, "m f"]:
    r"""$(c\, g\, c^\top)^{-1/2} c$, by products of matrices alone (Newton and Schulz)."""
    gram = rows @ metric @ rows.mT
    size = gram.square().sum().sqrt()  # at least the largest eigenvalue
    if len(rows) == 1:
        return rows / size.sqrt()
    one = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    root, inverse = gram / size, one
    for _ in range(ITERATIONS):
        step = 1.5 * one - 0.5 * inverse @ root
        root, inverse = root @ step, step @ inverse
    return inverse @ rows / size.sqrt()
