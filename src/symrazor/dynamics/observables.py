r"""Conserved quantities of any form, with flows by numerical integration.

The flow of $C = \sum_k \tau_k C_k$ solves $\dot x = J\nabla C(x)$ for a time `scale`. Gradients are
pulled back along it by reverse-mode differentiation. An `Observable` only has to provide
$\sum_k \tau_k \nabla C_k(x)$: `Polynomial`, `Network`, or a `Combination` of given functions.

A flow evaluates that gradient 16 times or more, and training differentiates it twice. `Products` of
coordinates have it in closed form, about ten times faster than `AnyFunctions`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import combinations_with_replacement
from math import pi
from operator import mul

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.conserved import ConservedQuantities, Flows, Transported
from symrazor.dynamics.hamiltonian import ACTIVATIONS, Activation
from symrazor.dynamics.mechanics import apply_symplectic_form, degrees_of_freedom, rk4

Function = Callable[[Tensor], Tensor]
"""States [..., d] -> values [...]."""
States = Float[Tensor, "*n d"]
FunctionWithGradient = Callable[[Tensor], tuple[Tensor, Tensor]]
"""States [..., d] -> values [...] and gradients [..., d]."""

MAX_STATE = 1e3
"""Entries of a state are clamped here: a flow may reach infinity in a finite time."""
INITIAL_OUTER_STD = 0.05
"""Standard deviation of the initial outer weights of a `Network`; small, for short flows."""


class Functions(ABC):
    """f functions of the state, with gradients."""

    @abstractmethod
    def __len__(self) -> int:
        """Return f."""

    @abstractmethod
    def __call__(self, x: States) -> Float[Tensor, "*n f"]:
        """Return the values."""

    @abstractmethod
    def gradient(self, x: States, weights: Float[Tensor, "*n f"]) -> States:
        r"""Return $\sum_j w_j \nabla f_j(x)$, differentiable in x and w."""

    def gradients(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m f d"]:
        """Return the gradient of every function at m states."""
        f = len(self)
        identity = torch.eye(f, dtype=x.dtype, device=x.device).expand(len(x), f, f)
        return self.gradient(x[:, None].expand(-1, f, -1), identity).detach()


class AnyFunctions(Functions):
    """Differentiable functions [..., d] -> [...], with gradients by automatic differentiation."""

    def __init__(self, functions: Sequence[Function]) -> None:
        if not functions:
            raise ValueError("The list of functions is empty; pass at least one.")
        self.functions = list(functions)

    def __len__(self) -> int:
        return len(self.functions)

    def __call__(self, x: States) -> Float[Tensor, "*n f"]:
        """Return the values; raise ValueError if a function returns other shapes."""
        values = [function(x) for function in self.functions]
        for number, value in enumerate(values):
            if value.shape != x.shape[:-1]:
                raise ValueError(
                    f"Function {number} must return one number per state: {list(x.shape)} -> "
                    f"{list(x.shape[:-1])}, got shape {list(value.shape)}."
                )
        return torch.stack(values, dim=-1)

    def gradient(self, x: States, weights: Float[Tensor, "*n f"]) -> States:
        """Return the weighted gradient, keeping the graph."""
        with torch.enable_grad():
            states = x if x.requires_grad else x.detach().requires_grad_()
            total = (self(states) * weights).sum()
            (gradient,) = torch.autograd.grad(total, states, create_graph=True)
        return gradient


def coordinate_names(phase: int) -> list[str]:
    """Return q1, ..., qn, p1, ..., pn."""
    numbers = range(1, degrees_of_freedom(phase) + 1)
    return [f"{letter}{i}" for letter in "qp" for i in numbers]


class Products(Functions):
    r"""Products of the coordinates $q_1, \dots, p_n$ and of further variables, by name.

    Args:
        phase: number of entries of a state.
        terms: such as "q1 p2" or "p1 p2 q2"; a factor is a coordinate or a key of `more`.
        more: name -> further variable, with its gradient.

    Raises:
        ValueError: an unknown factor, or no term.
    """

    def __init__(
        self,
        phase: int,
        terms: Sequence[str],
        more: Mapping[str, FunctionWithGradient] | None = None,
    ) -> None:
        self.more = dict(more or {})
        names = [*coordinate_names(phase), *self.more]
        index = {name: i for i, name in enumerate(names)}
        if not terms:
            raise ValueError("The list of terms is empty; pass at least one.")
        self.degree = max(len(term.split()) for term in terms)
        # One-hot selection of the k-th factor of every term; the constant 1 pads short terms.
        selection = torch.zeros(len(names) + 1, self.degree, len(terms))
        for j, term in enumerate(terms):
            factors = term.split()
            unknown = [factor for factor in factors if factor not in index]
            if unknown or not factors:
                raise ValueError(
                    f"Term {term!r} must be a product of {', '.join(names)}; unknown: {unknown}."
                )
            for k in range(self.degree):
                selection[index[factors[k]] if k < len(factors) else -1, k, j] = 1
        self.terms, self.phase = tuple(terms), phase
        self.selection = selection.flatten(1)

    def __len__(self) -> int:
        return len(self.terms)

    def __call__(self, x: States) -> Float[Tensor, "*n f"]:
        """Return the products."""
        return reduce(mul, self._factors(x)[0])

    def gradient(self, x: States, weights: Float[Tensor, "*n f"]) -> States:
        """Return the weighted gradient by the product rule."""
        factors, extra_gradients = self._factors(x)
        partials = [
            reduce(mul, (f for j, f in enumerate(factors) if j != k), weights)
            for k in range(self.degree)
        ]
        by_variable = torch.cat(partials, dim=-1) @ self.selection.mT
        total = by_variable[..., : self.phase]
        for k, extra in enumerate(extra_gradients):
            total = total + by_variable[..., self.phase + k, None] * extra
        return total

    def _factors(self, x: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the k-th factor of all terms for each k, and gradients of further variables."""
        if self.selection.device != x.device or self.selection.dtype != x.dtype:
            self.selection = self.selection.to(x)
        extra = [variable(x) for variable in self.more.values()]
        columns = [x, *(value[..., None] for value, _ in extra), torch.ones_like(x[..., :1])]
        factors = (torch.cat(columns, dim=-1) @ self.selection).chunk(self.degree, dim=-1)
        return factors, [gradient for _, gradient in extra]


def inverse_distance(x: Float[Tensor, "*n d"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n d"]]:
    r"""Return $1/r$, $r = |q|$, of a single body, and its gradient $(-q/r^3, 0)$."""
    q = x[..., : x.shape[-1] // 2]
    value = q.square().sum(-1).rsqrt()
    gradient = -q * value[..., None] ** 3
    return value, torch.cat([gradient, torch.zeros_like(gradient)], dim=-1)


class Observable(ConservedQuantities):
    r"""Base class of quantities whose flow is integrated numerically.

    Args:
        count: K.
        scale: flow time at $\tau = 1$.
        steps: Runge-Kutta steps along a flow.
    """

    def __init__(self, count: int, scale: float = pi, steps: int = 8) -> None:
        super().__init__(count, scale)
        if steps < 1:
            raise ValueError(f"steps along a flow must be at least 1, got {steps}.")
        self.steps = steps

    @abstractmethod
    def gradient(self, x: States, tau: Float[Tensor, "*n k"]) -> States:
        r"""Return $\sum_k \tau_k \nabla C_k(x)$, differentiable in x and in the parameters."""

    def flows(self, tau: Float[Tensor, "r s k"]) -> Flows:
        """Return the flows at these times; they are integrated on use."""
        return IntegratedFlows(self, tau)


class IntegratedFlows(Flows):
    """Flows of an observable, by the Runge-Kutta method; `capped` counts clamped states."""

    def __init__(self, observable: Observable, tau: Float[Tensor, "r s k"]) -> None:
        self.observable, self.tau = observable, tau
        self.capped: Tensor = torch.zeros((), device=tau.device)

    def transport(self, x: Float[Tensor, "r n d"]) -> Transported:
        """Integrate all flows at once; gradients are pulled back by reverse mode."""
        r, n, d = x.shape
        s = self.tau.shape[1]
        grad = torch.is_grad_enabled()
        with torch.enable_grad():
            origin = x if x.requires_grad else x.detach().requires_grad_()
            tau = self.tau[:, :, None].to(x).expand(r, s, n, -1)
            moved = self._integrate(origin[:, None].expand(r, s, n, d), tau)

        def pull_back(g: Tensor) -> Tensor:
            with torch.enable_grad():
                (pulled,) = torch.autograd.grad(moved, origin, g / s, create_graph=grad)
            return pulled if grad else pulled.detach()

        return (moved if grad else moved.detach()), pull_back

    def _integrate(self, x: Tensor, tau: Tensor) -> Tensor:
        steps = self.observable.steps

        def field(state: Tensor) -> Tensor:
            return apply_symplectic_form(self.observable.gradient(state, tau))

        for _ in range(steps):
            x = rk4(field, x, self.observable.scale / steps)
            self.capped = self.capped + (x.detach().abs() > MAX_STATE).any(-1).sum()
            x = torch.nan_to_num(x, 0.0, MAX_STATE, -MAX_STATE).clamp(-MAX_STATE, MAX_STATE)
        return x


class Network(Observable):
    """K small perceptrons with one hidden layer each.

    Args:
        phase: number of entries of a state.
        count: K.
        width: hidden units of each perceptron.
        activation: by name; should be smooth.
        scale: see `Observable`.
        steps: see `Observable`.
        generator: for the initial weights.
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
        super().__init__(count, scale, steps)
        degrees_of_freedom(phase)
        self.activation: Activation = activation
        self.inner = nn.Parameter(torch.randn(count * width, phase, generator=generator))
        self.bias = nn.Parameter(torch.randn(count * width, generator=generator))
        outer = torch.randn(count, width, generator=generator)
        self.outer = nn.Parameter(INITIAL_OUTER_STD * outer)

    def forward(self, x: States) -> Float[Tensor, "*n k"]:
        """Return the values of the K perceptrons."""
        weights = torch.block_diag(*self.outer[:, None]).to(x)
        values: Tensor = self._hidden(x)[0] @ weights.mT
        return values

    def gradient(self, x: States, tau: Float[Tensor, "*n k"]) -> States:
        """Return the weighted gradient in closed form."""
        outer = (tau[..., None] * self.outer.to(x)).flatten(-2)
        gradient: Tensor = (self._hidden(x)[1] * outer) @ self.inner.to(x)
        return gradient

    def _hidden(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return activations of the hidden units and their slopes."""
        return ACTIVATIONS[self.activation](x @ self.inner.mT.to(x) + self.bias.to(x))


class Combination(Observable):
    r"""Linear combinations $C_k = \sum_j c_{kj} f_j$ of given functions of the state.

    Args:
        functions: each [..., d] -> [...], or `Functions` such as `Products`.
        count: K.
        std: standard deviation of the initial coefficients.
        scale: see `Observable`.
        steps: see `Observable`.
        generator: for the initial coefficients.
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
        super().__init__(count, scale, steps)
        if not isinstance(functions, Functions):
            functions = AnyFunctions(functions)
        self.functions = functions
        start = torch.randn(count, len(functions), generator=generator)
        self.coefficients = nn.Parameter(std * start)

    def with_coefficients(
        self, coefficients: Float[Tensor, "k j"], rounded: bool = False
    ) -> "Combination":
        """Return fixed combinations of the same functions with other coefficients."""
        fixed = Combination(self.functions, len(coefficients), scale=self.scale, steps=self.steps)
        with torch.no_grad():
            fixed.coefficients.copy_(coefficients)
        fixed.rounded = rounded
        return fixed.requires_grad_(False)

    def forward(self, x: States) -> Float[Tensor, "*n k"]:
        """Return the values of the K combinations."""
        return self.functions(x) @ self.coefficients.mT.to(x)

    def gradient(self, x: States, tau: Float[Tensor, "*n k"]) -> States:
        """Return the weighted gradient of the functions."""
        return self.functions.gradient(x, tau @ self.coefficients.to(x))


class Polynomial(Combination):
    r"""Polynomials $C_k(x) = \sum_j c_{kj} m_j(x)$ over all monomials of degree 1 to `degree`.

    States have `phase` entries. For the other arguments see `Combination`.
    """

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
        if degree < 1:
            raise ValueError(f"degree must be at least 1, got {degree}.")
        terms = [
            " ".join(factors)
            for order in range(1, degree + 1)
            for factors in combinations_with_replacement(coordinate_names(phase), order)
        ]
        super().__init__(Products(phase, terms), count, std, scale, steps, generator)
