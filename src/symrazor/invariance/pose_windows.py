r"""How likely data are whose poses fill a window.

Each datum has a density over poses, on an even grid from one end of a width to the other. Poses of
a class are even on $[c_y - v, c_y + v]$, and the middle $c_y$ of a class can be anywhere with the
same probability: nothing but chance says which pose a network takes for the standard one. It is
summed over,

$$ \log p(v) = \sum_y \log \frac{1}{|C|} \sum_{c \in C} \prod_{n: y_n = y}
   \frac{1}{2v} \int_{c - v}^{c + v} \exp g_y(T_e x_n)\, de , $$

over the places C at which the window lies within the width. One that is only likely at one of
them pays for the choice of it; the whole width has nothing to choose, and is what is found where no
pose is likelier than others. Turns are counted around the circle; a window may reach over the part
of it that the width leaves out, where nothing is known and no datum is, but not end there.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

SMALLEST = 1e-200


class Windows:
    """Likelihoods of windows.

    Args:
        seen: logarithm of the density of each datum at each pose, up to a constant.
        y: classes.
        rest: length of the rest of the circle, in widths; None if there is no circle.
    """

    def __init__(self, seen: Float[Tensor, "n s"], y: Tensor, rest: float | None) -> None:
        """Take out the highest density of each datum, which is the constant."""
        top = seen.amax(1, keepdim=True)
        self.size, self.circle = seen.shape[1], rest is not None and rest < 1
        room = round(rest * self.size) if rest is not None and self.circle else 0
        mass = torch.cat([(seen - top).exp(), seen.new_ones(1, self.size)])  # and of the width
        self.mass = F.pad(mass, (0, room))
        self.own = (y == y.unique().unsqueeze(1)).to(mass)  # no class without data
        self.constant = float(top.sum())

    def likelihoods(self, lengths: Iterable[int]) -> dict[int, float]:
        """Logarithms, for windows of so many points."""
        total, found = F.pad(torch.cat([self.mass, self.mass], 1).cumsum(1), (1, 0)), {}
        for m in lengths:
            starts = self._starts(m).to(total.device)
            logs = (total[:, starts + m] - total[:, starts]).clamp(min=SMALLEST).log()
            fits = (self.own @ (logs[:-1] - logs[-1])).logsumexp(1) - math.log(len(starts))
            found[m] = float(fits.sum()) + self.constant
        return found

    def _starts(self, m: int) -> Int64[Tensor, " places"]:
        """Where a window of m points can begin; the whole width is where it is."""
        around = self.mass.shape[1]
        start = torch.arange(1 if m == self.size else around)
        possible = start + m <= self.size
        if self.circle:
            possible |= (start < self.size) & (start + m > around)
        return start[possible]
