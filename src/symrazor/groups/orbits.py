"""Which pairs of places a group of permutations moves to each other."""

import torch
from jaxtyping import Int
from torch import Tensor


def pair_orbits(
    out_rows: Int[Tensor, "m t"], in_rows: Int[Tensor, "m s"] | None = None
) -> Int[Tensor, "t s"]:
    """A label for every pair of places: equal where a group moves one pair to the other.

    Each label becomes the least of its neighbours', then that label's own label, until none
    changes: a number of rounds that grows as the logarithm of the longest cycle.

    Args:
        out_rows: permutations of the first place, one per generator.
        in_rows: of the second; by default the same.
    """
    in_rows = out_rows if in_rows is None else in_rows
    t, s = out_rows.shape[1], in_rows.shape[1]
    moved = (out_rows.unsqueeze(2) * s + in_rows.unsqueeze(1)).reshape(-1, t * s)
    labels = torch.arange(t * s)
    while True:
        before = labels.clone()
        for image in moved:  # pair i and its image belong together
            least = torch.minimum(labels, labels[image])
            labels = least.scatter_reduce(0, image, least, "amin")
        labels = labels[labels]
        if torch.equal(labels, before):
            break
    numbered: Tensor = labels.unique(return_inverse=True)[1]
    return numbered.reshape(t, s)
