r"""One step of an integrator: $x(t) \to x(t + h)$ for $\dot x = f(x)$.

Every function takes `(field, x, h)`; h is a number or a tensor that broadcasts against x, so steps
may differ from datum to datum. Training and evaluation call the same function.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from symrazor.dynamics.phase import Field

Step = float | Tensor
Integrator = Callable[[Field, Tensor, Step], Tensor]
Name = Literal["euler", "heun", "midpoint", "rk4", "implicit-midpoint", "leapfrog", "yoshida4"]

FIXED_POINT_ROUNDS = 4
"""Rounds of the implicit midpoint rule: its error falls by h |f'| / 2 in each."""


def euler(field: Field, x: Tensor, h: Step) -> Tensor:
    r"""$x + h f(x)$; order 1. For parity with published results only: it gains energy."""
    return x + h * field(x)


def heun(field: Field, x: Tensor, h: Step) -> Tensor:
    r"""$x + \tfrac h2 (f(x) + f(x + h f(x)))$; order 2."""
    first = field(x)
    return x + 0.5 * h * (first + field(x + h * first))


def midpoint(field: Field, x: Tensor, h: Step) -> Tensor:
    r"""$x + h f(x + \tfrac h2 f(x))$, explicit; order 2, two evaluations."""
    return x + h * field(x + 0.5 * h * field(x))


def rk4(field: Field, x: Tensor, h: Step) -> Tensor:
    """The classical Runge-Kutta method; order 4, four evaluations."""
    k1 = field(x)
    k2 = field(x + 0.5 * h * k1)
    k3 = field(x + 0.5 * h * k2)
    k4 = field(x + h * k3)
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def implicit_midpoint(field: Field, x: Tensor, h: Step) -> Tensor:
    r"""$x' = x + h f(\tfrac{x + x'}2)$ by fixed-point rounds; order 2.

    Symplectic for every Hamiltonian as far as the rounds have converged; conserves quadratic
    invariants.
    """
    middle = x
    for _ in range(FIXED_POINT_ROUNDS):
        middle = x + 0.5 * h * field(middle)
    return x + h * field(middle)


def leapfrog(field: Field, x: Tensor, h: Step) -> Tensor:
    """Half a kick, a drift, half a kick; order 2, symplectic for H = T(p) + V(q) only."""
    q, p = x.chunk(2, dim=-1)
    p = p + 0.5 * h * field(torch.cat([q, p], -1)).chunk(2, dim=-1)[1]
    q = q + h * field(torch.cat([q, p], -1)).chunk(2, dim=-1)[0]
    p = p + 0.5 * h * field(torch.cat([q, p], -1)).chunk(2, dim=-1)[1]
    return torch.cat([q, p], -1)


def yoshida4(field: Field, x: Tensor, h: Step) -> Tensor:
    """Three leapfrogs, the middle one backwards; order 4, symplectic for separable H."""
    outer = 1 / (2 - 2 ** (1 / 3))
    for share in (outer, 1 - 2 * outer, outer):
        x = leapfrog(field, x, share * h)
    return x


INTEGRATORS: dict[Name, Integrator] = {
    "euler": euler,
    "heun": heun,
    "midpoint": midpoint,
    "rk4": rk4,
    "implicit-midpoint": implicit_midpoint,
    "leapfrog": leapfrog,
    "yoshida4": yoshida4,
}
ORDERS: dict[Name, int] = {
    "euler": 1,
    "heun": 2,
    "midpoint": 2,
    "rk4": 4,
    "implicit-midpoint": 2,
    "leapfrog": 2,
    "yoshida4": 4,
}


def named(name: Name) -> Integrator:
    """The integrator of a name.

    Raises:
        ValueError: no such integrator.
    """
    if name not in INTEGRATORS:
        raise ValueError(f"expected an integrator among {', '.join(INTEGRATORS)}, got {name!r}")
    return INTEGRATORS[name]


def advance(integrator: Integrator, field: Field, x: Tensor, h: Step, substeps: int = 1) -> Tensor:
    """`substeps` equal steps that add up to h."""
    for _ in range(substeps):
        x = integrator(field, x, h / substeps)
    return x
