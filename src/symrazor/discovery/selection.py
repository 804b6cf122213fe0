r"""Choose the network to recommend, by evidence and by conditional evidence.

The evidence of all training data splits into the evidence of the samples $D_1$ used for the
comparison, and the conditional evidence of the held-out samples $D_2$:

$$\log p(D) = \log p(D_1) + \log p(D_2 \mid D_1).$$

The first term includes the cost of learning $D_1$ from nothing. The network that learns most from a
few samples is not always the one that predicts best after thousands. The second term is the
conditional evidence (Lotfi et al. 2022, eq. 5). It measures how well a network predicts from then
on, and needs no curvature. Here it is evaluated at the trained weights, sample by sample:
$\sum_{i \in D_2} \log p(y_i \mid x_i, \theta)$. $D_2$ is training data; the recommended network
is then trained on $D_1$ and $D_2$.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from symrazor.data import Tensors
from symrazor.discovery.answer import Answer, Candidate, separated
from symrazor.discovery.question import MIN_LOG_ODDS, select
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import Fit

MAX_LEFT_OUT = 5000
"""Largest number of left-out samples that are predicted."""
UNCONVERGED_RISE = 0.25
"""A gap is unconverged if the last evidence step alone closed more than this share of it."""


def left_out_samples(train: Tensors, used: Tensor) -> Tensors | None:
    """Return at most `MAX_LEFT_OUT` samples that are not used; None if all are used."""
    unused = torch.ones(len(train[1]), dtype=torch.bool)
    unused[used] = False
    index = unused.nonzero().flatten()[:MAX_LEFT_OUT]
    return select(train, index) if len(index) else None


@torch.no_grad()
def log_scores(fit: Fit, data: Tensors) -> Tensor:
    """Return the log likelihood of each sample at the trained weights, in float64 on the CPU."""
    f = outputs(fit.model, data[0])
    return -fit.razor.likelihood.nll(f, data[1].to(f.device)).double().cpu()


def conditional_gain(first: Candidate, second: Candidate) -> tuple[float, float] | None:
    """Return the nats by which the first candidate predicts better, and their standard error.

    None if no samples were left out.
    """
    if first.left_out is None or second.left_out is None or len(first.left_out) < 2:
        return None
    gap = first.left_out - second.left_out
    return float(gap.sum()), float(gap.std()) * math.sqrt(len(gap))


def predicts_better(first: Candidate, second: Candidate) -> bool:
    """Return whether the conditional gain exceeds `MIN_LOG_ODDS` and two standard errors."""
    gain = conditional_gain(first, second)
    return gain is not None and gain[0] >= max(MIN_LOG_ODDS, 2 * gain[1])


def best_predictor(ranked: Sequence[Candidate]) -> Candidate:
    """Return the first candidate, or the best of those that clearly predict better.

    Args:
        ranked: candidates, highest evidence first.
    """
    first = ranked[0]
    better = [c for c in ranked[1:] if predicts_better(c, first)]
    return max(better, key=_conditional_evidence, default=first)


def _conditional_evidence(candidate: Candidate) -> float:
    return 0.0 if candidate.left_out is None else float(candidate.left_out.sum())


def last_rise(candidate: Candidate) -> float:
    """Return the nats gained at the last evidence step; 0 if the evidence fell."""
    values = [r["log_evidence"] for r in candidate.fit.history if "log_evidence" in r]
    return max(0.0, values[-1] - values[-2]) if len(values) > 1 else 0.0


def unconverged_rival(answer: Answer) -> Candidate | None:
    """Return a relaxed or symmetric network that may still overtake a best one that is neither."""
    best, names = answer.best, (answer.family.relaxed, answer.family.built_in)
    behind = [c for c in answer.candidates if c.name in names and best.name not in names]
    rising = [
        c for c in behind if last_rise(c) > UNCONVERGED_RISE * (best.log_evidence - c.log_evidence)
    ]
    return max(rising, key=lambda c: c.log_evidence, default=None)


def recommend(answer: Answer, provisional: bool = False) -> str:
    """Return the name of the structure to recommend.

    It is the one with the highest evidence, unless another one clearly predicts left-out training
    samples better (`best_predictor`). If it is the relaxed network and all its layers kept their
    symmetry, or if it is not separated from the network with the symmetry built in, the latter is
    recommended. After a provisional comparison only these two are considered.
    """
    relaxed, built_in = answer.family.relaxed, answer.family.built_in
    eligible = [c for c in answer.candidates if not provisional or c.name in (relaxed, built_in)]
    best = best_predictor(eligible or answer.candidates)
    if best.name != relaxed or built_in not in [c.name for c in eligible]:
        return best.name
    layers = [layer for layer in best.fit.reading.layers if layer.relaxed]
    all_equivariant = answer.symmetric and all(layer.kind == "equivariant" for layer in layers)
    plain = answer.named(built_in)
    inseparable = not separated(best, plain) and not predicts_better(best, plain)
    if all_equivariant or (inseparable and (answer.symmetric or provisional)):
        return built_in
    return best.name
