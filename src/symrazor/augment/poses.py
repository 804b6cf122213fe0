r"""How far the data themselves are moved: the range of poses in which a network sees them.

A network averaged with `average="joint"` says that a datum is one in a standard pose, moved by an
unknown transformation $T_e$ with $e$ uniform on $[-w, w]$,

$$ p(x, y) \propto \frac{1}{2w} \int_{-w}^{w} \exp g_y(T_e x)\, de . $$

Its conditional $p(y \mid x)$, which is what is trained, does not mind a $w$ that is too large: the
factor $1/2w$ cancels, and copies in poses that never occur weigh nothing. The joint does mind. So
with the network as it is, the range of poses is the type-II maximum likelihood estimate

$$ \hat v = \arg\max_v \sum_y \log \frac{1}{|C|} \sum_{c \in C} \prod_{n: y_n = y}
   \frac{1}{2v} \int_{c - v}^{c + v} \exp g_y(T_e x_n)\, de $$

within $[-w, w]$: where the poses of the training data fill the range evenly up to its ends. Each
class has a middle c of its own, since nothing but chance says which pose a network takes for
the standard one of a class, and it is summed over (`windows`). A datum that looks the same in all
poses has no say. Turns are counted around the circle. For several generators each range is taken
with the others as
they are. $v = 0$, no transformation at all, is a candidate if there is one generator; of several,
the narrowest range that is tried stands for it. Choices have shares in place of ranges (`shares`).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.augment.copies import UNKNOWN, Augment, Augmented, lattice
from symrazor.augment.shares import likeliest_shares
from symrazor.augment.transformation import Choice, Lie
from symrazor.augment.windows import Windows
from symrazor.data import Tensors

POINTS, MORE_POINTS = 96, 1024
"""Poses in which each datum is looked at, for one generator and for several."""
BINS = 32
"""Places of each of several generators that are told apart."""
MOST_DATA, MOST_PASSES = 1500, 160_000
"""Data that are looked at, and data times poses."""
AT_ONCE = 10_000
"""Copies in one batch."""


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
    k = augment.lattice.shape[1]
    points = 1 if k == 0 else POINTS if k == 1 else MORE_POINTS
    x, y = (part[: min(MOST_DATA, MOST_PASSES // points)] for part in data)
    places = 2 * ((lattice(points, k) + 0.5 / points) % 1) - 1
    energies = pose_energies(model, x, y, places)
    _find_shares_(augment, energies, y)
    averaged, dead = over_choices(augment, energies), rest_of_circle(augment)
    if k == 1:
        still = pose_energies(model, x, y, torch.zeros(1, 1))
        found = [_range(averaged, y, dead[0], float(over_choices(augment, still).sum()))]
    else:
        found = [_range(_binned(averaged, places[:, j]), y, dead[j]) for j in range(k)]
    augment.reach.copy_(torch.tensor(found))
    return augment.reach


def check_joint(model: Augmented, data: Tensors) -> Augment:
    """The augmentation of a model whose poses have weights."""
    if not isinstance(model, Augmented):
        raise ValueError(f"expected an Augmented network, got {type(model).__name__}")
    if model.average != "joint" or not isinstance(model.augment, Augment):
        raise ValueError(
            "expected one augmentation and average 'joint', got "
            f"{type(model.augment).__name__} and {model.average!r}; poses have no weights of "
            "their own otherwise"
        )
    if data[1].is_floating_point():
        raise ValueError(f"expected labels of classes as whole numbers, got {data[1].dtype}")
    return model.augment


def pose_energies(
    model: Augmented, x: Tensor, y: Tensor, points: Float[Tensor, "s k"]
) -> Float[Tensor, "n s e"]:
    r"""$g_y(T_e x)$ at the label of each datum, for every point and combination of choices."""
    augment, found = model.augment, []
    assert isinstance(augment, Augment)
    many = max(1, AT_ONCE // len(points))
    for part, labels in zip(x.split(many), y.split(many), strict=True):
        moved, _ = augment.copies(part, points)
        g = model.network(moved.flatten(0, 1)).double().unflatten(0, (len(part), -1))
        own = g.gather(2, labels.view(-1, 1, 1).expand(-1, g.shape[1], 1))[..., 0]
        found.append(own.unflatten(1, (len(points), -1)))
    return torch.cat(found)


def over_choices(augment: Augment, energies: Float[Tensor, "n s e"]) -> Float[Tensor, "n s"]:
    """Logarithms of means over the elements of all choices, with their probabilities."""
    weights = energies.new_ones(1)
    for choice in augment.choices:
        assert isinstance(choice, Choice)
        weights = torch.outer(weights, choice.probabilities.to(weights)).flatten()
    return (energies + weights.log()).logsumexp(2)


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
            found.append(augment.shares.new_full((sizes[number],), UNKNOWN))
        else:
            shares = likeliest_shares(own.flatten(1), y, products)
            found.append(shares.to(augment.shares))
    augment.shares.copy_(torch.cat(found))


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


def _binned(energies: Float[Tensor, "n s"], places: Float[Tensor, " s"]) -> Float[Tensor, "n bins"]:
    """Logarithms of means over equal numbers of points, from one end of a coordinate on."""
    parts: Tensor = energies[:, places.argsort().to(energies.device)].unflatten(1, (BINS, -1))
    return parts.logsumexp(2) - math.log(parts.shape[2])


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
    s = energies.shape[1]
    values = Windows(energies, y, beyond).likelihoods(range(1, s + 1))
    (best, _), highest = max(values.items(), key=lambda item: item[1])
    closed = best == 1 if still is None else still >= highest
    return 0.0 if closed else best / s
