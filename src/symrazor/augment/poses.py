r"""How far the data themselves are moved: the range of poses in which a network sees them.

A network averaged with `average="joint"` says that a datum is one in a standard pose, moved by an
unknown transformation $T_e$ with $e$ uniform on $[-w, w]$,

$$ p(x, y) \propto \frac{1}{2w} \int_{-w}^{w} \exp g_y(T_e x)\, de . $$

Its conditional $p(y \mid x)$, which is what is trained, does not mind a $w$ that is too large: the
factor $1/2w$ cancels, and copies in poses that never occur weigh nothing. The joint does mind. So
with the network as it is, the range of poses is the type-II maximum likelihood estimate

$$ \hat w = \arg\max_{v \le w} \sum_n \log \frac{1}{2v} \int_{-v}^{v} \exp g_{y_n}(T_e x_n)\, de ,$$

where the poses of the training data fill the range evenly up to its ends. A datum that looks the
same in all poses has no say in it. For several generators each range is taken with the others as
they are. $v = 0$, no transformation at all, is one of the candidates; of several generators, the
narrowest range that is tried stands for it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.augment.copies import Augment, Augmented, lattice
from symrazor.data import Tensors

POINTS, MORE_POINTS = 64, 1024
"""Poses in which each datum is looked at, for one generator and for several."""
LEAST = 1 / 16
"""Of several generators, the smallest fraction of a width that is told from 0."""
MOST_DATA, MOST_PASSES = 500, 160_000
"""Data that are looked at, and data times poses."""
AT_ONCE = 10_000
"""Copies in one batch."""


@torch.no_grad()
def find_reach_(model: Augmented, data: Tensors) -> Float[Tensor, " k"]:
    """Measure the range of poses as a fraction of each width, and keep it in the augmentation.

    `Augment.describe`, and so every report, then gives the ranges in place of the widths.

    Args:
        model: averaged with "joint", trained; evaluated as it is.
        data: training data with the labels of classes; of many, the first are used.

    Raises:
        ValueError: a model with another average, or a mixture.
    """
    augment = model.augment
    if model.average != "joint" or not isinstance(augment, Augment):
        raise ValueError(
            f"expected one augmentation and average 'joint', got {type(augment).__name__} and "
            f"{model.average!r}; poses have no weights of their own otherwise"
        )
    k = augment.lattice.shape[1]
    if k == 0:
        return augment.reach
    points = POINTS if k == 1 else MORE_POINTS
    x, y = (part[: min(MOST_DATA, MOST_PASSES // points)] for part in data)
    places = 2 * ((lattice(points, k) + 0.5 / points) % 1) - 1
    inside, distance = _energies(model, x, y, places), places.abs().to(x.device)
    if k == 1:
        still = float(_energies(model, x, y, torch.zeros(1, 1)).sum())
        found = [_range(inside, distance[:, 0], 1, still)]
    else:
        least = int(LEAST * points)
        found = [_range(inside, distance[:, j], least) for j in range(k)]
    augment.reach.copy_(torch.tensor(found))
    return augment.reach


def _energies(
    model: Augmented, x: Tensor, y: Tensor, points: Float[Tensor, "s k"]
) -> Float[Tensor, "n s"]:
    r"""$g_y(T_e x)$ at the label of each datum, for every point; choices are averaged over."""
    augment, found = model.augment, []
    assert isinstance(augment, Augment)
    many = max(1, AT_ONCE // len(points))
    for part, labels in zip(x.split(many), y.split(many), strict=True):
        moved, weights = augment.copies(part, points)
        g = model.network(moved.flatten(0, 1)).double().unflatten(0, (len(part), -1))
        own = g.gather(2, labels.view(-1, 1, 1).expand(-1, g.shape[1], 1))[..., 0]
        relative = (weights.double() * len(points)).log()
        found.append((own + relative).unflatten(1, (len(points), -1)).logsumexp(2))
    return torch.cat(found)


def _range(
    energies: Float[Tensor, "n s"],
    distance: Float[Tensor, " s"],
    least: int,
    still: float | None = None,
) -> float:
    """The fraction with the highest likelihood: the mean over all points within it.

    Args:
        energies: of all points.
        distance: of each from the middle.
        least: points in the narrowest range.
        still: the likelihood of no range at all; None to take that of the narrowest one.
    """
    order = distance.argsort()
    count = torch.arange(1, len(order) + 1, device=energies.device).double()
    value = (energies[:, order].logcumsumexp(1) - count.log()).sum(0)[least - 1 :]
    d = distance[order].double()
    ends = torch.cat([(d[1:] + d[:-1]) / 2, d.new_ones(1)])[least - 1 :]
    best = int(value.argmax())
    closed = best == 0 if still is None else still >= float(value[best])
    return 0.0 if closed else float(ends[best])
