r"""Measure the range of poses in which the training data occur.

A network averaged with `average="joint"` models an input as one in a standard pose, transformed by
an unknown $T_e$ with $e$ uniform on $[-w, w]$,

$$ p(x, y) \propto \frac{1}{2w} \int_{-w}^{w} \exp g_y(T_e x)\, de . $$

Its conditional $p(y \mid x)$, which is trained, does not penalise a $w$ that is too large: the
factor $1/2w$ cancels, and copies in poses that never occur have no weight. The joint does. With the
network fixed, the range of poses is therefore the type-II maximum likelihood estimate

$$ \hat v = \arg\max_v \sum_y \log \frac{1}{|C|} \sum_{c \in C} \prod_{n: y_n = y}
   \frac{1}{2v} \int_{c - v}^{c + v} \exp g_y(T_e x_n)\, de , \qquad \hat v \le w . $$

The energy of an input x with label y in pose e is $g_y(T_e x)$, its log density up to a constant.

- The centre c of each class is arbitrary, because training chooses an arbitrary standard pose. The
  centre is marginalised (`Windows`). It may be near an end of the width: large digits are easier to
  distinguish, so the standard digit may be large. Poses of non-periodic generators are therefore
  searched up to `SEARCH_WIDTHS` widths away.
- A range below the whole width costs half the logarithm of the number of data (Schwarz's
  criterion). Inputs that look the same in all poses do not contribute. Rotations are periodic.
- For one generator, all poses on a grid are evaluated. For several, a full grid would be large, so
  the likeliest pose of each input is searched first, on a coarse lattice and then along one
  generator after the other. Each range is measured with the others at the likeliest pose. $v = 0$
  is a candidate for a single generator; for several, the narrowest range stands for it.
- Generators whose width hardly changes the data are skipped and keep their width.
- If poses accumulate at an end of the search range, the standard pose is outside of it and no range
  can be measured; the width of the copies is reported. The same holds if a narrow range cannot
  explain the labels that the copies explain (`narrow_range_fails`).
- Choices have shares in place of ranges (`likeliest_shares`).
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor

from symrazor.data import Tensors
from symrazor.data.batches import check_lengths
from symrazor.invariance.averaged_network import UNMEASURED, Augment, Augmented, lattice
from symrazor.invariance.transformation import Choice, Lie, Transformation

SINGLE_GENERATOR_POSES, COARSE_SEARCH_POSES = 96, 256
"""Poses per input for a single generator; for several, poses of the coarse search."""
POSES_PER_GENERATOR, SWEEPS = 64, 2
"""Poses along each of several generators, and number of sweeps over all generators."""
SEARCH_WIDTHS = 2.0
"""Search range of non-periodic generators, in widths from the centre."""
MAX_COPIES, MAX_CPU_NUMBERS = 10_000, 400_000
"""Maximal copies per batch, and on a CPU, whose caches are small, maximal numbers per batch."""
MAX_POSE_DATA, MAX_POSE_EVALUATIONS = 1500, 160_000
"""Maximal number of inputs, and of inputs times poses."""
MIN_CHANGE, CHANGE_INPUTS = 0.01, 200
"""Share of the data variance that a width must change, and number of inputs to measure it."""
EDGE = 16
"""An end of the search range is 1/EDGE of it."""
MAX_LOST_LABELS, LABEL_CHECK_INPUTS = 0.05, 300
"""Maximal share of labels that a narrow window may lose, and number of inputs to measure it."""
MIN_MASS = 1e-200
"""Lower bound of a probability mass, so that its logarithm is finite."""
EM_STEPS, INITIAL_IDENTITY_SHARE = 300, 0.8


class Windows:
    r"""Likelihoods of data whose poses fill a window.

    Each input has a density over poses, on an even grid from one end of a width to the other. The
    poses of a class are uniform on $[c_y - v, c_y + v]$ with a uniform prior on the centre $c_y$,
    over the places C at which the window lies within the width; see the module for the likelihood.
    A window that is likely at one place only pays for this choice; the whole width has no choice,
    and wins if no pose is likelier than others. On a circle, a window may extend over the part that
    the width leaves out, where no data are, but may not end there.

    Args:
        log_densities: log density of each input at each pose, up to a constant.
        y: classes.
        uncovered: uncovered length of the circle, in widths; None if there is no circle.
    """

    def __init__(
        self, log_densities: Float[Tensor, "n s"], y: Tensor, uncovered: float | None
    ) -> None:
        highest = log_densities.amax(1, keepdim=True)
        self.size, self.is_circle = log_densities.shape[1], uncovered is not None and uncovered < 1
        gap = round(uncovered * self.size) if uncovered is not None and self.is_circle else 0
        width_mass = log_densities.new_ones(1, self.size)  # mass of the width itself
        mass = torch.cat([(log_densities - highest).exp(), width_mass])
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
    share is assigned to the identity, element 0, since a common factor of all h changes nothing.
    Energies are log densities up to a constant; `products` holds the index of h e for each h and e.
    """
    n, e = energies.shape
    pair_energies = energies.double()[:, products.to(energies.device)]
    one_hot = F.one_hot(y.long()).to(pair_energies)
    equal = pair_energies.new_full((e,), 1 / e)

    def log_likelihood(q: Tensor) -> float:
        data = (pair_energies + q.clamp(min=1e-300).log()).logsumexp(2)
        return float(((one_hot.T @ data).logsumexp(1) - math.log(e)).sum())

    q = pair_energies.new_full((e,), (1 - INITIAL_IDENTITY_SHARE) / max(e - 1, 1))
    q[0] = INITIAL_IDENTITY_SHARE
    for _ in range(EM_STEPS):
        terms = pair_energies + q.clamp(min=1e-300).log()
        standard = (one_hot.T @ terms.logsumexp(2)).softmax(1)
        q = torch.einsum("nh,nhe->e", one_hot @ standard, terms.softmax(2)) / n
    if log_likelihood(q) - 0.5 * (e - 1) * math.log(n) <= log_likelihood(equal):
        return equal
    return q[products[int(q.argmax())].to(q.device)]


class Generator(NamedTuple):
    """One dimension of the points of an augmentation; lengths are in units of its width."""

    has_poses: bool
    search_range: float
    uncovered: float | None  # part of the circle that a rotation leaves out


def generators_of(augment: Augment) -> list[Generator]:
    """Return the generators of all transformations, in the order of a point."""
    generators: list[Generator] = []
    for move in augment.moves:
        assert isinstance(move, Transformation)
        uncovered: list[float | None] = [None] * move.dim
        if isinstance(move, Lie):
            widths, periodic = move.distribution.widths.tolist(), move.distribution.periodic
            for j in range(move.dim):
                if periodic[j]:
                    uncovered[j] = max(0.0, math.pi / widths[j] - 1) if widths[j] else math.inf
        reach = SEARCH_WIDTHS if move.poses == "anywhere" else 1.0
        generators += [
            Generator(move.poses != "none", reach if part is None else 1.0, part)
            for part in uncovered
        ]
    return generators


def _joint_augmentation(model: Augmented, data: Tensors) -> Augment:
    """Return the augmentation of a model whose poses have weights, else raise ValueError."""
    if not isinstance(model, Augmented):
        raise ValueError(
            f"Poses can only be measured for an Augmented network, got {type(model).__name__}."
        )
    if model.average != "joint" or not isinstance(model.augment, Augment):
        raise ValueError(
            "Poses have weights only for an Augment with average 'joint', got "
            f"{type(model.augment).__name__} with average {model.average!r}."
        )
    check_lengths(*data, "the data whose poses are measured")
    if data[1].is_floating_point():
        raise ValueError(f"Labels must be integer classes, got {data[1].dtype}.")
    return model.augment


def pose_grid(points: int, k: int) -> Float[Tensor, "s k"]:
    """Return evenly spread points of the cube; for one generator, the midpoints of equal cells."""
    return 2 * ((lattice(points, k) + 0.5 / points) % 1) - 1


def pose_energies(
    model: Augmented, x: Tensor, y: Tensor, points: Float[Tensor, "s k"] | Float[Tensor, "n s k"]
) -> Float[Tensor, "n s e"]:
    """Return $g_y(T_e x)$ at the label of each input, for every point and combination of choices.

    The points are the same for all inputs, or each input has its own.
    """
    assert isinstance(model.augment, Augment)
    energies, s = [], points.shape[-2]
    max_numbers = math.inf if x.is_cuda else MAX_CPU_NUMBERS // max(1, x[:1].numel())
    batch = max(1, int(min(MAX_COPIES, max_numbers)) // s)
    places = points.expand(len(x), -1, -1).split(batch)
    for inputs, labels, at in zip(x.split(batch), y.split(batch), places, strict=True):
        moved, _ = model.augment.copies(inputs, at)
        g = model.network(moved.flatten(0, 1)).double().unflatten(0, (len(inputs), -1))
        at_label = g.gather(2, labels.view(-1, 1, 1).expand(-1, g.shape[1], 1))[..., 0]
        energies.append(at_label.unflatten(1, (s, -1)))
    return torch.cat(energies)


def _average_over_choices(
    augment: Augment, energies: Float[Tensor, "n s e"]
) -> Float[Tensor, "n s"]:
    """Return log means over the elements of all choices, weighted by their probabilities."""
    weights = energies.new_ones(1)
    for choice in augment.choices:
        assert isinstance(choice, Choice)
        weights = torch.outer(weights, choice.probabilities.to(weights)).flatten()
    return (energies + weights.log()).logsumexp(2)


def averaged_energies(
    model: Augmented, x: Tensor, y: Tensor, points: Tensor
) -> Float[Tensor, "n s"]:
    """Return `pose_energies`, averaged over the elements of all choices."""
    assert isinstance(model.augment, Augment)
    return _average_over_choices(model.augment, pose_energies(model, x, y, points))


def energy_profiles(
    model: Augmented, x: Tensor, y: Tensor, best: Float[Tensor, "n k"], ends: Mapping[int, float]
) -> list[Float[Tensor, "n along"]]:
    """Return energies along some generators, with the others at the likeliest pose of the input.

    The search starts from the poses `best`. Generators that are not in `ends`, which holds the
    search range of the others in widths, stay there.
    """
    best = best.clone()
    places = pose_grid(POSES_PER_GENERATOR, 1)[:, 0].to(best)
    profiles: list[Tensor] = []
    for _ in range(SWEEPS):
        profiles = []
        for j, end in ends.items():
            points = best.unsqueeze(1).repeat(1, POSES_PER_GENERATOR, 1)
            points[:, :, j] = end * places
            profiles.append(averaged_energies(model, x, y, points))
            best[:, j] = end * places[profiles[-1].argmax(1)]
    return profiles


def narrow_range_fails(
    model: Augmented, x: Tensor, y: Tensor, places: Float[Tensor, "s k"], length: int
) -> bool:
    r"""Return whether a narrow range of poses explains fewer labels than all copies.

    Energies compare an image with transformed ones, and interpolation blurs those. With few pixels,
    a network may take sharpness for the standard pose, and every input for one that was never
    moved. The labels reveal this error. With poses of class y restricted to a narrow window $V_y$,

    $$ p(y \mid x) \propto \sum_{e \in V_y} \exp g_y(T_e x) , $$

    and each window placed where the inputs of its class are likeliest. If the inputs were never
    moved, this predicts labels about as well as all copies; if they were moved, it cannot. The
    result is True if more than `MAX_LOST_LABELS` of the labels are lost. `places` are poses along
    one generator, in order, and `length` is the length of the windows in places.
    """
    x, y, within = x[:LABEL_CHECK_INPUTS], y[:LABEL_CHECK_INPUTS], (places.abs() <= 1).all(1)
    full, narrow, classes = [], [], y.unique()
    for label in classes:
        energies = averaged_energies(model, x, label.expand_as(y), places)
        windows = energies.unfold(1, length, 1).logsumexp(2)
        narrow.append(windows[:, windows[y == label].sum(0).argmax()])
        full.append(energies[:, within.to(energies.device)].logsumexp(1))
    correct = [classes[torch.stack(scores, 1).argmax(1)] == y for scores in (narrow, full)]
    lost = float(correct[1].double().mean() - correct[0].double().mean())
    return lost > MAX_LOST_LABELS


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
    augment = _joint_augmentation(model, data)
    all_generators, moving = generators_of(augment), open_generators(augment, data[0])
    k = len(moving)
    points = 1 if k == 0 else SINGLE_GENERATOR_POSES if k == 1 else COARSE_SEARCH_POSES
    evaluations = points + (POSES_PER_GENERATOR * SWEEPS * k if k > 1 else 0)
    count = min(MAX_POSE_DATA, MAX_POSE_EVALUATIONS // evaluations)
    x, y = data[0][:count], data[1][:count]
    ends = {j: all_generators[j].search_range for j in moving}
    places = torch.zeros(points, len(all_generators))
    places[:, moving] = pose_grid(points, k) * (ends[moving[0]] if k == 1 else 1.0)
    energies = pose_energies(model, x, y, places)
    _find_shares_(augment, energies[:, (places.abs() <= 1).all(1)], y)
    averaged = _average_over_choices(augment, energies)
    profiles, unmoved_likelihood = [averaged], None
    if k == 1:
        unmoved = averaged_energies(model, x, y, torch.zeros_like(places[:1]))
        unmoved_likelihood = float(unmoved.sum())
    else:
        best = places.to(averaged.device)[averaged.argmax(1)]
        profiles = energy_profiles(model, x, y, best, ends)
    augment.reach.fill_(1)
    for (j, search_range), profile in zip(ends.items(), profiles, strict=True):
        fraction = _range(profile, y, all_generators[j].uncovered, unmoved_likelihood)
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
    has_poses = [generator.has_poses for generator in generators_of(augment)]
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


def _range(
    energies: Float[Tensor, "n s"],
    y: Tensor,
    uncovered: float | None,
    unmoved_likelihood: float | None = None,
) -> float:
    """Return the fraction of the width with the highest likelihood, see `Windows`.

    It is 0 if the likelihood without any transformation is higher. Where this is None, the
    narrowest range stands for it.
    """
    n, s = energies.shape
    values = Windows(energies, y, uncovered).likelihoods(range(1, s + 1))
    scores = {m: value - (0.5 * math.log(n) if m < s else 0.0) for m, value in values.items()}
    best = max(scores, key=scores.__getitem__)
    if uncovered is None and best <= s // EDGE and _accumulates_at_end(energies):
        return 1.0
    is_closed = best == 1 if unmoved_likelihood is None else unmoved_likelihood > scores[best]
    return 0.0 if is_closed else best / s
