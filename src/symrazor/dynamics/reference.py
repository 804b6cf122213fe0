r"""True trajectories: Gauss-Legendre collocation in float64, with its error checked.

Six stages make a symplectic method of order 12. The number of steps is doubled until two solutions
agree, so the returned accuracy was measured and not assumed.
"""

from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.phase import Field

STAGES = 6
MAX_HALVINGS = 12
MAX_ROUNDS = 60


@cache
def _collocation(stages: int = STAGES) -> tuple[Tensor, Tensor]:
    r"""Weights b and matrix $a_{ij} = \int_0^{c_i} \ell_j$ of Gauss collocation on [0, 1]."""
    roots, weights = np.polynomial.legendre.leggauss(stages)
    nodes = (roots + 1) / 2
    lagrange = np.linalg.inv(np.vander(nodes, increasing=True)).T  # rows: coefficients of l_j
    powers = np.arange(1, stages + 1)
    integrals = nodes[:, None] ** powers / powers
    return torch.from_numpy(weights / 2), torch.from_numpy(integrals @ lagrange.T)


def collocation_step(field: Field, x: Float[Tensor, "b d"], h: Float[Tensor, "b 1"]) -> Tensor:
    """One step of order 12.

    Raises:
        FloatingPointError: the stage equations do not converge: the step is too long.
    """
    b, A = (part.to(x.device) for part in _collocation())
    slope = field(x)
    stages = slope.expand(STAGES, *slope.shape)
    change = torch.inf * h.new_ones(())
    for _ in range(MAX_ROUNDS):
        at = x + h * torch.tensordot(A, stages, dims=1)
        new = field(at.reshape(-1, x.shape[-1])).reshape(at.shape)
        change = (new - stages).abs().amax() / (1 + new.abs().amax())
        stages = new
        if not change > 1e-15:  # also NaN
            break
    if change <= 1e-12:
        end: Tensor = x + h * torch.tensordot(b, stages, dims=1)
        return end
    raise FloatingPointError("expected stages that converge, got a step that is too long")


def solve(
    field: Field,
    start: Float[Tensor, "b d"],
    times: Float[Tensor, "t"] | Float[Tensor, "b t"],
    tolerance: float = 1e-10,
    longest: float = 0.2,
) -> Float[Tensor, "b t d"]:
    r"""States at the given times, the first of which belongs to `start`.

    Args:
        field: $f$ in $\dot x = f(x)$.
        start: initial states.
        times: increasing; shared by all trajectories or one row for each.
        tolerance: largest difference, relative to 1 + |x|, between n and 2n steps.
        longest: first step to try.

    Raises:
        FloatingPointError: the tolerance is not reached.
    """
    x0, clock = start.double(), times.double().to(start.device)
    clock = clock.expand(len(x0), -1)
    gaps = clock.diff(dim=1)
    steps = max(1, int(torch.ceil(gaps.max() / longest))) if gaps.numel() else 1
    coarse: Tensor | None = None
    for _ in range(MAX_HALVINGS):
        try:
            fine = _march(field, x0, gaps, steps)
        except FloatingPointError:
            coarse, steps = None, 2 * steps
            continue
        if coarse is not None:
            error = ((fine - coarse).abs() / (1 + fine.abs())).amax()
            if error <= tolerance:
                return fine
        coarse, steps = fine, 2 * steps
    raise FloatingPointError(
        f"expected trajectories to a tolerance of {tolerance:g}, got worse with {steps} steps "
        "between two times; do soften the interaction or start elsewhere"
    )


def _march(field: Field, x: Tensor, gaps: Tensor, steps: int) -> Tensor:
    states = [x]
    for gap in gaps.unbind(dim=1):
        for _ in range(steps):
            x = collocation_step(field, x, gap[:, None] / steps)
        states.append(x)
    return torch.stack(states, dim=1)
