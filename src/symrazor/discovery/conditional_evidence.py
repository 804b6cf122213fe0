r"""How well networks predict training data that they were not trained on.

The evidence of all data is that of the data compared on, times that of the rest given them:

$$\log p(D) = \log p(D_1) + \log p(D_2 \mid D_1).$$

The first term counts what it costs to learn $D_1$ from nothing, also what the first few data cost.
The network that needs least for those need not be the one that predicts best after thousands. The
second term, the conditional evidence (Lotfi et al. 2022, eq. 5), says how well a network does from
here on, and needs no curvature. Here it is that of the trained weights, each datum by itself:
$\sum_{i \in D_2} \log p(y_i \mid x_i, \theta)$. All of it are training data; the network that is
chosen is then trained on $D_1$ and $D_2$.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from symrazor.data import Tensors
from symrazor.discovery.answer import ODDS, Candidate
from symrazor.training.fit import Fit
from symrazor.training.loop import outputs

MOST = 5000
"""At most so many data are predicted."""


def rest(train: Tensors, used: Tensor) -> Tensors | None:
    """The data that are not used, at most `MOST` of them; None if there are none."""
    left = torch.ones(len(train[1]), dtype=torch.bool)
    left[used] = False
    kept = left.nonzero().flatten()[:MOST]
    return (train[0][kept], train[1][kept]) if len(kept) else None


@torch.no_grad()
def log_scores(done: Fit, data: Tensors) -> Tensor:
    """Log likelihood of each datum by the trained weights, on the CPU in float64."""
    likelihood, x = done.razor.likelihood, data[0]
    f = outputs(done.model, x)
    return -likelihood.nll(f, data[1].to(f.device)).double().cpu()


def ahead(one: Candidate, other: Candidate) -> tuple[float, float] | None:
    """Nats by which one predicts better than another, and their standard error.

    None where nothing was left to predict.
    """
    if one.unseen is None or other.unseen is None or len(one.unseen) < 2:
        return None
    gap = one.unseen - other.unseen
    return float(gap.sum()), float(gap.std()) * math.sqrt(len(gap))


def better(one: Candidate, other: Candidate) -> bool:
    """Whether one predicts better by more than odds of 20 to 1, and than two standard errors."""
    found = ahead(one, other)
    return found is not None and found[0] >= max(ODDS, 2 * found[1])


def foremost(ranked: Sequence[Candidate]) -> Candidate:
    """The first, which has the highest evidence, or what predicts best if that is clearly better.

    Args:
        ranked: candidates by evidence.
    """
    first = ranked[0]
    clearly = [c for c in ranked[1:] if better(c, first)]
    return max(clearly, key=_sum, default=first)


def _sum(candidate: Candidate) -> float:
    return 0.0 if candidate.unseen is None else float(candidate.unseen.sum())
