r"""Hamiltonian mechanics: phase space, Poisson brackets, integrators and accurate trajectories.

States are $x = (q, p) \in R^{2n}$ and move by $\dot x = J\nabla H(x)$, with the symplectic form
$J = \begin{pmatrix} 0 & I \\ -I & 0 \end{pmatrix}$.

Integrators take `(field, x, h)` and return $x(t + h)$ for $\dot x = f(x)$. The step h is a number
or a tensor that broadcasts against x, so data may have different time steps. Training and
evaluation use the same integrators. `solve` computes trajectories to a tolerance.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Scalar = Callable[[Tensor], Tensor]
"""A function of the state: [..., 2n] -> [...]."""
Field = Callable[[Tensor], Tensor]
"""A vector field: [..., 2n] -> [..., 2n]."""
Step = float | Tensor
Integrator = Callable[[Field, Tensor, Step], Tensor]
IntegratorName = Literal[
    "euler", "heun", "midpoint", "rk4", "implicit-midpoint", "leapfrog", "yoshida4"
]

FIXED_POINT_ITERATIONS = 4
"""Iterations of the implicit midpoint rule; each reduces the error by a factor h |f'| / 2."""
SUBSTEP_COUNTS = (2, 4, 6, 8, 10, 12, 14)
"""Substeps of the midpoint rules that `extrapolated_step` extrapolates from."""
MAX_HALVINGS = 12
"""`solve` halves its step at most this many times between two output times."""


def degrees_of_freedom(phase: int) -> int:
    """Return n for states with `phase` = 2n entries; raise ValueError if it is odd or below 2."""
    if phase < 2 or phase % 2:
        raise ValueError(
            f"States (q, p) need an even number of entries, got {phase}. Add a momentum for every "
            "position, or pass positions=True if the states are positions only."
        )
    return phase // 2


def symplectic_form(n: int) -> Float[Tensor, "d d"]:
    r"""Return $J = \begin{pmatrix} 0 & I \\ -I & 0 \end{pmatrix}$ for n degrees of freedom."""
    identity = torch.eye(n, dtype=torch.float64)
    zero = torch.zeros_like(identity)
    return torch.cat([torch.cat([zero, identity], 1), torch.cat([-identity, zero], 1)])


def apply_symplectic_form(gradient: Tensor, dim: int = -1) -> Tensor:
    r"""Return $J \nabla H$: $\dot q = \partial H/\partial p$, $\dot p = -\partial H/\partial q$."""
    dq, dp = gradient.chunk(2, dim)
    return torch.cat([dp, -dq], dim)


def gradient(scalar: Scalar, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Return the gradient of a scalar function at many states, by reverse-mode differentiation."""
    with torch.enable_grad():
        states = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(scalar(states).sum(), states)
    return slope


def hamiltonian_field(scalar: Scalar) -> Field:
    r"""Return the vector field $J\nabla H$ of a function H of the state."""

    def field(x: Tensor) -> Tensor:
        return apply_symplectic_form(gradient(scalar, x))

    return field


# ------------------------------------------------------------------------------------- integrators


def euler(field: Field, x: Tensor, h: Step) -> Tensor:
    r"""Take an explicit Euler step, $x + h f(x)$; order 1, gains energy."""
    return x + h * field(x)


def heun(field: Field, x: Tensor, h: Step) -> Tensor:
    r"""Take a step of Heun's method, $x + \tfrac h2 (f(x) + f(x + h f(x)))$; order 2."""
    slope = field(x)
    return x + 0.5 * h * (slope + field(x + h * slope))


def midpoint(field: Field, x: Tensor, h: Step) -> Tensor:
    r"""Take an explicit midpoint step, $x + h f(x + \tfrac h2 f(x))$; order 2."""
    return x + h * field(x + 0.5 * h * field(x))


def rk4(field: Field, x: Tensor, h: Step) -> Tensor:
    """Take a step of the classical Runge-Kutta method; order 4, four evaluations."""
    k1 = field(x)
    k2 = field(x + 0.5 * h * k1)
    k3 = field(x + 0.5 * h * k2)
    k4 = field(x + h * k3)
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def implicit_midpoint(field: Field, x: Tensor, h: Step) -> Tensor:
    r"""Solve $x' = x + h f(\tfrac{x + x'}2)$ (implicit midpoint) by fixed-point iteration; order 2.

    Symplectic for every Hamiltonian and exact for quadratic invariants, up to the convergence of
    the iteration.
    """
    middle = x
    for _ in range(FIXED_POINT_ITERATIONS):
        middle = x + 0.5 * h * field(middle)
    return x + h * field(middle)


def leapfrog(field: Field, x: Tensor, h: Step) -> Tensor:
    """Take a leapfrog step (kick, drift, kick); order 2, symplectic for H = T(p) + V(q) only."""
    q, p = x.chunk(2, dim=-1)
    p = p + 0.5 * h * field(torch.cat([q, p], -1)).chunk(2, dim=-1)[1]
    q = q + h * field(torch.cat([q, p], -1)).chunk(2, dim=-1)[0]
    p = p + 0.5 * h * field(torch.cat([q, p], -1)).chunk(2, dim=-1)[1]
    return torch.cat([q, p], -1)


def yoshida4(field: Field, x: Tensor, h: Step) -> Tensor:
    """Take Yoshida's composition of three leapfrog steps; order 4, symplectic for separable H."""
    outer = 1 / (2 - 2 ** (1 / 3))
    for fraction in (outer, 1 - 2 * outer, outer):
        x = leapfrog(field, x, fraction * h)
    return x


INTEGRATORS: dict[IntegratorName, Integrator] = {
    "euler": euler,
    "heun": heun,
    "midpoint": midpoint,
    "rk4": rk4,
    "implicit-midpoint": implicit_midpoint,
    "leapfrog": leapfrog,
    "yoshida4": yoshida4,
}


def advance(integrator: Integrator, field: Field, x: Tensor, h: Step, substeps: int = 1) -> Tensor:
    """Advance x by the time h in equal substeps."""
    for _ in range(substeps):
        x = integrator(field, x, h / substeps)
    return x


# --------------------------------------------------------------------------- accurate trajectories


def solve(
    field: Field,
    start: Float[Tensor, "b d"],
    times: Float[Tensor, "t"] | Float[Tensor, "b t"],
    tolerance: float = 1e-10,
    max_step: float = 0.5,
) -> Float[Tensor, "b t d"]:
    r"""Solve $\dot x = f(x)$ to a tolerance and return the states at the given times, in float64.

    Args:
        field: $f$.
        start: states at the first time.
        times: increasing; shared by all trajectories or one row for each.
        tolerance: largest error of one step, relative to 1 + |x|.
        max_step: longest time step.

    Raises:
        FloatingPointError: the tolerance is not reached.
    """
    x = start.double()
    clock = times.double().to(x.device).expand(len(x), -1)
    states = [x]
    steps = 1
    for gap in clock.diff(dim=1).unbind(dim=1):
        steps = max(1, int(torch.ceil(gap.max() / max_step)), steps // 2)
        x, steps = _advance_to_tolerance(field, x, gap[:, None], steps, tolerance)
        states.append(x)
    return torch.stack(states, dim=1)


def extrapolated_step(
    field: Field, x: Float[Tensor, "b d"], h: Float[Tensor, "b 1"]
) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
    """Return one Bulirsch-Stoer step of order 14 and its difference from the step of order 12.

    The error of Gragg's midpoint rule is a series in the squared substep. The Aitken-Neville
    scheme removes one term of it per column.
    """
    slope = field(x)
    row: list[Tensor] = []
    for j, n in enumerate(SUBSTEP_COUNTS):
        new = [_gragg_midpoint(field, x, slope, h / n, n)]
        for k in range(1, j + 1):
            ratio = (n / SUBSTEP_COUNTS[j - k]) ** 2 - 1
            new.append(new[-1] + (new[-1] - row[k - 1]) / ratio)
        row = new
    return row[-1], row[-1] - row[-2]


def _gragg_midpoint(field: Field, x: Tensor, slope: Tensor, h: Tensor, n: int) -> Tensor:
    previous, current = x, x + h * slope
    for _ in range(n - 1):
        previous, current = current, previous + 2 * h * field(current)
    return current


def _advance_to_tolerance(
    field: Field, start: Tensor, gap: Tensor, steps: int, tolerance: float
) -> tuple[Tensor, int]:
    """Advance by `gap`, doubling the number of steps until every step meets the tolerance."""
    for _ in range(MAX_HALVINGS):
        x, error = start, 0.0
        for _ in range(steps):
            x, difference = extrapolated_step(field, x, gap / steps)
            error = float((difference.abs() / (1 + x.abs())).amax())
            if not error <= tolerance:  # also catches NaN
                break
        else:
            return x, steps
        steps *= 2
    raise FloatingPointError(
        f"Trajectories do not reach the tolerance {tolerance:g}: the error is {error:g} with "
        f"{steps // 2} steps between two times. Soften the interaction or start elsewhere."
    )
