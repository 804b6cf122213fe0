r"""Refine a trained network: take its weights to the mode, between evidence steps with "auto".

Laplace's approximation holds at a mode of the posterior. Training by mini-batches ends near one for
the last precisions, and often tens of nats below. A round of refinement minimises

$$ - \log p(D \mid \theta) - \log p(\theta) $$

over all data by L-BFGS and then takes one evidence step with `structure="auto"`, the exact
curvature where it is affordable. The state with the highest evidence is kept.

Weights and precisions that take turns converge slowly, by a constant factor per round. While the
evidence rises, the precisions therefore move `OVERRELAXATION` times as far as the evidence step
does, in log precision. (A CNN on 300 images needed 10 rounds instead of 18.)
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from symrazor.core.errors import CurvatureError, DivergenceError
from symrazor.core.parameters import eval_mode, weights
from symrazor.curvature.estimate import AUTO
from symrazor.data import TensorLoader
from symrazor.data.batches import call
from symrazor.inference.razor import Razor

ITERATIONS = 60
"""Iterations of L-BFGS in one round."""
HISTORY = 20
"""Pairs of steps and gradients that L-BFGS keeps."""
EVIDENCE_UPDATES = 2
"""Fixed-point updates of the precisions in each evidence step."""
OVERRELAXATION = 2.0
"""Factor of the moves of all log precisions while the evidence rises."""
MIN_CHANGE = 0.2
"""Change of the log evidence, in nats, from which another round follows."""


def refine_(razor: Razor, data: TensorLoader, rounds: int) -> None:
    """Move weights and prior to a mode with a higher evidence, in at most this many rounds.

    Args:
        razor: the Razor of a trained model. Its best state is that of the refinement afterwards.
        data: all training data, in batches.
        rounds: number of rounds.
    """
    before = razor.method, razor.config, razor.is_updated
    razor.method, razor.is_updated = replace(razor.method, structure=AUTO), True
    razor.config = replace(razor.config, inner_steps=EVIDENCE_UPDATES)
    razor.best = razor.best_state = None
    try:
        with eval_mode(razor.model):
            previous, value = -math.inf, _evidence_step_(razor, data, -math.inf)
            for _ in range(rounds):
                maximise_posterior_(razor, data)
                earlier, previous = previous, value
                value = _evidence_step_(razor, data, previous)
                if max(abs(value - previous), abs(previous - earlier)) < MIN_CHANGE:
                    break
    except (CurvatureError, DivergenceError):
        if razor.best is None:
            raise
    finally:
        razor.method, razor.config, razor.is_updated = before
    if razor.best is not None:  # otherwise the burn-in keeps the prior
        razor.restore_best()


def _evidence_step_(razor: Razor, data: TensorLoader, previous: float) -> float:
    """Take an evidence step, a longer one if the evidence has risen; return the evidence."""
    hyper = list(razor.prior.parameters())
    start = [value.detach().clone() for value in hyper]
    evidence = float(razor.step(data).log_evidence)
    if evidence > previous:
        with torch.no_grad():
            for value, old in zip(hyper, start, strict=True):
                value.add_((OVERRELAXATION - 1) * (value - old))
        razor.at_bound = razor.prior.clamp_()
    return evidence


def maximise_posterior_(razor: Razor, data: TensorLoader, iterations: int = ITERATIONS) -> float:
    """Move the weights to the mode of the posterior at the present prior; return -log p(D, w)/N."""
    theta = list(weights(razor.model).values())
    optimiser = torch.optim.LBFGS(
        theta,
        max_iter=iterations,
        history_size=HISTORY,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    steps = razor.training_steps

    def loss() -> Tensor:
        optimiser.zero_grad()
        penalty = razor.penalty()
        penalty.backward()
        total = penalty.detach()
        for x, y in data:
            nll = razor.likelihood.nll(call(razor.model, x), y).sum() / razor.n_data
            nll.backward()
            total = total + nll.detach()
        return total

    with torch.enable_grad():
        value = optimiser.step(loss)
    optimiser.zero_grad()
    razor.training_steps = steps  # iterations here are no training steps
    return float(value)
