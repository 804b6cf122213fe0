r"""How likely data are whose poses fill a window: an even range, with ends as soft as is wanted.

Each datum has a density over poses, on an even grid from one end of a width to the other. Poses of
a class are $c_y + u + z$ with $u \sim U(-v, v)$ and $z \sim N(0, s^2)$, and the middle $c_y$ of
a class can be anywhere with the same probability: nothing but chance says which pose a network
takes for the standard one. It is summed over,

$$ \log p(v, s) = \sum_y \log \frac{1}{|C|} \sum_{c \in C} \prod_{n: y_n = y}
   \int p(e; v, s, c) \exp g_y(T_e x_n)\, de , $$

over the places C at which the window lies within the width. One that is only likely at one of
them pays for the choice of it; the whole width has nothing to choose, and is what is found where no
pose is likelier than others. The network has only been trained on poses within the width, and
nothing is known about others: $p(e; v, s, c)$ is cut off at the ends of the width and has mass 1
within. Turns are counted around the circle; a window may reach over the part of it that the width
leaves out, but not end there.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

SPREADS = 96
"""Steps of the spread up to half of the width."""
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
        room = round((min(rest, 1.0) if rest is not None else 1.0) * self.size)  # for soft ends
        mass = torch.cat([(seen - top).exp(), seen.new_ones(1, self.size)])  # and of the width
        self.mass = F.pad(mass, (0, room))
        self.own = (y == y.unique().unsqueeze(1)).to(mass)  # no class without data
        self.constant = float(top.sum())

    def likelihoods(
        self, lengths: Iterable[int], spreads: Iterable[int] = (0,)
    ) -> dict[tuple[int, int], float]:
        """Logarithms, for windows of so many points and so many steps of the spread."""
        lengths, found = list(lengths), {}
        for i in spreads:
            smooth = self._smooth(i)
            total = F.pad(torch.cat([smooth, smooth], 1).cumsum(1), (1, 0))
            for m in lengths:
                starts = self._starts(m).to(total.device)
                logs = (total[:, starts + m] - total[:, starts]).clamp(min=SMALLEST).log()
                fits = (self.own @ (logs[:-1] - logs[-1])).logsumexp(1) - math.log(len(starts))
                found[m, i] = float(fits.sum()) + self.constant
        return found

    def _starts(self, m: int) -> Int64[Tensor, " places"]:
        """Where a window of m points can begin; the whole width is where it is."""
        around = self.mass.shape[1]
        start = torch.arange(1 if m == self.size else around)
        possible = start + m <= self.size
        if self.circle:
            possible |= (start < self.size) & (start + m > around)
        return start[possible]

    def _smooth(self, steps: int) -> Float[Tensor, "n+1 around"]:
        """The densities of poses that spread by some steps."""
        if steps == 0:
            return self.mass
        around = self.mass.shape[1]
        waves = torch.fft.rfft(self.mass)
        points = steps / (4 * SPREADS) * self.size
        turn = 2 * math.pi / around * torch.arange(waves.shape[1]).to(self.mass)
        normal = (-0.5 * (points * turn).square()).exp()
        smooth: Tensor = torch.fft.irfft(waves * normal, n=around).clamp(min=0)
        return smooth
