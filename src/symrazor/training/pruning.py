r"""Recognise networks whose weights the evidence has pruned, and train them again.

If an evidence step raises the precisions before the weights have learned anything, the weights
shrink, and the precisions rise further: the network ends with the same prediction for every input.
Such a network is often a local maximum of the evidence only. It is recognised by two signs:

1. Its log likelihood exceeds that of its mean output, used for every input, by at most
   `MAX_GAIN_NATS`.
2. A precision has risen, in several evidence steps: the cause is not a short training, or a prior
   that was fixed.

`fit` trains such a network once more, from its initial weights with `gentler` options: weaker
priors, and more training before the first update. It returns the network with the higher evidence,
so that a network stays pruned where the inputs do not predict the labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from symrazor.core.likelihood import Likelihood
from symrazor.training.options import FitConfig

MAX_GAIN_NATS = 3.0
"""Largest gain over a constant prediction of a pruned network."""
MIN_EVIDENCE_STEPS = 5
"""Fewer evidence steps do not prune a network."""
RISE = 2.0
"""Smallest factor by which the precision of a pruned group has risen."""
GENTLE_PRECISION = 0.1
"""Largest starting precision in the second training, and its factor to that of the first."""
GENTLE_BURN_IN = 0.5
"""Fraction of the second training before the first update of a hyperparameter."""


@torch.no_grad()
def gain_over_constant(likelihood: Likelihood, f: Tensor, y: Tensor) -> float:
    """Return the log likelihood of outputs f minus that of their mean for every input, in nats."""
    f = f.double()
    constant = f.mean(0, keepdim=True).expand_as(f)
    labels = y.double() if y.is_floating_point() else y
    return float((likelihood.nll(constant, labels) - likelihood.nll(f, labels)).sum())


def is_pruned(
    history: Sequence[Mapping[str, Any]], likelihood: Likelihood, f: Tensor, y: Tensor
) -> bool:
    """Return whether the evidence has pruned a network to a constant.

    Args:
        history: records of its training.
        likelihood: its likelihood.
        f: its outputs on the training data.
        y: their labels.
    """
    return _was_raised(history) and gain_over_constant(likelihood, f, y) <= MAX_GAIN_NATS


def _was_raised(history: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the evidence has raised a prior precision, in several steps."""
    steps = [record["precisions"] for record in history if "precisions" in record]
    if len(steps) < MIN_EVIDENCE_STEPS:
        return False
    return any(steps[-1][group] > RISE * value for group, value in steps[0].items())


def gentler(options: FitConfig, total_steps: int) -> FitConfig:
    """Return the options of the second training."""
    razor = options.razor
    if isinstance(razor.prior_precision, int | float):
        precision = GENTLE_PRECISION * min(1.0, razor.prior_precision)
        razor = replace(razor, prior_precision=precision)
    burn_in = max(int(GENTLE_BURN_IN * total_steps), options.burn_in_steps(total_steps)[0])
    latest = max(burn_in, options.burn_in_steps(total_steps)[1])
    return replace(
        options, razor=razor, burn_in=burn_in, burn_in_most=latest, save=None, resume=None
    )
