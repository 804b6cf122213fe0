r"""Whether a narrow range of poses explains the labels, as the copies do.

Energies compare a picture as it is with turned ones, and a turned one is softer: where pixels are
few, a network may take sharpness for the standard pose, and every datum for one that was never
moved. Its labels know better. With poses of class y in a narrow window $V_y$ alone,

$$ p(y \mid x) \propto \sum_{e \in V_y} \exp g_y(T_e x) , $$

and each window where the data of its class are likeliest. If data are not moved, that predicts
labels about as well as all copies; if they are moved, it cannot.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.invariance.averaged_network import Augmented
from symrazor.invariance.copies import Augment
from symrazor.invariance.pose_energies import over_choices, pose_energies

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
