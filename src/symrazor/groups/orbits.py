r"""Which pairs of places a group of permutations moves to each other.

Say the first places reach each other, and $u_t$ is a word in the generators that takes place 0 to
t. Then $(t, s)$ goes with $(0, u_t^{-1} s)$, and two pairs that begin with 0 go together where an
element moves one to the other and leaves 0 alone. By Schreier's lemma such elements are generated
by $u_{gt}^{-1}\, g\, u_t$, over places t and generators g. So the labels of one row of pairs, of
which most of these leave most alone, give those of all.
"""

import torch
from jaxtyping import Int
from torch import Tensor


def pair_orbits(
    out_rows: Int[Tensor, "m t"], in_rows: Int[Tensor, "m s"] | None = None
) -> Int[Tensor, "t s"]:
    """A label for every pair of places: equal where a group moves one pair to the other.

    Labels are numbered as they appear, row by row.

    Args:
        out_rows: permutations of the first place, one per generator.
        in_rows: of the second; by default the same.
    """
    in_rows = out_rows if in_rows is None else in_rows
    t, s = out_rows.shape[1], in_rows.shape[1]
    images = out_rows.T.tolist()
    words = torch.arange(s).repeat(t, 1)  # u_t, as it moves the second place
    labels = torch.empty(t, s, dtype=torch.long)
    seen, count = [False] * t, 0
    for start in range(t):
        if seen[start]:
            continue
        seen[start], reached = True, [start]
        for here in reached:
            for there, g in zip(images[here], in_rows, strict=True):
                if not seen[there]:
                    seen[there] = True
                    words[there] = g[words[here]]
                    reached.append(there)
        orbit = torch.tensor(reached)
        back = torch.empty(len(orbit), s, dtype=torch.long)
        back.scatter_(1, words[orbit], torch.arange(s).expand(len(orbit), -1))
        row = _row_labels(out_rows, in_rows, orbit, words, back)
        labels[orbit] = row[back] + count
        count += int(row.max()) + 1
    return labels


def _row_labels(
    out_rows: Int[Tensor, "m t"],
    in_rows: Int[Tensor, "m s"],
    orbit: Int[Tensor, " r"],
    words: Int[Tensor, "t s"],
    back: Int[Tensor, "r s"],
) -> Int[Tensor, " s"]:
    """Labels of the second places under the elements that leave the orbit's first place alone."""
    t, s = words.shape
    place = torch.empty(t, dtype=torch.long)
    place[orbit] = torch.arange(len(orbit))
    labels = torch.arange(s)
    for p, q in zip(out_rows, in_rows, strict=True):
        moved = labels[back[place[p[orbit]]].gather(1, q[words[orbit]])]
        apart = moved != labels
        if bool(apart.any()):
            edges = torch.stack([labels.expand_as(moved)[apart], moved[apart]])
            labels = joined(edges, s)[labels]
    return ((labels == torch.arange(s)).cumsum(0) - 1)[labels]


def joined(edges: Int[Tensor, "2 e"], size: int) -> Int[Tensor, " n"]:
    """For each of so many places the least that edges join it to.

    Each label becomes the least of its neighbours', then that label's own label, until none
    changes: a number of rounds that grows as the logarithm of the longest way.
    """
    here, there = torch.cat([edges, edges.flip(0)], 1)
    labels = torch.arange(size)
    while True:
        before = labels
        labels = labels.scatter_reduce(0, here, labels[there], "amin")
        labels = labels[labels]
        if torch.equal(labels, before):
            return labels
