r"""Conserved quantities of any form, their flows by an ordinary differential equation.

The flow of $C = \sum_k \tau_k C_k$ solves $\dot x = J\nabla C(x)$ for a time `scale`. A gradient
comes back along it by reverse mode. Polynomials, networks, any differentiable function will do.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import pi

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.conserved import ConservedQuantities, Flows, Transported
from symrazor.dynamics.functions import AnyFunctions, Function, Functions
from symrazor.dynamics.hamiltonian import ACTIVATIONS, Activation
from symrazor.dynamics.mechanics import apply_symplectic_form, degrees_of_freedom, rk4

LIMIT = 1e3
"""States beyond this many units are held there: a flow may leave to infinity in a finite time."""

OUTER = 0.05
"""Size of the outer weights of a `Network` at the start: flows begin short."""


class Observable(ConservedQuantities):
    r"""Base of quantities whose flow is solved for.

    Args:
        scale: flow time that belongs to $\tau = 1$.
        steps: of the Runge-Kutta method along a flow.
    """

    def __init__(self, scale: float = pi, steps: int = 8) -> None:
        """Hold the options."""
        super().__init__()
        if steps < 1:
            raise ValueError(f"expected at least one step along a flow, got {steps}")
        self.scale, self.steps = scale, steps

    @abstractmethod
    def gradient(
        self, x: Float[Tensor, "*n d"], tau: Float[Tensor, "*n k"]
    ) -> Float[Tensor, "*n d"]:
        r"""$\sum_k \tau_k \nabla C_k(x)$, differentiable in x and in the parameters."""

    def flows(self, tau: Float[Tensor, "r s k"]) -> Flows:
        """The flows of given times."""
        return SolvedFlows(self, tau)


class SolvedFlows(Flows):
    """Flows that are integrated when they are asked for."""

    def __init__(self, observable: Observable, tau: Float[Tensor, "r s k"]) -> None:
        """Hold the times; `capped` counts states that were held at the limit."""
        self.observable, self.tau = observable, tau
        self.capped: Tensor = torch.zeros((), device=tau.device)

    def transport(self, x: Float[Tensor, "r n d"]) -> Transported:
        """Integrate all flows at once; gradients come back by reverse mode."""
        r, n, d = x.shape
        s = self.tau.shape[1]
        grad = torch.is_grad_enabled()
        with torch.enable_grad():
            here = x if x.requires_grad else x.detach().requires_grad_()
            tau = self.tau[:, :, None].to(x).expand(r, s, n, -1)
            start = here[:, None].expand(r, s, n, d)
            moved = self._solve(start, tau)

        def pull(g: Tensor) -> Tensor:
            with torch.enable_grad():
                (back,) = torch.autograd.grad(moved, here, g / s, create_graph=grad)
            return back if grad else back.detach()

        return (moved if grad else moved.detach()), pull

    def _solve(self, x: Tensor, tau: Tensor) -> Tensor:
        observable = self.observable

        def field(state: Tensor) -> Tensor:
            return apply_symplectic_form(observable.gradient(state, tau))

        for _ in range(observable.steps):
            x = rk4(field, x, observable.scale / observable.steps)
            self.capped = self.capped + (x.detach().abs() > LIMIT).any(-1).sum()
            x = torch.nan_to_num(x, 0.0, LIMIT, -LIMIT).clamp(-LIMIT, LIMIT)
        return x


class Polynomial(Observable):
    r"""$C_k(x) = \sum_j c_{kj} m_j(x)$ over all monomials of degree 1 to `degree`.

    Args:
        phase: entries of a state.
        count: K.
        degree: largest degree.
        std: of the coefficients at the start.
        scale: see `Observable`.
        steps: see `Observable`.
        generator: of the start.
    """

    coefficients: nn.Parameter
    powers: Tensor

    def __init__(
        self,
        phase: int,
        count: int = 1,
        degree: int = 4,
        std: float = 0.02,
        scale: float = pi,
        steps: int = 8,
        generator: torch.Generator | None = None,
    ) -> None:
        """List the monomials."""
        super().__init__(scale, steps)
        degrees_of_freedom(phase)
        if degree < 1:
            raise ValueError(f"expected a degree of at least 1, got {degree}")
        terms = [
            [term.count(i) for i in range(phase)]
            for order in range(1, degree + 1)
            for term in combinations_with_replacement(range(phase), order)
        ]
        self.register_buffer("powers", torch.tensor(terms), persistent=False)
        start = std * torch.randn(count, len(terms), generator=generator)
        self.coefficients = nn.Parameter(start)

    @property
    def count(self) -> int:
        """K."""
        return len(self.coefficients)

    def _tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Powers of each entry, [..., d, degree + 1], and their derivatives."""
        highest = int(self.powers.max())
        rows = [torch.ones_like(x)]
        for _ in range(highest):
            rows.append(rows[-1] * x)
        slopes = [torch.zeros_like(x)] + [(k + 1) * rows[k] for k in range(highest)]
        return torch.stack(rows, -1), torch.stack(slopes, -1)

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """Values of the K polynomials."""
        table, _ = self._tables(x)
        columns = torch.arange(x.shape[-1], device=x.device)
        return table[..., columns, self.powers].prod(-1) @ self.coefficients.mT.to(x)

    def gradient(
        self, x: Float[Tensor, "*n d"], tau: Float[Tensor, "*n k"]
    ) -> Float[Tensor, "*n d"]:
        """In closed form."""
        table, slope = self._tables(x)
        columns = torch.arange(x.shape[-1], device=x.device)
        factors = table[..., columns, self.powers]
        slopes = slope[..., columns, self.powers]
        weights = tau @ self.coefficients.to(x)
        found = []
        for i in range(x.shape[-1]):
            parts = [factors[..., :i], slopes[..., i : i + 1], factors[..., i + 1 :]]
            found.append((torch.cat(parts, -1).prod(-1) * weights).sum(-1))
        return torch.stack(found, -1)


class Network(Observable):
    """K outputs of a small perceptron with one hidden layer of its own each.

    Args:
        phase: entries of a state.
        count: K.
        width: hidden units.
        activation: smooth.
        scale: see `Observable`.
        steps: see `Observable`.
        generator: of the start.
    """

    def __init__(
        self,
        phase: int,
        count: int = 1,
        width: int = 16,
        activation: Activation = "tanh",
        scale: float = pi,
        steps: int = 8,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draw the start."""
        super().__init__(scale, steps)
        degrees_of_freedom(phase)
        self.activation: Activation = activation
        self.inner = nn.Parameter(torch.randn(count * width, phase, generator=generator))
        self.bias = nn.Parameter(torch.randn(count * width, generator=generator))
        self.outer = nn.Parameter(OUTER * torch.randn(count, width, generator=generator))

    @property
    def count(self) -> int:
        """K."""
        return len(self.outer)

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """Values of the K networks."""
        weights = torch.block_diag(*self.outer[:, None]).to(x)
        hidden = ACTIVATIONS[self.activation](x @ self.inner.mT.to(x) + self.bias.to(x))[0]
        values: Tensor = hidden @ weights.mT
        return values

    def gradient(
        self, x: Float[Tensor, "*n d"], tau: Float[Tensor, "*n k"]
    ) -> Float[Tensor, "*n d"]:
        """In closed form."""
        slope = ACTIVATIONS[self.activation](x @ self.inner.mT.to(x) + self.bias.to(x))[1]
        outer = (tau[..., None] * self.outer.to(x)).flatten(-2)
        found: Tensor = (slope * outer) @ self.inner.to(x)
        return found


class Combination(Observable):
    r"""$C_k = \sum_j c_{kj} f_j$ of given differentiable functions of the state.

    Args:
        functions: each [..., d] -> [...]; or all at once, such as `Products`.
        count: K.
        std: of the coefficients at the start.
        scale: see `Observable`.
        steps: see `Observable`.
        generator: of the start.
    """

    def __init__(
        self,
        functions: Sequence[Function] | Functions,
        count: int = 1,
        std: float = 0.05,
        scale: float = pi,
        steps: int = 8,
        generator: torch.Generator | None = None,
    ) -> None:
        """Hold the functions."""
        super().__init__(scale, steps)
        several = functions if isinstance(functions, Functions) else AnyFunctions(functions)
        self.functions, self.rounded = several, False
        start = std * torch.randn(count, len(several), generator=generator)
        self.coefficients = nn.Parameter(start)

    @property
    def count(self) -> int:
        """K."""
        return len(self.coefficients)

    def with_coefficients(
        self, coefficients: Float[Tensor, "k j"], rounded: bool = False
    ) -> "Combination":
        """Other combinations of the same functions, held as they are."""
        made = Combination(self.functions, len(coefficients), scale=self.scale, steps=self.steps)
        with torch.no_grad():
            made.coefficients.copy_(coefficients)
        made.rounded = rounded
        return made.requires_grad_(False)

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """Values of the K combinations."""
        return self.functions(x) @ self.coefficients.mT.to(x)

    def gradient(
        self, x: Float[Tensor, "*n d"], tau: Float[Tensor, "*n k"]
    ) -> Float[Tensor, "*n d"]:
        """In closed form where the functions have one, else by reverse mode."""
        return self.functions.gradient(x, tau @ self.coefficients.to(x))
