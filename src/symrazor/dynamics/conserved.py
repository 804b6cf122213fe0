r"""Learned conserved quantities with flows in closed form.

$C_k(x) = \tfrac12 x^\top A_k x + b_k^\top x$. The flow of $\sum_k \tau_k C_k$ is one matrix
exponential of $\sum_k \tau_k G_k$, with generators
$G_k = \begin{pmatrix} J A_k & J b_k \\ 0 & 0\end{pmatrix}$ that act on $(x, 1)$.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from symrazor.dynamics.phase import freedom, symplectic_form
from symrazor.linalg.matrix_functions import exponential

Transported = tuple[
    Float[Tensor, "r s n d"],
    Callable[[Float[Tensor, "r s n d"]], Float[Tensor, "r n d"]],
]
"""States moved by S flows, and the map from gradients there to their average gradient here."""


class Flows(ABC):
    """Maps of states along conserved flows, S of them for each draw of the weights."""

    capped: Tensor | None = None

    @abstractmethod
    def transport(self, x: Float[Tensor, "r n d"]) -> Transported:
        """Moved states, and how gradients come back."""


class ConservedQuantities(nn.Module, ABC):
    """K functions of the state whose flows can be followed."""

    scale: float

    @property
    @abstractmethod
    def count(self) -> int:
        """K."""

    @property
    def flow_count(self) -> int:
        """How many flow times are needed; K unless there are flows beside those of the C."""
        return self.count

    @abstractmethod
    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """Values of the K quantities."""

    @abstractmethod
    def flows(self, tau: Float[Tensor, "r s k"]) -> Flows:
        r"""The flows of $\sum_k \tau_k C_k$ for given times."""


@dataclass(frozen=True)
class AffineFlows(Flows):
    r"""Maps $x \to E x + t$, S of them for each of R draws, and how many were cut short."""

    linear: Float[Tensor, "r s d d"]
    shift: Float[Tensor, "r s d"]
    capped: Tensor | None = None

    def transport(self, x: Float[Tensor, "r n d"]) -> Transported:
        r"""Moved states $z_s$; gradients come back as $\frac1S \sum_s E_s^\top \nabla F(z_s)$."""
        E = self.linear
        moved = x.unsqueeze(1) @ E.mT + self.shift.unsqueeze(2)

        def pull(g: Tensor) -> Tensor:
            return (g @ E).mean(dim=1)

        return moved, pull


def cap_norm(
    matrix: Float[Tensor, "*b d d"], cap: float
) -> tuple[Float[Tensor, "*b d d"], Bool[Tensor, "*b"]]:
    """Shrink matrices with a Frobenius norm above `cap` to it; the second tells which were."""
    norm = matrix.square().sum(dim=(-2, -1), keepdim=True).clamp_min(1e-30).sqrt()
    over = norm > cap
    capped = torch.where(over, matrix * (cap / norm), matrix)
    return capped, over[..., 0, 0]


class Quadratic(ConservedQuantities):
    r"""K quadratic conserved quantities.

    Args:
        phase: entries of a state.
        count: K.
        std: of the initial A and b; 0.1 / phase by default, so that flows start equally short in
            every dimension; never 0, which is a saddle point of the evidence.
        scale: flow time that belongs to $\tau = 1$; $\pi$, so that a rotation with $A = I$ goes
            once around for $\tau \in [-1, 1]$.
        norm_cap: longest $\|\sum_k \tau_k G_k\|$ times `scale`; beyond it a flow is cut short, and
            counted. Flows of indefinite A grow as its exponential.
        commutators: whether to flow along all $[G_i, G_j]$ as well: what two symmetries generate
            together is a symmetry too.
        generator: of the start.
    """

    A_raw: nn.Parameter
    b: nn.Parameter
    J: Tensor

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
        """Draw the start."""
        super().__init__()
        n = freedom(phase)
        std = 0.1 / phase if std is None else std
        if count < 1 or std <= 0:
            raise ValueError(
                f"expected count >= 1 and std > 0, got count={count}, std={std}; "
                "an exact zero is a saddle point from which nothing is learned"
            )
        self.scale, self.norm_cap, self.commutators = scale, norm_cap, commutators
        self.A_raw = nn.Parameter(std * torch.randn(count, phase, phase, generator=generator))
        self.b = nn.Parameter(std * torch.randn(count, phase, generator=generator))
        self.register_buffer("J", symplectic_form(n).float(), persistent=False)

    @classmethod
    def fixed(cls, A: Float[Tensor, "k d d"], b: Float[Tensor, "k d"] | None = None) -> "Quadratic":
        """Given quantities that are not learned."""
        made = cls(A.shape[-1], len(A))
        with torch.no_grad():
            made.A_raw.copy_(A)
            made.b.copy_(torch.zeros_like(made.b) if b is None else b)
        return made.requires_grad_(False)

    @property
    def count(self) -> int:
        """K."""
        return len(self.b)

    @property
    def A(self) -> Float[Tensor, "k d d"]:
        """Symmetric matrices."""
        return 0.5 * (self.A_raw + self.A_raw.mT)

    def generators(self) -> Float[Tensor, "k d e"]:
        r"""$(J A_k \mid J b_k)$, of shape [K, 2n, 2n + 1]."""
        J = self.J.to(self.b)
        return torch.cat([J @ self.A, (self.b @ J.mT)[..., None]], dim=-1)

    @property
    def flow_count(self) -> int:
        """K, or K (K + 1) / 2 with commutators."""
        return self.count * (self.count + 1) // 2 if self.commutators else self.count

    def flow_generators(self) -> Float[Tensor, "m e e"]:
        """Square generators on (x, 1): the K of the quantities, then their commutators."""
        square = nn.functional.pad(self.generators(), (0, 0, 0, 1))
        if not self.commutators:
            return square
        i, j = torch.triu_indices(self.count, self.count, 1, device=square.device).unbind()
        return torch.cat([square, square[i] @ square[j] - square[j] @ square[i]])

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """Values of the K quantities."""
        A, b = self.A.to(x), self.b.to(x)
        return 0.5 * torch.einsum("...i,kij,...j->...k", x, A, x) + x @ b.mT

    def flows(self, tau: Float[Tensor, "r s k"]) -> AffineFlows:
        """The flows of given times, by a matrix exponential in float64."""
        Z = torch.einsum("rsk,kij->rsij", tau.to(self.b), self.flow_generators())
        Z = self.scale * Z.double()
        Z, over = cap_norm(Z, self.norm_cap)
        E = exponential(Z, self.norm_cap)
        d = Z.shape[-1] - 1
        return AffineFlows(E[..., :d, :d].to(self.b), E[..., :d, d].to(self.b), over.sum().detach())
