r"""Quadratic conserved quantities and their flows in closed form.

A quantity $C(x) = \tfrac12 x^\top A x + b^\top x$ generates the flow $\dot x = J\nabla C(x)$, which
is affine. The flow of $\sum_k \tau_k C_k$ is one matrix exponential (Noether's razor),

$$ \begin{pmatrix} \Phi^\tau(x) \\ 1 \end{pmatrix}
   = \exp\Big(\sum_k \tau_k G_k\Big) \begin{pmatrix} x \\ 1 \end{pmatrix},
   \qquad G_k = \begin{pmatrix} J A_k & J b_k \\ 0 & 0\end{pmatrix}. $$

- `Quadratic`: K quantities with free A and b.
- `FreeSpan`: m quantities of which only the span is learned, with flows of fixed length.
- `FixedSpan`: K combinations of m fixed quantities.

Quantities with other functions of the state are in `symrazor.dynamics.observables`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from symrazor.dynamics.mechanics import apply_symplectic_form, degrees_of_freedom
from symrazor.groups.lie import exponential

Transported = tuple[
    Float[Tensor, "r s n d"],
    Callable[[Float[Tensor, "r s n d"]], Float[Tensor, "r n d"]],
]
"""States moved by S flows, and the function that pulls gradients back and averages them."""

NEWTON_SCHULZ_ITERATIONS = 10
"""Iterations of the inverse square root; the first ones bring small eigenvalues near 1, the others
double the number of correct digits."""


class Flows(ABC):
    """Maps of states along the flows of conserved quantities: S for each draw of the weights."""

    capped: Tensor | None = None
    """Number of flows or states that were cut short."""

    @abstractmethod
    def transport(self, x: Float[Tensor, "r n d"]) -> Transported:
        """Return the moved states and the function that pulls gradients back."""


class ConservedQuantities(nn.Module, ABC):
    r"""K functions of the state with flows.

    Args:
        count: K.
        scale: flow time at $\tau = 1$.

    Attributes:
        flow_count: dimension of the flow times; K unless the model adds or leaves out flows.
        rounded: whether the quantities span a space with integer coefficients.
    """

    rounded = False

    def __init__(self, count: int, scale: float) -> None:
        super().__init__()
        self.count = self.flow_count = count
        self.scale = scale

    @abstractmethod
    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """Return the values of the K quantities."""

    @abstractmethod
    def flows(self, tau: Float[Tensor, "r s k"]) -> Flows:
        r"""Return the flows of $\sum_k \tau_k C_k$."""


@dataclass(frozen=True)
class AffineFlows(Flows):
    r"""Affine maps $x \to E x + t$, S for each of R draws."""

    linear: Float[Tensor, "r s d d"]
    shift: Float[Tensor, "r s d"]
    capped: Tensor | None = None

    def transport(self, x: Float[Tensor, "r n d"]) -> Transported:
        r"""Move states to $z_s$; pull gradients back as $\frac1S \sum_s E_s^\top \nabla F(z_s)$."""
        E = self.linear
        moved = x.unsqueeze(1) @ E.mT + self.shift.unsqueeze(2)

        def pull_back(g: Tensor) -> Tensor:
            return (g @ E).mean(dim=1)

        return moved, pull_back


def cap_norm(
    matrix: Float[Tensor, "*b d d"], cap: float
) -> tuple[Float[Tensor, "*b d d"], Bool[Tensor, "*b"]]:
    """Scale matrices with a Frobenius norm above `cap` down to it, and report which."""
    norm = matrix.square().sum(dim=(-2, -1), keepdim=True).clamp_min(1e-30).sqrt()
    over = norm > cap
    capped = torch.where(over, matrix * (cap / norm), matrix)
    return capped, over[..., 0, 0]


class Quadratic(ConservedQuantities):
    r"""K quadratic conserved quantities with free coefficients.

    Args:
        phase: number of entries of a state.
        count: K.
        std: standard deviation of the initial A and b. The default 0.1 / phase gives initial flows
            of the same length in every dimension. Zero is a saddle point of the evidence.
        scale: flow time at $\tau = 1$. With $\pi$, a rotation with $A = I$ makes one full turn over
            $\tau \in [-1, 1]$.
        norm_cap: upper bound of $\|\sum_k \tau_k G_k\|$ times `scale`. Flows of indefinite A grow
            exponentially; longer ones are cut short and counted.
        commutators: also average over the flows of all $[G_i, G_j]$: the commutator of two
            symmetries is a symmetry.
        generator: for the initial values.
    """

    b: nn.Parameter

    def __init__(
        self,
        phase: int,
        count: int,
        std: float | None = None,
        scale: float = pi,
        norm_cap: float = 16.0,
        commutators: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(count, scale)
        degrees_of_freedom(phase)
        std = 0.1 / phase if std is None else std
        if count < 1 or std <= 0:
            raise ValueError(
                f"Quadratic needs count >= 1 and std > 0, got count={count} and std={std}. Exactly "
                "zero is a saddle point from which nothing is learned."
            )
        self.norm_cap, self.commutators = norm_cap, commutators
        if commutators:
            self.flow_count = count * (count + 1) // 2
        self.A_raw = nn.Parameter(std * torch.randn(count, phase, phase, generator=generator))
        self.b = nn.Parameter(std * torch.randn(count, phase, generator=generator))

    @classmethod
    def fixed(cls, A: Float[Tensor, "k d d"], b: Float[Tensor, "k d"] | None = None) -> "Quadratic":
        """Return known quantities that are not learned."""
        quantities = cls(A.shape[-1], len(A))
        with torch.no_grad():
            quantities.A_raw.copy_(A)
            quantities.b.copy_(torch.zeros_like(quantities.b) if b is None else b)
        return quantities.requires_grad_(False)

    @property
    def A(self) -> Float[Tensor, "k d d"]:
        """Symmetric matrices of the quadratic parts."""
        return 0.5 * (self.A_raw + self.A_raw.mT)

    def A_and_b(self) -> Float[Tensor, "k d e"]:
        r"""Return $(A_k \mid b_k)$, of shape [K, 2n, 2n + 1]."""
        return torch.cat([self.A, self.b[..., None]], dim=-1)

    def generators(self) -> Float[Tensor, "k d e"]:
        r"""Return $(J A_k \mid J b_k)$."""
        return apply_symplectic_form(self.A_and_b(), dim=-2)

    def flow_generators(self) -> Float[Tensor, "m e e"]:
        """Return square generators on (x, 1): those of the K quantities, then their commutators."""
        square = nn.functional.pad(self.generators(), (0, 0, 0, 1))
        if not self.commutators:
            return square
        i, j = torch.triu_indices(self.count, self.count, 1, device=square.device).unbind()
        return torch.cat([square, square[i] @ square[j] - square[j] @ square[i]])

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """Return the values of the K quantities."""
        A, b = self.A.to(x), self.b.to(x)
        return 0.5 * torch.einsum("...i,kij,...j->...k", x, A, x) + x @ b.mT

    def flows(self, tau: Float[Tensor, "r s k"]) -> AffineFlows:
        """Return the flows at these times, by a matrix exponential in float64."""
        Z = torch.einsum("rsk,kij->rsij", tau.to(self.b), self.flow_generators())
        Z, over = cap_norm(self.scale * Z.double(), self.norm_cap)
        E = exponential(Z, self.norm_cap)
        d = Z.shape[-1] - 1
        return AffineFlows(E[..., :d, :d].to(self.b), E[..., :d, d].to(self.b), over.sum().detach())


class FreeSpan(Quadratic):
    r"""m quadratic quantities of which only the span is learned.

    With free flow lengths the evidence also rewards short flows across the dynamics, which only
    smooth the energy. Here the coefficients c of the monomials are orthonormalised in the metric
    $g = E\,\nabla\phi\,\nabla\phi^\top$ of the data,

    $$ \hat c = \ell\, (c\, g\, c^\top)^{-1/2} c, $$

    so that $E\,\nabla C_i \cdot \nabla C_j = \ell^2 \delta_{ij}$ for every c. What is left to learn
    is a point on a Grassmann manifold of dimension $m (f - m)$.

    Args:
        coefficients: initial coefficients of the `monomials`.
        x: states of the data.
        length: root mean square of each gradient over the data, $\ell$.
        template: quantities that define the flow time scale and the norm cap.
    """

    metric: Tensor
    monomial_matrices: Tensor

    def __init__(
        self,
        coefficients: Float[Tensor, "m f"],
        x: Float[Tensor, "n d"],
        length: float,
        template: Quadratic,
    ) -> None:
        ConservedQuantities.__init__(self, len(coefficients), template.scale)
        self.norm_cap, self.commutators, self.length = template.norm_cap, False, length
        slopes = monomial_gradients(x.double().cpu())
        metric = torch.einsum("nfd,ngd->fg", slopes, slopes) / len(x)
        start = orthonormalise(coefficients.double().cpu(), metric)
        self.coefficients = nn.Parameter(start.float())
        self.register_buffer("metric", metric.float())
        A, b = matrices(torch.eye(len(metric)), x.shape[1])
        # A and b are linear in the coefficients: store (A | b) of every monomial.
        A_and_b = torch.cat([A, b[..., None]], dim=-1)
        self.register_buffer("monomial_matrices", A_and_b, persistent=False)

    @property
    def A(self) -> Float[Tensor, "m d d"]:
        """Symmetric matrices of the quadratic parts."""
        return self.A_and_b()[..., :-1]

    @property
    def b(self) -> Float[Tensor, "m d"]:  # type: ignore[override]
        """Linear parts."""
        return self.A_and_b()[..., -1]

    def A_and_b(self) -> Float[Tensor, "m d e"]:
        r"""Return $(A_k \mid b_k)$ without indexing, which CUDA graphs cannot capture."""
        normalised = self.length * orthonormalise(self.coefficients, self.metric)
        return torch.einsum("mf,fij->mij", normalised, self.monomial_matrices)


class FixedSpan(Quadratic):
    r"""K combinations of m fixed quadratic quantities; only the mixing matrix can be learned.

    Args:
        A: [m, d, d], matrices of the fixed quantities.
        b: [m, d], their linear parts.
        mix: [K, m], initial mixing matrix.
        template: quantities that define the flow time scale and the norm cap.
    """

    rounded = True
    A_basis: Tensor
    b_basis: Tensor

    def __init__(self, A: Tensor, b: Tensor, mix: Tensor, template: Quadratic) -> None:
        ConservedQuantities.__init__(self, len(mix), template.scale)
        self.norm_cap, self.commutators = template.norm_cap, False
        self.mix = nn.Parameter(mix.clone())
        self.register_buffer("A_basis", A)
        self.register_buffer("b_basis", b)

    @property
    def A(self) -> Float[Tensor, "k d d"]:
        """Symmetric matrices of the quadratic parts."""
        return torch.einsum("km,mij->kij", self.mix, self.A_basis)

    @property
    def b(self) -> Float[Tensor, "k d"]:  # type: ignore[override]
        """Linear parts."""
        return self.mix @ self.b_basis


def span_basis(conserved: Quadratic) -> tuple[Float[Tensor, "m d d"], Float[Tensor, "m d"]]:
    """Return A and b of quantities that span the same space: the fixed basis if there is one."""
    if isinstance(conserved, FixedSpan):
        return conserved.A_basis, conserved.b_basis
    return conserved.A.detach(), conserved.b.detach()


def orthonormalise(
    rows: Float[Tensor, "m f"], metric: Float[Tensor, "f f"]
) -> Float[Tensor, "m f"]:
    r"""Return $(c\, g\, c^\top)^{-1/2} c$, by the Newton-Schulz iteration (products only)."""
    gram = rows @ metric @ rows.mT
    bound = gram.square().sum().sqrt()  # Frobenius norm, at least the largest eigenvalue
    if len(rows) == 1:
        return rows / bound.sqrt()
    identity = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    root, inverse = gram / bound, identity
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        step = 1.5 * identity - 0.5 * inverse @ root
        root, inverse = root @ step, step @ inverse
    return inverse @ rows / bound.sqrt()


# --------------------------------------------------------------- quadratic functions as monomials


def monomials(x: Float[Tensor, "*m d"]) -> Float[Tensor, "*m f"]:
    """Return the monomials $x_i x_j$ for i <= j, then $x_i$."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device).unbind()
    return torch.cat([x[..., i] * x[..., j], x], dim=-1)


def monomial_gradients(x: Float[Tensor, "m d"]) -> Float[Tensor, "m f d"]:
    """Return the gradients of the `monomials`."""
    d = x.shape[-1]
    i, j = torch.triu_indices(d, d).unbind()
    identity = torch.eye(d, dtype=x.dtype)
    products = x[:, i, None] * identity[j] + x[:, j, None] * identity[i]
    return torch.cat([products, identity.expand(len(x), d, d)], dim=1)


def matrices(c: Float[Tensor, "k f"], d: int) -> tuple[Tensor, Tensor]:
    """Return A [k, d, d] and b [k, d] of the quantities with coefficients c of the `monomials`."""
    i, j = torch.triu_indices(d, d, device=c.device).unbind()
    A = c.new_zeros(len(c), d, d)
    A[:, i, j] = c[:, : len(i)]
    return A + A.mT, c[:, len(i) :]
