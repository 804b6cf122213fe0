r"""What part of the range of poses is even, and what part is the lean of the data themselves.

Data that nobody has moved differ in pose, too: handwriting leans. `find_reach_` reads the range of
all poses, lean included. Here poses of a class are taken for the sum of both,

$$ e = c_y + u + z, \qquad u \sim U(-v, v), \quad z \sim N(0, s^2), $$

under the network as it is (`windows`). The two parts can only be told apart by the ends of the
range, which are sharp for an even range and soft for a normal one. So what is known about v and s
is a whole distribution: their posterior. Before, no even part at all, some, and all of a circle
that the copies fill are as likely as each other; and of a scale of which nothing is known all
orders of magnitude are, $p(v, s) \propto 1/vs$ up to the width (of s, half of it). It takes a
thousand data or so, and a lean of about normal shape.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.augment.copies import Augmented
from symrazor.augment.energies import check_joint, grid, over_choices, pose_energies
from symrazor.augment.poses import POINTS, rest_of_circle
from symrazor.augment.windows import SPREADS, Windows
from symrazor.data import Tensors

MOST_DATA = 2000
"""Data that are looked at."""
UNLIKELY = 15.0
"""Below the highest log likelihood of the coarse grid: not looked at again."""
FINE = 24
"""Values of each on the fine grid, about."""


class Lean(NamedTuple):
    """Poses of one generator, as fractions of its width.

    Args:
        even: v, the range of the even part: its posterior mean.
        low: the 5 per cent quantile of v.
        high: the 95 per cent quantile of v.
        spread: s, the standard deviation of the normal part: its posterior mean.
    """

    even: float
    low: float
    high: float
    spread: float


@torch.no_grad()
def find_lean(model: Augmented, data: Tensors) -> Lean:
    """Split the range of poses of an augmentation with one generator; nothing is kept.

    Args:
        model: averaged with "joint", trained; evaluated as it is.
        data: training data with the labels of classes; of many, the first are used.

    Raises:
        ValueError: another average, or not exactly one generator.
    """
    augment = check_joint(model, data)
    k = augment.lattice.shape[1]
    if k != 1:
        raise ValueError(f"expected an augmentation with one generator, got {k}")
    x, y = (part[:MOST_DATA] for part in data)
    seen = over_choices(augment, pose_energies(model, x, y, grid(POINTS, 1)))
    return posterior(seen, y, rest_of_circle(augment)[0])


def posterior(seen: Float[Tensor, "n s"], y: Tensor, rest: float | None) -> Lean:
    """Means and quantiles, on a fine grid around what is likely on a coarse one.

    Args:
        seen: logarithm of the density of each datum on an even grid from one end of the width to
            the other.
        y: classes.
        rest: length of the rest of the circle, in widths; None if there is no circle.
    """
    s, windows = seen.shape[1], Windows(seen, y, rest)
    coarse = windows.likelihoods(_ticks(1, s, 4), _ticks(0, SPREADS, 8))
    highest = max(coarse.values())
    likely = [pair for pair, value in coarse.items() if value > highest - UNLIKELY]
    (first, last), (soft, softest) = (
        (min(values), max(values)) for values in zip(*likely, strict=True)
    )
    lengths = _ticks(max(1, first - 3), min(s, last + 3), 1 + (last - first) // FINE)
    spreads = _ticks(max(0, soft - 7), min(SPREADS, softest + 7), 1 + (softest - soft) // FINE)
    found = windows.likelihoods(lengths, spreads)
    table = torch.tensor([[found[m, i] for i in spreads] for m in lengths], dtype=torch.float64)
    circle = rest is not None and round(rest * s) == 0
    p = (table - table.max()).exp() * _before(lengths, spreads, s, circle)
    p = p / p.sum()
    v = torch.tensor([0.0 if m == 1 else m / s for m in lengths], dtype=torch.float64)
    up_to = p.sum(1).cumsum(0)
    low, high = (float(v[int((up_to < q).sum().clamp(max=len(v) - 1))]) for q in (0.05, 0.95))
    spread = torch.tensor(spreads, dtype=torch.float64) / (2 * SPREADS)
    return Lean(float(p.sum(1) @ v), low, high, float(p.sum(0) @ spread))


def _before(
    lengths: list[int], spreads: list[int], size: int, circle: bool
) -> Float[Tensor, "lengths spreads"]:
    """Prior probabilities, up to a factor: none, some and all have the same.

    Args:
        lengths: of windows, from 1 (no even part) to the size.
        spreads: steps of the spread.
        size: points in the width.
        circle: whether the whole width is a whole circle.
    """
    of_scale = [1 / max(1, i) for i in spreads]
    middle = range(2, size if circle else size + 1)
    step = max(1, (lengths[-1] - lengths[0]) // max(1, len(lengths) - 1))
    total = sum(1 / m for m in middle)
    of_range = [step / m / total if m in middle else 1.0 for m in lengths]
    rows, columns = (torch.tensor(part, dtype=torch.float64) for part in (of_range, of_scale))
    return torch.outer(rows, columns)


def _ticks(first: int, last: int, step: int) -> list[int]:
    """From the first to the last, both among them."""
    return sorted({*range(first, last + 1, step), last})
