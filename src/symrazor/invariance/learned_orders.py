r"""Learn by which parts of a full turn labels are unchanged: cyclic groups that nobody listed.

The flow of a generator with $\exp(2 \pi G) = 1$ is a circle. Networks learn the labels on one part
of the data. On the other part, the squared error of their predictions for turned inputs,

$$ D(t) = \mathrm{E}\, | \hat f(e^{t G} x) - y |^2 , $$

is that for unturned inputs, D(0), if labels are unchanged by the turn, whatever the errors of the
networks. The order of the group is the largest n for which this holds for all multiples of 1/n of a
turn. The networks see the sines and cosines of multiples of each angle along the circle, without
which they do not learn labels that change several times in a turn.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.invariance.learned_generators import STEPS, LabelNetworks, checked_points
from symrazor.invariance.matrix_flows import act, is_circle

MAX_ORDER = 24
"""Largest order that is told apart from the whole circle."""
MAX_EXCESS = 0.15
"""Largest excess of the error after a turn, as a share of the mean excess over the circle."""
MIN_EXCESS = 0.05
"""Mean excess over the circle, as a share of the labels' variance, below which all turns count as
symmetries."""


@dataclass(frozen=True)
class LearnedOrder:
    """The turns that leave labels unchanged.

    Args:
        order: largest n of which all multiples of 1/n of a turn leave labels unchanged; 1 if none.
        is_whole: whether all turns do.
        is_decided: whether no larger order is possible within two standard errors.
        excess: excess of the error by these turns, as a share of the mean excess over the circle.
    """

    order: int
    is_whole: bool
    is_decided: bool
    excess: float

    @property
    def verdict(self) -> str:
        """The order in words."""
        if not self.is_decided:
            return "Undecided: the networks are not accurate enough. Use more data or more `steps`."
        if self.is_whole:
            return "Labels are unchanged by all turns."
        if self.order == 1:
            return f"Labels are changed by every part of a turn, down to 1/{MAX_ORDER}."
        return (
            f"Labels are unchanged by multiples of 1/{self.order} of a turn, and by no finer part "
            f"down to 1/{MAX_ORDER}, within two standard errors."
        )


def learn_order(
    x: Float[Tensor, "n ..."],
    y: Tensor,
    generator: Float[Tensor, "d d"],
    seed: int = 0,
    steps: int = STEPS,
) -> LearnedOrder:
    """Learn which parts of a full turn leave the labels of vectors or point clouds unchanged.

    Args:
        x: vectors [n, d], or point clouds [n, points, d], of which all points are turned.
        y: classes [n], or targets [n] or [n, k].
        generator: the matrix G; exp(2 pi G) must be the identity.
        seed: of all random numbers.
        steps: training steps of the networks.
    """
    points = checked_points(x, y)
    if generator.shape != (points.shape[2],) * 2 or not is_circle(generator):
        raise ValueError(
            f"The generator must be a {points.shape[2]} x {points.shape[2]} matrix whose flow "
            f"closes after 2 pi."
        )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        networks = LabelNetworks(_features(generator, points), y, is_equivariant=False)
        networks.train(steps)

    held_out = points[networks.held_out]

    def errors(turn: float) -> Float[Tensor, " n"]:
        amount = torch.full((len(held_out),), 2 * math.pi * turn)
        return networks.errors(_features(generator, act(generator.float(), held_out, amount)))

    turns = sorted({k / n for n in range(2, MAX_ORDER + 1) for k in range(1, n)})
    unturned = errors(0.0)
    excess = torch.stack([errors(turn) - unturned for turn in turns])
    explained = networks.variance - float(unturned.mean())
    mean, low, high = _interval(excess.mean(0))
    if high <= MIN_EXCESS * explained:
        return LearnedOrder(MAX_ORDER, True, True, mean / explained)
    if low <= MIN_EXCESS * explained:
        return LearnedOrder(1, False, False, mean / explained)
    is_decided = True
    for n in range(MAX_ORDER, 1, -1):
        multiples = [turns.index(k / n) for k in range(1, n)]
        intervals = torch.tensor([_interval(excess[i]) for i in multiples]) / mean
        worst, worst_low, worst_high = intervals.amax(0).tolist()
        if worst_high <= MAX_EXCESS:
            return LearnedOrder(n, False, is_decided, worst)
        is_decided &= worst_low > MAX_EXCESS
    return LearnedOrder(1, False, is_decided, 0.0)


def _features(generator: Tensor, x: Float[Tensor, "n p d"]) -> Float[Tensor, "n 1 f"]:
    """Return the inputs, and sines and cosines of multiples of each angle that the flow changes."""
    values, vectors = torch.linalg.eig(generator.double())
    turning = vectors[:, values.imag > 0.5]
    angles = torch.angle(x.to(turning) @ turning).flatten(1)
    orders = torch.arange(1, MAX_ORDER + 1)
    harmonics = (angles.unsqueeze(2) * orders).flatten(1)
    features = torch.cat([x.flatten(1), harmonics.cos(), harmonics.sin()], 1)
    return features.float().unsqueeze(1)


def _interval(values: Float[Tensor, " n"]) -> tuple[float, float, float]:
    """Return the mean, and the mean minus and plus two standard errors."""
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    return mean, mean - 2 * error, mean + 2 * error
