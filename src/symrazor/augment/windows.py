r"""How likely data are whose poses fill a window: an even range, with ends as soft as is wanted.

Each datum has a density over poses, on an even grid from one end of a width to the other. Poses of
a class are $c_y + u + z$ with $u \sim U(-v, v)$ and $z \sim N(0, s^2)$, and the middle $c_y$ of
a class can be anywhere with the same probability: nothing but chance says which pose a network
takes for the standard one. It is summed over,

$$ \log p(v, s) = \sum_y \log \frac{1}{|C|} \sum_{c \in C} \prod_{n: y_n = y}
   \int p(e; v, s, c) \exp g_y(T_e x_n)\, de , $$

so that a window which only fits at one place pays for the choice of that place. Turns are
counted around the circle; the part of it that the width leaves out has poses that are never seen.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float
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
        self.size, self.circle = seen.shape[1], rest is not None
        room = round((1.0 if rest is None else rest) * self.size)  # no circle: for soft ends
        self.mass = F.pad((seen - top).exp(), (0, room))
        self.own = F.one_hot(y.long()).to(self.mass).T
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
                places = smooth.shape[1] if self.circle else self.size - m + 1
                within = total[:, m : m + places] - total[:, :places]
                logs = self.own @ (within / m).clamp(min=SMALLEST).log()
                fits = logs.logsumexp(1) - math.log(places)
                found[m, i] = float(fits.sum()) + self.constant
        return found

    def _smooth(self, steps: int) -> Float[Tensor, "n around"]:
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
