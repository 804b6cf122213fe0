r"""True trajectories in float64: extrapolation to step zero, with its error checked.

Gragg's midpoint rule with 2, 4, ..., 14 small steps has an error that is a series in $h^2$; the
scheme of Aitken and Neville removes its first terms (Bulirsch and Stoer). The last two columns
differ by the error; steps are halved until that is small for every trajectory.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.phase import Field

COUNTS = (2, 4, 6, 8, 10, 12, 14)
MAX_HALVINGS = 12


def extrapolated_step(
    field: Field, x: Float[Tensor, "b d"], h: Float[Tensor, "b 1"]
) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
    """One step of order 14, and the difference to the one of order 12."""
    slope = field(x)
    row: list[Tensor] = []
    for j, n in enumerate(COUNTS):
        new = [_gragg(field, x, slope, h / n, n)]
        for k in range(1, j + 1):
            ratio = (n / COUNTS[j - k]) ** 2 - 1
            new.append(new[-1] + (new[-1] - row[k - 1]) / ratio)
        row = new
    return row[-1], row[-1] - row[-2]


def _gragg(field: Field, x: Tensor, slope: Tensor, h: Tensor, n: int) -> Tensor:
    before, now = x, x + h * slope
    for _ in range(n - 1):
        before, now = now, before + 2 * h * field(now)
    return now


def solve(
    field: Field,
    start: Float[Tensor, "b d"],
    times: Float[Tensor, "t"] | Float[Tensor, "b t"],
    tolerance: float = 1e-10,
    longest: float = 0.5,
) -> Float[Tensor, "b t d"]:
    r"""States at the given times, the first of which belongs to `start`.

    Args:
        field: $f$ in $\dot x = f(x)$.
        start: initial states.
        times: increasing; shared by all trajectories or one row for each.
        tolerance: largest error of one step, relative to 1 + |x|.
        longest: longest step.

    Raises:
        FloatingPointError: the tolerance is not reached.
    """
    x = start.double()
    clock = times.double().to(x.device).expand(len(x), -1)
    states = [x]
    pieces = 1
    for gap in clock.diff(dim=1).unbind(dim=1):
        least = max(1, int(torch.ceil(gap.max() / longest)))
        x, pieces = _cross(field, x, gap[:, None], max(least, pieces // 2), tolerance)
        states.append(x)
    return torch.stack(states, dim=1)


def _cross(
    field: Field, start: Tensor, gap: Tensor, pieces: int, tolerance: float
) -> tuple[Tensor, int]:
    """From one time to the next, in as many pieces as it takes; returns how many it took."""
    for _ in range(MAX_HALVINGS):
        x, worst = start, 0.0
        for _ in range(pieces):
            x, error = extrapolated_step(field, x, gap / pieces)
            worst = float((error.abs() / (1 + x.abs())).amax())
            if not worst <= tolerance:  # also NaN; the rest would be in vain
                break
        else:
            return x, pieces
        pieces *= 2
    raise FloatingPointError(
        f"expected trajectories to a tolerance of {tolerance:g}, got an error of {worst:g} "
        f"with {pieces // 2} steps between two times; do soften the interaction or start elsewhere"
    )
