r"""What part of the range of poses is even, and what part is the lean of the data themselves.

Data that nobody has moved differ in pose, too: handwriting leans. `find_reach_` reads the range of
all poses, lean included. Here poses of a class are taken for the sum of both,

$$ e = c_y + u + z, \qquad u \sim U(-v, v), \quad z \sim N(0, s^2), $$

with v and s of highest likelihood under the network as it is, as in `poses`. A sum whose two parts
are both above 0 pays half the logarithm of the number of data (Schwarz's criterion). The two
can only be told apart by the ends of the range, which are sharp for an even range and soft for a
normal one: that takes a thousand data or so, and a lean of about normal shape.
"""

import math
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


class Lean(NamedTuple):
    """Poses of one generator, as fractions of its width.

    Args:
        even: v, the range of the even part.
        spread: s, the standard deviation of the normal part.
        gain: log likelihood above that of an even range alone.
    """

    even: float
    spread: float
    gain: float


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
    return likeliest_lean(seen, y, rest_of_circle(augment)[0])


def likeliest_lean(seen: Float[Tensor, "n s"], y: Tensor, rest: float | None) -> Lean:
    """The pair of highest likelihood, found on a coarse grid and then on a fine one around it.

    Args:
        seen: logarithm of the density of each datum on an even grid from one end of the width to
            the other.
        y: classes.
        rest: length of the rest of the circle, in widths; None if there is no circle.
    """
    n, s = seen.shape
    windows = Windows(seen, y, rest)
    both = windows.likelihoods(range(5, s + 1, 4), range(8, SPREADS, 8))
    m, i = max(both, key=both.__getitem__)
    lengths, spreads = range(m - 3, min(s, m + 3) + 1), range(i - 6, i + 7, 2)
    found = both | windows.likelihoods(lengths, spreads)
    found |= windows.likelihoods(range(1, s + 1), (0,)) | windows.likelihoods((1,), range(SPREADS))
    price = 0.5 * math.log(n)

    def score(pair: tuple[int, int]) -> float:
        return found[pair] - price * ((1 < pair[0] < s) + (pair[1] > 0))

    m, i = max(found, key=score)
    flat = max((pair for pair in found if pair[1] == 0), key=score)
    return Lean(0.0 if m == 1 else m / s, i / (2 * SPREADS), found[m, i] - found[flat])
