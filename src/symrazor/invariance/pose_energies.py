"""Compute the energies of inputs in all poses, for a network averaged with "joint".

The energy of an input x with label y in pose e is $g_y(T_e x)$, its log density up to a constant.
For one generator, all poses on a grid are evaluated. For several generators a full grid would be
large, and energies are sharply peaked. So the likeliest pose of each input is searched first, on a
coarse lattice and then along one generator after the other; the energies along each generator are
those with all others at that pose.

The network chooses its standard pose, which need not be at the centre: large digits are easier to
distinguish, so the standard digit may be large. Inputs at the other end are then further from it
than the width of the copies. So poses of non-periodic generators are searched up to `SEARCH_WIDTHS`
widths away.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.data import Tensors
from symrazor.data.batches import check_lengths
from symrazor.invariance.averaged_network import Augment, Augmented, lattice
from symrazor.invariance.transformation import Choice, Lie, Transformation

POSES_PER_GENERATOR, SWEEPS = 64, 2
"""Poses along each of several generators, and number of sweeps over all generators."""
SEARCH_WIDTHS = 2.0
"""Search range of non-periodic generators, in widths from the centre."""
MAX_COPIES, MAX_CPU_NUMBERS = 10_000, 400_000
"""Maximal copies per batch, and on a CPU, whose caches are small, maximal numbers per batch."""


def joint_augmentation(model: Augmented, data: Tensors) -> Augment:
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
    model: Augmented,
    x: Tensor,
    y: Tensor,
    points: Float[Tensor, "s k"] | Float[Tensor, "n s k"],
) -> Float[Tensor, "n s e"]:
    """Return $g_y(T_e x)$ at the label of each input, for every point and combination of choices.

    The points are the same for all inputs, or each input has its own.
    """
    augment, energies = model.augment, []
    assert isinstance(augment, Augment)
    s = points.shape[-2]
    max_copies = (
        MAX_COPIES if x.is_cuda else min(MAX_COPIES, MAX_CPU_NUMBERS // max(1, x[:1].numel()))
    )
    batch = max(1, max_copies // s)
    for start in range(0, len(x), batch):
        inputs, labels = x[start : start + batch], y[start : start + batch]
        at = points if points.dim() == 2 else points[start : start + batch]
        moved, _ = augment.copies(inputs, at)
        g = model.network(moved.flatten(0, 1)).double().unflatten(0, (len(inputs), -1))
        at_label = g.gather(2, labels.view(-1, 1, 1).expand(-1, g.shape[1], 1))[..., 0]
        energies.append(at_label.unflatten(1, (s, -1)))
    return torch.cat(energies)


def average_over_choices(
    augment: Augment, energies: Float[Tensor, "n s e"]
) -> Float[Tensor, "n s"]:
    """Return log means over the elements of all choices, weighted by their probabilities."""
    weights = energies.new_ones(1)
    for choice in augment.choices:
        assert isinstance(choice, Choice)
        weights = torch.outer(weights, choice.probabilities.to(weights)).flatten()
    return (energies + weights.log()).logsumexp(2)


def search_ranges(augment: Augment) -> list[float]:
    """Return the search range of each generator, in widths from the centre."""
    ranges: list[float] = []
    for move in augment.moves:
        assert isinstance(move, Transformation)
        periodic = move.distribution.periodic if isinstance(move, Lie) else [False] * move.dim
        ranges += [
            SEARCH_WIDTHS if move.poses == "anywhere" and not is_periodic else 1.0
            for is_periodic in periodic
        ]
    return ranges


def energy_profiles(
    model: Augmented,
    x: Tensor,
    y: Tensor,
    best: Float[Tensor, "n k"],
    ends: Mapping[int, float],
) -> list[Float[Tensor, "n along"]]:
    """Return energies along some generators, with the others at the likeliest pose of the input.

    Args:
        model: averaged with "joint".
        x: inputs.
        y: classes.
        best: poses to start from.
        ends: generator -> search range in widths; other generators stay at `best`.
    """
    augment, best = joint_augmentation(model, (x, y)), best.clone()
    places = pose_grid(POSES_PER_GENERATOR, 1)[:, 0].to(best)
    profiles: list[Tensor] = []
    for _ in range(SWEEPS):
        profiles = []
        for j, end in ends.items():
            points = best.unsqueeze(1).repeat(1, POSES_PER_GENERATOR, 1)
            points[:, :, j] = end * places
            profiles.append(average_over_choices(augment, pose_energies(model, x, y, points)))
            best[:, j] = end * places[profiles[-1].argmax(1)]
    return profiles


LABEL_CHECK_INPUTS = 300
"""Number of inputs whose labels are predicted."""
MAX_LOST_LABELS = 0.05
"""Maximal share of labels that a narrow window may lose relative to all copies."""


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
    result is True if more than `MAX_LOST_LABELS` of the labels are lost.

    Args:
        model: averaged with "joint".
        x: inputs.
        y: classes.
        places: poses along one generator, in order.
        length: length of the windows, in places.
    """
    augment = model.augment
    assert isinstance(augment, Augment)
    x, y, within = x[:LABEL_CHECK_INPUTS], y[:LABEL_CHECK_INPUTS], (places.abs() <= 1).all(1)
    whole, narrow = [], []
    for label in y.unique():
        energies = average_over_choices(
            augment, pose_energies(model, x, label.expand_as(y), places)
        )
        windows = energies.unfold(1, length, 1).logsumexp(2)
        narrow.append(windows[:, windows[y == label].sum(0).argmax()])
        whole.append(energies[:, within.to(energies.device)].logsumexp(1))
    classes = y.unique()
    correct = [classes[torch.stack(scores, 1).argmax(1)] == y for scores in (narrow, whole)]
    lost = float(correct[1].double().mean() - correct[0].double().mean())
    return lost > MAX_LOST_LABELS
