r"""How far the data themselves are moved: the range of poses in which a network sees them.

A network averaged with `average="joint"` says that a datum is one in a standard pose, moved by an
unknown transformation $T_e$ with $e$ uniform on $[-w, w]$,

$$ p(x, y) \propto \frac{1}{2w} \int_{-w}^{w} \exp g_y(T_e x)\, de . $$

Its conditional $p(y \mid x)$, which is what is trained, does not mind a $w$ that is too large: the
factor $1/2w$ cancels, and copies in poses that never occur weigh nothing. The joint does mind. So
with the network as it is, the range of poses is the type-II maximum likelihood estimate

$$ \hat v = \arg\max_v \sum_y \log \frac{1}{|C|} \sum_{c \in C} \prod_{n: y_n = y}
   \frac{1}{2v} \int_{c - v}^{c + v} \exp g_y(T_e x_n)\, de $$

at most w: where the poses of the training data fill the range evenly up to its ends. Each
class has a middle c of its own, since nothing but chance says which pose a network takes for
the standard one of a class, and it is summed over (`windows`); it may be near an end of the
width, so that poses are looked for beyond it (`energies`). A range below the whole width pays
half the logarithm of the number of data (Schwarz's criterion). A datum that looks the same in all
poses has no say. Turns are counted around the circle. For several generators each range is taken
with the others at the likeliest pose of each datum. $v = 0$, no transformation at all, is a
candidate if there is one generator; of several, the narrowest range that is tried stands for it.
Widths that hardly change the data are closed: they are what they are, and the work goes into the
others. Where poses crowd at an end of what is looked at (the larger, the likelier), the standard
pose is not among them and no range can be read; the width of the copies stays. It does so, too,
where a narrow range cannot explain the labels that the copies explain (`labels`).
Choices have shares in place of ranges (`shares`).
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor

from symrazor.data import Tensors
from symrazor.invariance.averaged_network import Augmented
from symrazor.invariance.copies import UNMEASURED, Augment
from symrazor.invariance.pose_energies import (
    check_joint,
    grid,
    looked_at,
    narrow_fails,
    over_choices,
    pose_energies,
    slice_passes,
    slices,
)
from symrazor.invariance.transformation import Choice, Lie

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


STEPS = 300
"""Of EM."""
START = 0.8
"""Share of the identity where EM starts."""


def likeliest_shares(
    energies: Float[Tensor, "n e"], y: Int[Tensor, " n"], products: Int[Tensor, "e e"]
) -> Float[Tensor, " e"]:
    """Shares of the elements with the highest likelihood, the identity's the largest.

    Args:
        energies: logarithm of the density of each datum under each element, up to a constant.
        y: classes.
        products: number of the element h e, for each h and e; the identity is number 0.
    """
    n, e = energies.shape
    seen = energies.double()[:, products.to(energies.device)]
    own = F.one_hot(y.long()).to(seen)
    even = seen.new_full((e,), 1 / e)
    q = seen.new_full((e,), (1 - START) / max(e - 1, 1))
    q[0] = START
    for _ in range(STEPS):
        terms = seen + q.clamp(min=1e-300).log()
        standard = (own.T @ terms.logsumexp(2)).softmax(1)
        q = torch.einsum("nh,nhe->e", own @ standard, terms.softmax(2)) / n
    price = 0.5 * (e - 1) * math.log(n)
    if log_likelihood(q, seen, own) - price <= log_likelihood(even, seen, own):
        return even
    return q[products[int(q.argmax())].to(q.device)]


def log_likelihood(
    q: Float[Tensor, " e"], seen: Float[Tensor, "n h e"], own: Float[Tensor, "n classes"]
) -> float:
    """See the module; `seen` are the energies under the product of h and e."""
    data = (seen + q.clamp(min=1e-300).log()).logsumexp(2)
    return float(((own.T @ data).logsumexp(1) - math.log(seen.shape[1])).sum())


POINTS, SEARCH = 96, 256
"""Poses in which each datum is looked at, for one generator; for several, to find its own pose."""
MAX_POSE_DATA, MOST_PASSES = 1500, 160_000
"""Data that are looked at, and data times poses."""
CLOSED, MOST_LOOKED_AT = 0.01, 200
"""Share of the variance of the data that a width has to move, and data that are asked."""
EDGE = 16
"""An end of what is looked at is this part of it."""


@torch.no_grad()
def find_reach_(model: Augmented, data: Tensors) -> Float[Tensor, " k"]:
    """Measure the range of poses as a fraction of each width, and keep it in the augmentation.

    `Augment.describe`, and so every report, then gives the ranges in place of the widths, and the
    shares of discrete poses (kept, too) in place of probabilities.

    Args:
        model: averaged with "joint", trained; evaluated as it is.
        data: training data with the labels of classes; of many, the first are used.

    Raises:
        ValueError: a model with another average, or a mixture.
    """
    augment = check_joint(model, data)
    free, rests = open_generators(augment, data[0]), rest_of_circle(augment)
    k = len(free)
    points = 1 if k == 0 else POINTS if k == 1 else SEARCH
    passes = points + (slice_passes(k) if k > 1 else 0)
    x, y = (part[: min(MAX_POSE_DATA, MOST_PASSES // passes)] for part in data)
    ends = {j: far for j, far in enumerate(looked_at(augment)) if j in free}
    places = torch.zeros(points, augment.lattice.shape[1])
    places[:, free] = grid(points, k) * (ends[free[0]] if k == 1 else 1.0)
    energies = pose_energies(model, x, y, places)
    _find_shares_(augment, energies[:, (places.abs() <= 1).all(1)], y)
    averaged = over_choices(augment, energies)
    seen, still = [averaged], None
    if k == 1:
        unmoved = pose_energies(model, x, y, torch.zeros_like(places[:1]))
        still = float(over_choices(augment, unmoved).sum())
    else:
        best = places.to(averaged.device)[averaged.argmax(1)]
        seen = slices(model, x, y, best, ends)
    augment.reach.fill_(1)
    for (j, far), along in zip(ends.items(), seen, strict=True):
        part = _range(along, y, rests[j], still)
        length = max(1, round(part * points))
        if k == 1 and length <= points // EDGE and narrow_fails(model, x, y, places, length):
            part = 1.0
        augment.reach[j] = min(1.0, far * part)
    return augment.reach


@torch.no_grad()
def open_generators(augment: Augment, x: Tensor) -> list[int]:
    """Those with poses whose two ends change the data by more than `CLOSED` of their variance."""
    k, some = augment.lattice.shape[1], x[:MOST_LOOKED_AT]
    if k == 0:
        return []
    still = torch.zeros(1, k)
    ends = torch.cat([still, torch.eye(k), -torch.eye(k)])
    first = int(augment.copies(some[:1], still)[0].shape[1])  # elements of the choices
    moved = augment.copies(some, ends)[0].unflatten(1, (2 * k + 1, first))[:, :, 0]
    change = (moved[:, 1:] - moved[:, :1]).square().flatten(2).mean((0, 2)).view(2, k).amax(0)
    least = CLOSED * float(some.var(unbiased=False))
    posed = [move.poses != "none" for move in augment.moves for _ in range(int(move.dim))]  # type: ignore[arg-type]
    return [j for j in range(k) if posed[j] and float(change[j]) > least]


def _find_shares_(augment: Augment, energies: Float[Tensor, "n s e"], y: Tensor) -> None:
    """Shares of each choice, with points and other choices averaged over as they are."""
    choices = [choice for choice in augment.choices if isinstance(choice, Choice)]
    sizes = [len(choice.probabilities) for choice in choices]
    total = (energies.logsumexp(1) - math.log(energies.shape[1])).unflatten(1, sizes or (1,))
    found = [augment.shares.new_empty(0)]
    for number, choice in enumerate(choices):
        own = total
        for other, rest in enumerate(choices):
            if other != number:
                shape = [-1 if i == other else 1 for i in range(len(choices))]
                own = own + rest.probabilities.to(own).log().view(shape)
                own = own.logsumexp(other + 1, keepdim=True)
        products = choice.products
        if products is None:
            found.append(augment.shares.new_full((sizes[number],), UNMEASURED))
        else:
            shares = likeliest_shares(own.flatten(1), y, products)
            found.append(shares.to(augment.shares))
    augment.shares.copy_(torch.cat(found))


def _crowded(energies: Float[Tensor, "n s"]) -> bool:
    """Whether poses crowd at an end, with twice the share there that they have if all are alike."""
    shares, edge = energies.softmax(1).mean(0), max(1, energies.shape[1] // EDGE)
    return float(torch.maximum(shares[:edge].sum(), shares[-edge:].sum())) > 2 / EDGE


def rest_of_circle(augment: Augment) -> list[float | None]:
    """Of generators that turn, what the widths leave of the circle, in widths; None of others."""
    found: list[float | None] = []
    for move in augment.moves:
        if isinstance(move, Lie):
            widths = move.distribution.widths.tolist()
            turns = zip(widths, move.distribution.periodic, strict=True)
            found += [max(0.0, math.pi / w - 1) if turn else None for w, turn in turns]
        else:
            found += [None] * int(move.dim)  # type: ignore[arg-type]
    return found


def _range(
    energies: Float[Tensor, "n s"],
    y: Tensor,
    beyond: float | None,
    still: float | None = None,
) -> float:
    """The fraction of the width with the highest likelihood.

    Args:
        energies: on an even grid from one end of the width to the other.
        y: classes.
        beyond: length of the rest of the circle, in widths; None if there is no circle.
        still: the likelihood of no range at all; None to take that of the narrowest one.
    """
    n, s = energies.shape
    values = Windows(energies, y, beyond).likelihoods(range(1, s + 1))
    scores = {m: value - (0.5 * math.log(n) if m < s else 0.0) for m, value in values.items()}
    best = max(scores, key=scores.__getitem__)
    if beyond is None and best <= s // EDGE and _crowded(energies):
        return 1.0
    closed = best == 1 if still is None else still > scores[best]
    return 0.0 if closed else best / s
