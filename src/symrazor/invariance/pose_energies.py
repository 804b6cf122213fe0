r"""Energies of data in all poses, as a network that is averaged with "joint" sees them.

Of one generator all its places are looked at. Of several a grid of all places would be large, and
poses are sharp. So each datum is first brought to its likeliest pose, by a search on a coarse
lattice and then along one generator after the other; along each generator its energies are those
with all others at that pose.

Which pose a network takes for the standard one is its own choice, and need not be in the middle:
large digits are easier to tell apart, so that the standard one may be large. Data at the other
end are then further from it than the width of the copies. So where no circle closes, poses are
looked for up to `FURTHER` widths away: a standard pose at the end of the width, and data at the
other end of theirs.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.data import Tensors
from symrazor.data.batches import check_lengths
from symrazor.invariance.averaged_network import Augmented
from symrazor.invariance.copies import Augment, lattice
from symrazor.invariance.transformation import Choice, Lie, Transformation

ALONG, SWEEPS = 64, 2
"""Places along each of several generators, and how often each datum goes along all of them."""
FURTHER = 2.0
"""How far from the middle poses are looked for, in widths, where no circle closes."""
AT_ONCE, NUMBERS = 10_000, 400_000
"""Copies in one batch, and on a CPU, where caches are small, numbers in all of them."""


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
    check_lengths(*data, "the data whose poses are looked for")
    if data[1].is_floating_point():
        raise ValueError(f"expected labels of classes as whole numbers, got {data[1].dtype}")
    return model.augment


def grid(points: int, k: int) -> Float[Tensor, "s k"]:
    """Points of the cube, evenly spread; of one generator, the middles of equal parts."""
    return 2 * ((lattice(points, k) + 0.5 / points) % 1) - 1


def pose_energies(
    model: Augmented,
    x: Tensor,
    y: Tensor,
    points: Float[Tensor, "s k"] | Float[Tensor, "n s k"],
) -> Float[Tensor, "n s e"]:
    r"""$g_y(T_e x)$ at the label of each datum, for every point and combination of choices.

    Points are the same for all data, or each datum has its own.
    """
    augment, found = model.augment, []
    assert isinstance(augment, Augment)
    s = points.shape[-2]
    most = AT_ONCE if x.is_cuda else min(AT_ONCE, NUMBERS // max(1, x[:1].numel()))
    many = max(1, most // s)
    for start in range(0, len(x), many):
        part, labels = x[start : start + many], y[start : start + many]
        at = points if points.dim() == 2 else points[start : start + many]
        moved, _ = augment.copies(part, at)
        g = model.network(moved.flatten(0, 1)).double().unflatten(0, (len(part), -1))
        own = g.gather(2, labels.view(-1, 1, 1).expand(-1, g.shape[1], 1))[..., 0]
        found.append(own.unflatten(1, (s, -1)))
    return torch.cat(found)


def over_choices(augment: Augment, energies: Float[Tensor, "n s e"]) -> Float[Tensor, "n s"]:
    """Logarithms of means over the elements of all choices, with their probabilities."""
    weights = energies.new_ones(1)
    for choice in augment.choices:
        assert isinstance(choice, Choice)
        weights = torch.outer(weights, choice.probabilities.to(weights)).flatten()
    return (energies + weights.log()).logsumexp(2)


def looked_at(augment: Augment) -> list[float]:
    """How far from the middle poses of each generator are looked for, in widths."""
    found: list[float] = []
    for move in augment.moves:
        assert isinstance(move, Transformation)
        turns = move.distribution.periodic if isinstance(move, Lie) else [False] * move.dim
        found += [FURTHER if move.poses == "anywhere" and not turn else 1.0 for turn in turns]
    return found


def slice_passes(k: int) -> int:
    """Poses of each datum that `slices` looks at."""
    return ALONG * SWEEPS * k


def slices(
    model: Augmented,
    x: Tensor,
    y: Tensor,
    best: Float[Tensor, "n k"],
    ends: Mapping[int, float],
) -> list[Float[Tensor, "n along"]]:
    """Energies along some generators, with the others at the likeliest pose of the datum.

    Args:
        model: averaged with "joint".
        x: data.
        y: classes.
        best: poses to start from.
        ends: generator -> how far from the middle, in widths; others stay where `best` has them.
    """
    augment, best = check_joint(model, (x, y)), best.clone()
    places = grid(ALONG, 1)[:, 0].to(best)
    found: list[Tensor] = []
    for _ in range(SWEEPS):
        found = []
        for j, end in ends.items():
            points = best.unsqueeze(1).repeat(1, ALONG, 1)
            points[:, :, j] = end * places
            found.append(over_choices(augment, pose_energies(model, x, y, points)))
            best[:, j] = end * places[found[-1].argmax(1)]
    return found


ASKED = 300
"""Data whose labels are predicted."""
MOST_WRONG = 0.05
"""Share of the data that may be wrong in a narrow window and right with all copies."""


def narrow_fails(
    model: Augmented, x: Tensor, y: Tensor, places: Float[Tensor, "s k"], length: int
) -> bool:
    """Whether windows of so many places lose more labels than `MOST_WRONG`.

    Args:
        model: averaged with "joint".
        x: data.
        y: classes.
        places: poses along one generator, in order.
        length: of the windows, in places.
    """
    augment = model.augment
    assert isinstance(augment, Augment)
    x, y, within = x[:ASKED], y[:ASKED], (places.abs() <= 1).all(1)
    whole, narrow = [], []
    for label in y.unique():
        own = over_choices(augment, pose_energies(model, x, label.expand_as(y), places))
        windows = own.unfold(1, length, 1).logsumexp(2)
        narrow.append(windows[:, windows[y == label].sum(0).argmax()])
        whole.append(own[:, within.to(own.device)].logsumexp(1))
    classes = y.unique()
    right = [classes[torch.stack(seen, 1).argmax(1)] == y for seen in (narrow, whole)]
    lost = float(right[1].double().mean() - right[0].double().mean())
    return lost > MOST_WRONG
