r"""Functions of the state to combine into conserved quantities.

A flow asks for $\sum_j w_j \nabla f_j(x)$ sixteen times or more, and its own gradient is taken
twice over. Any differentiable functions will do, by reverse mode. Products of coordinates know
their gradient in closed form, all at once, which is some ten times faster.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import mul

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.mechanics import degrees_of_freedom

Function = Callable[[Tensor], Tensor]
"""States [..., d] -> values [...]."""
Sloped = Callable[[Tensor], tuple[Tensor, Tensor]]
"""States [..., d] -> values [...] and gradients [..., d]."""


class Functions(ABC):
    """f functions of the state and their gradients."""

    @abstractmethod
    def __len__(self) -> int:
        """How many."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n f"]:
        """Their values."""

    @abstractmethod
    def gradient(
        self, x: Float[Tensor, "*n d"], weights: Float[Tensor, "*n f"]
    ) -> Float[Tensor, "*n d"]:
        r"""$\sum_j w_j \nabla f_j(x)$, differentiable in both."""

    def slopes(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m f d"]:
        """The gradient of each at m states."""
        f = len(self)
        one = torch.eye(f, dtype=x.dtype, device=x.device).expand(len(x), f, f)
        return self.gradient(x[:, None].expand(-1, f, -1), one).detach()


class AnyFunctions(Functions):
    """Given functions, their gradients by reverse mode.

    Args:
        functions: each [..., d] -> [...].
    """

    def __init__(self, functions: Sequence[Function]) -> None:
        """Hold the functions."""
        if not functions:
            raise ValueError("expected at least one function of the state, got none")
        self.functions = list(functions)

    def __len__(self) -> int:
        return len(self.functions)

    def __call__(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n f"]:
        """Their values.

        Raises:
            ValueError: a function that does not return one number for each state.
        """
        values = [function(x) for function in self.functions]
        for number, value in enumerate(values):
            if value.shape != x.shape[:-1]:
                raise ValueError(
                    f"expected functions of a state, {list(x.shape)} -> {list(x.shape[:-1])}, got "
                    f"shape {list(value.shape)} of function {number}"
                )
        return torch.stack(values, dim=-1)

    def gradient(
        self, x: Float[Tensor, "*n d"], weights: Float[Tensor, "*n f"]
    ) -> Float[Tensor, "*n d"]:
        """By reverse mode, with a graph."""
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (found,) = torch.autograd.grad((self(at) * weights).sum(), at, create_graph=True)
        return found


class Products(Functions):
    r"""Products of the coordinates $q_1, \dots, p_n$ and of further variables, by name.

    Args:
        phase: entries of a state.
        terms: such as "q1 p2" or "p1 p2 q2"; factors that are no coordinate are in `more`.
        more: name -> further variable, with its gradient.

    Raises:
        ValueError: a factor that is neither.
    """

    def __init__(
        self, phase: int, terms: Sequence[str], more: Mapping[str, Sloped] | None = None
    ) -> None:
        """Look up the factors; 1 fills terms that have few."""
        n = degrees_of_freedom(phase)
        self.more = dict(more or {})
        names = [*(f"q{i + 1}" for i in range(n)), *(f"p{i + 1}" for i in range(n)), *self.more]
        places = {name: place for place, name in enumerate(names)}
        if not terms:
            raise ValueError("expected at least one term, got none")
        self.degree = max(len(term.split()) for term in terms)
        parts = torch.zeros(len(names) + 1, self.degree, len(terms))
        for j, term in enumerate(terms):
            factors = term.split()
            wrong = [factor for factor in factors if factor not in places]
            if wrong or not factors:
                known = ", ".join(names)
                raise ValueError(f"expected products of {known}, got {wrong or term!r}")
            for k in range(self.degree):
                parts[places[factors[k]] if k < len(factors) else -1, k, j] = 1
        self.terms, self.phase = tuple(terms), phase
        self.parts = parts.flatten(1)

    def __len__(self) -> int:
        return len(self.terms)

    def __call__(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n f"]:
        """Values of the products."""
        return reduce(mul, self._factors(x)[0])

    def gradient(
        self, x: Float[Tensor, "*n d"], weights: Float[Tensor, "*n f"]
    ) -> Float[Tensor, "*n d"]:
        """By the product rule."""
        factors, slopes = self._factors(x)
        each = [
            reduce(mul, (f for j, f in enumerate(factors) if j != k), weights)
            for k in range(self.degree)
        ]
        found = torch.cat(each, dim=-1) @ self.parts.mT
        total = found[..., : self.phase]
        for k, slope in enumerate(slopes):
            total = total + found[..., self.phase + k, None] * slope
        return total

    def _factors(self, x: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The k-th factor of all terms, for each k; and the gradients of further variables."""
        if self.parts.device != x.device or self.parts.dtype != x.dtype:
            self.parts = self.parts.to(x)
        extra = [variable(x) for variable in self.more.values()]
        columns = [x, *(value[..., None] for value, _ in extra), torch.ones_like(x[..., :1])]
        factors = (torch.cat(columns, dim=-1) @ self.parts).chunk(self.degree, dim=-1)
        return factors, [slope for _, slope in extra]


def inverse_distance(x: Float[Tensor, "*n d"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n d"]]:
    r"""$1/r$ of a single body, $r = |q|$, and its gradient $(-q/r^3, 0)$."""
    q = x[..., : x.shape[-1] // 2]
    value = q.square().sum(-1).rsqrt()
    slope = -q * value[..., None] ** 3
    return value, torch.cat([slope, torch.zeros_like(slope)], dim=-1)
