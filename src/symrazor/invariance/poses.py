r"""Measure the range of poses in which the training data occur.

A network averaged with `average="joint"` models an input as one in a standard pose, transformed by
an unknown $T_e$ with $e$ uniform on $[-w, w]$,

$$ p(x, y) \propto \frac{1}{2w} \int_{-w}^{w} \exp g_y(T_e x)\, de . $$

Its conditional $p(y \mid x)$, which is trained, does not penalise a $w$ that is too large: the
factor $1/2w$ cancels, and copies in poses that never occur have no weight. The joint does. With the
network fixed, the range of poses is therefore the type-II maximum likelihood estimate

$$ \hat v = \arg\max_v \sum_y \log \frac{1}{|C|} \sum_{c \in C} \prod_{n: y_n = y}
   \frac{1}{2v} \int_{c - v}^{c + v} \exp g_y(T_e x_n)\, de , \qquad \hat v \le w . $$

- The centre c of each class is arbitrary, because training chooses its standard pose by chance; it
  is marginalised (`Windows`). It may be near an end of the width, so poses are searched
  beyond the width (`pose_energies`).
- A range below the whole width costs half the logarithm of the number of data (Schwarz's
  criterion). Inputs that look the same in all poses do not contribute. Rotations are periodic.
- For several generators, each range is measured with the others at the likeliest pose of the input.
  $v = 0$ is a candidate for a single generator; for several, the narrowest range stands for it.
- Generators whose width hardly changes the data are skipped and keep their width.
- If poses accumulate at an end of the search range, the standard pose is outside of it and no range
  can be measured; the width of the copies is reported. The same holds if a narrow range cannot
  explain the labels that the copies explain (`narrow_range_fails`).
- Choices have shares in place of ranges (`likeliest_shares`).
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor

from symrazor.data import Tensors
from symrazor.invariance.averaged_network import UNMEASURED, Augment, Augmented
from symrazor.invariance.pose_energies import (
    POSES_PER_GENERATOR,
    SWEEPS,
    average_over_choices,
    energy_profiles,
    joint_augmentation,
    narrow_range_fails,
    pose_energies,
    pose_grid,
    search_ranges,
)
from symrazor.invariance.transformation import Choice, Lie

MIN_MASS = 1e-200
"""Lower bound of a probability mass, so that its logarithm is finite."""


class Windows:
    r"""Likelihoods of data whose poses fill a window.

    Each input has a density over poses, on an even grid from one end of a width to the other. The
    poses of a class are uniform on $[c_y - v, c_y + v]$ with a uniform prior on the centre $c_y$,

    $$ \log p(v) = \sum_y \log \frac{1}{|C|} \sum_{c \in C} \prod_{n: y_n = y}
       \frac{1}{2v} \int_{c - v}^{c + v} \exp g_y(T_e x_n)\, de , $$

    summed over the places C at which the window lies within the width. A window that is likely at
    one place only pays for this choice; the whole width has no choice, and wins if no pose is
    likelier than others. On a circle, a window may extend over the part that the width leaves out,
    where no data are, but may not end there.

    Args:
        log_densities: log density of each input at each pose, up to a constant.
        y: classes.
        uncovered: uncovered length of the circle, in widths; None if there is no circle.
    """

    def __init__(
        self, log_densities: Float[Tensor, "n s"], y: Tensor, uncovered: float | None
    ) -> None:
        """Subtract the highest log density of each input, for numerical stability."""
        highest = log_densities.amax(1, keepdim=True)
        self.size, self.is_circle = log_densities.shape[1], uncovered is not None and uncovered < 1
        gap = round(uncovered * self.size) if uncovered is not None and self.is_circle else 0
        mass = torch.cat(
            [(log_densities - highest).exp(), log_densities.new_ones(1, self.size)]
        )  # and of the width itself
        self.mass = F.pad(mass, (0, gap))
        self.class_masks = (y == y.unique().unsqueeze(1)).to(mass)  # only classes that occur
        self.constant = float(highest.sum())

    def likelihoods(self, lengths: Iterable[int]) -> dict[int, float]:
        """Return the log likelihood of windows with the given numbers of points."""
        total, likelihoods = F.pad(torch.cat([self.mass, self.mass], 1).cumsum(1), (1, 0)), {}
        for m in lengths:
            starts = self._starts(m).to(total.device)
            logs = (total[:, starts + m] - total[:, starts]).clamp(min=MIN_MASS).log()
            fits = (self.class_masks @ (logs[:-1] - logs[-1])).logsumexp(1) - math.log(len(starts))
            likelihoods[m] = float(fits.sum()) + self.constant
        return likelihoods

    def _starts(self, m: int) -> Int64[Tensor, " places"]:
        """Return where a window of m points can begin; the whole width has one place."""
        around = self.mass.shape[1]
        start = torch.arange(1 if m == self.size else around)
        possible = start + m <= self.size
        if self.is_circle:
            possible |= (start < self.size) & (start + m > around)
        return start[possible]


EM_STEPS = 300
INITIAL_IDENTITY_SHARE = 0.8


def likeliest_shares(
    energies: Float[Tensor, "n e"], y: Int[Tensor, " n"], products: Int[Tensor, "e e"]
) -> Float[Tensor, " e"]:
    r"""Return the shares of discrete poses with the highest likelihood, the identity's the largest.

    With `average="joint"` an input is one in a standard pose under an element of a finite group G
    with shares $q$. With the network fixed,

    $$ \hat q = \arg\max_q \sum_y \log \frac{1}{|G|} \sum_{h \in G} \prod_{n: y_n = y}
       \sum_{e \in G} q_e \exp g_y(T_{h e} x_n) . $$

    The standard pose $h$ of a class is arbitrary and is marginalised. $p(y \mid x)$ does not
    penalise shares that are too even; this density does. EM maximises it: posteriors of $h$ for
    each class and of $e$ for each input, then $q$ is their mean. Shares that are not equal cost
    half the logarithm of the number of data for each free share (Schwarz's criterion). The largest
    share is assigned to the identity, since a common factor of all h changes nothing.

    Args:
        energies: log density of each input under each element, up to a constant.
        y: classes.
        products: index of the element h e, for each h and e; the identity is element 0.
    """
    n, e = energies.shape
    pair_energies = energies.double()[:, products.to(energies.device)]
    one_hot = F.one_hot(y.long()).to(pair_energies)
    equal = pair_energies.new_full((e,), 1 / e)
    q = pair_energies.new_full((e,), (1 - INITIAL_IDENTITY_SHARE) / max(e - 1, 1))
    q[0] = INITIAL_IDENTITY_SHARE
    for _ in range(EM_STEPS):
        terms = pair_energies + q.clamp(min=1e-300).log()
        standard = (one_hot.T @ terms.logsumexp(2)).softmax(1)
        q = torch.einsum("nh,nhe->e", one_hot @ standard, terms.softmax(2)) / n
    penalty = 0.5 * (e - 1) * math.log(n)
    if log_likelihood(q, pair_energies, one_hot) - penalty <= log_likelihood(
        equal, pair_energies, one_hot
    ):
        return equal
    return q[products[int(q.argmax())].to(q.device)]


def log_likelihood(
    q: Float[Tensor, " e"],
    pair_energies: Float[Tensor, "n h e"],
    one_hot: Float[Tensor, "n classes"],
) -> float:
    """Return the objective of `likeliest_shares`; energies are under h e."""
    data = (pair_energies + q.clamp(min=1e-300).log()).logsumexp(2)
    return float(((one_hot.T @ data).logsumexp(1) - math.log(pair_energies.shape[1])).sum())


SINGLE_GENERATOR_POSES, COARSE_SEARCH_POSES = 96, 256
"""Poses per input for a single generator; for several, poses of the coarse search."""
MAX_POSE_DATA, MAX_POSE_EVALUATIONS = 1500, 160_000
"""Maximal number of inputs, and of inputs times poses."""
MIN_CHANGE, CHANGE_INPUTS = 0.01, 200
"""Share of the data variance that a width must change, and number of inputs to measure it."""
EDGE = 16
"""An end of the search range is 1/EDGE of it."""


@torch.no_grad()
def find_reach_(model: Augmented, data: Tensors) -> Float[Tensor, " k"]:
    """Measure the range of poses as a fraction of each width, and store it in the augmentation.

    `Augment.describe`, and so every report, then shows the ranges in place of the widths, and the
    stored shares of discrete poses in place of probabilities.

    Args:
        model: trained, averaged with "joint".
        data: training data with class labels; the first `MAX_POSE_DATA` are used.

    Raises:
        ValueError: if the model has another average, or is a mixture.
    """
    augment = joint_augmentation(model, data)
    generators, uncovered = open_generators(augment, data[0]), uncovered_circle(augment)
    k = len(generators)
    points = 1 if k == 0 else SINGLE_GENERATOR_POSES if k == 1 else COARSE_SEARCH_POSES
    evaluations = points + (POSES_PER_GENERATOR * SWEEPS * k if k > 1 else 0)
    x, y = (
        fraction[: min(MAX_POSE_DATA, MAX_POSE_EVALUATIONS // evaluations)] for fraction in data
    )
    ends = {
        j: search_range for j, search_range in enumerate(search_ranges(augment)) if j in generators
    }
    places = torch.zeros(points, augment.lattice.shape[1])
    places[:, generators] = pose_grid(points, k) * (ends[generators[0]] if k == 1 else 1.0)
    energies = pose_energies(model, x, y, places)
    _find_shares_(augment, energies[:, (places.abs() <= 1).all(1)], y)
    averaged = average_over_choices(augment, energies)
    profiles, unmoved_likelihood = [averaged], None
    if k == 1:
        unmoved = pose_energies(model, x, y, torch.zeros_like(places[:1]))
        unmoved_likelihood = float(average_over_choices(augment, unmoved).sum())
    else:
        best = places.to(averaged.device)[averaged.argmax(1)]
        profiles = energy_profiles(model, x, y, best, ends)
    augment.reach.fill_(1)
    for (j, search_range), profile in zip(ends.items(), profiles, strict=True):
        fraction = _range(profile, y, uncovered[j], unmoved_likelihood)
        length = max(1, round(fraction * points))
        if k == 1 and length <= points // EDGE and narrow_range_fails(model, x, y, places, length):
            fraction = 1.0
        augment.reach[j] = min(1.0, search_range * fraction)
    return augment.reach


@torch.no_grad()
def open_generators(augment: Augment, x: Tensor) -> list[int]:
    """Return the generators whose two ends change the data by more than `MIN_CHANGE`."""
    k, inputs = augment.lattice.shape[1], x[:CHANGE_INPUTS]
    if k == 0:
        return []
    identity = torch.zeros(1, k)
    ends = torch.cat([identity, torch.eye(k), -torch.eye(k)])
    # The copies at one point are the elements of all choices.
    elements = int(augment.copies(inputs[:1], identity)[0].shape[1])
    moved = augment.copies(inputs, ends)[0].unflatten(1, (2 * k + 1, elements))[:, :, 0]
    change = (moved[:, 1:] - moved[:, :1]).square().flatten(2).mean((0, 2)).view(2, k).amax(0)
    min_change = MIN_CHANGE * float(inputs.var(unbiased=False))
    has_poses = [move.poses != "none" for move in augment.moves for _ in range(int(move.dim))]  # type: ignore[arg-type]
    return [j for j in range(k) if has_poses[j] and float(change[j]) > min_change]


def _find_shares_(augment: Augment, energies: Float[Tensor, "n s e"], y: Tensor) -> None:
    """Measure the shares of each choice, averaged over points and other choices."""
    choices = [choice for choice in augment.choices if isinstance(choice, Choice)]
    sizes = [len(choice.probabilities) for choice in choices]
    total = (energies.logsumexp(1) - math.log(energies.shape[1])).unflatten(1, sizes or (1,))
    shares_by_choice = [augment.shares.new_empty(0)]
    for number, choice in enumerate(choices):
        marginal = total
        for other, other_choice in enumerate(choices):
            if other != number:
                shape = [-1 if i == other else 1 for i in range(len(choices))]
                marginal = marginal + other_choice.probabilities.to(marginal).log().view(shape)
                marginal = marginal.logsumexp(other + 1, keepdim=True)
        products = choice.products
        if products is None:
            shares_by_choice.append(augment.shares.new_full((sizes[number],), UNMEASURED))
        else:
            shares = likeliest_shares(marginal.flatten(1), y, products)
            shares_by_choice.append(shares.to(augment.shares))
    augment.shares.copy_(torch.cat(shares_by_choice))


def _accumulates_at_end(energies: Float[Tensor, "n s"]) -> bool:
    """Return whether an end of the search range holds twice its uniform share of poses."""
    shares, edge = energies.softmax(1).mean(0), max(1, energies.shape[1] // EDGE)
    return float(torch.maximum(shares[:edge].sum(), shares[-edge:].sum())) > 2 / EDGE


def uncovered_circle(augment: Augment) -> list[float | None]:
    """Return the uncovered part of the circle for each rotation, in units of its width."""
    uncovered: list[float | None] = []
    for move in augment.moves:
        if isinstance(move, Lie):
            widths = move.distribution.widths.tolist()
            rotations = zip(widths, move.distribution.periodic, strict=True)
            uncovered += [
                max(0.0, math.pi / w - 1) if is_rotation else None for w, is_rotation in rotations
            ]
        else:
            uncovered += [None] * int(move.dim)  # type: ignore[arg-type]
    return uncovered


def _range(
    energies: Float[Tensor, "n s"],
    y: Tensor,
    uncovered: float | None,
    unmoved_likelihood: float | None = None,
) -> float:
    """Return the fraction of the width with the highest likelihood.

    Args:
        energies: energies on an even grid from one end of the width to the other.
        y: classes.
        uncovered: uncovered length of the circle, in widths; None if there is no circle.
        unmoved_likelihood: log likelihood without any transformation; None to use that of the
            narrowest range.
    """
    n, s = energies.shape
    values = Windows(energies, y, uncovered).likelihoods(range(1, s + 1))
    scores = {m: value - (0.5 * math.log(n) if m < s else 0.0) for m, value in values.items()}
    best = max(scores, key=scores.__getitem__)
    if uncovered is None and best <= s // EDGE and _accumulates_at_end(energies):
        return 1.0
    is_closed = best == 1 if unmoved_likelihood is None else unmoved_likelihood > scores[best]
    return 0.0 if is_closed else best / s
