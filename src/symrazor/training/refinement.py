r"""Refine a trained network: take its weights to the mode, between evidence steps with "auto".

Laplace's approximation holds at a mode of the posterior. Training by mini-batches ends near one for
the last precisions, and often tens of nats below. A round of refinement minimises

$$ - \log p(D \mid \theta) - \log p(\theta) $$

over all data by L-BFGS and then takes one evidence step with `structure="auto"`, the exact
curvature where it is affordable. The state with the highest evidence is kept.
"""

from dataclasses import replace

import torch
from torch import Tensor

from symrazor.core.errors import CurvatureError, DivergenceError
from symrazor.core.parameters import eval_mode, weights
from symrazor.curvature.method import AUTO
from symrazor.data import TensorLoader
from symrazor.data.batches import call
from symrazor.inference.razor import Razor

ITERATIONS = 60
"""Iterations of L-BFGS in one round."""
HISTORY = 20
"""Pairs of steps and gradients that L-BFGS keeps."""
MIN_CHANGE = 0.1
"""Change of the log evidence, in nats, from which another round follows."""


def refine_(razor: Razor, data: TensorLoader, rounds: int) -> None:
    """Move weights and prior to a mode with a higher evidence, in at most this many rounds.

    Args:
        razor: the Razor of a trained model. Its best state is that of the refinement afterwards.
        data: all training data, in batches.
        rounds: number of rounds.
    """
    method, updated = razor.method, razor.is_updated
    razor.method, razor.is_updated = replace(method, structure=AUTO), True
    razor.best = razor.best_state = None
    try:
        with eval_mode(razor.model):
            value = float(razor.step(data).log_evidence)
            for _ in range(rounds):
                maximise_posterior_(razor, data)
                previous, value = value, float(razor.step(data).log_evidence)
                if abs(value - previous) < MIN_CHANGE:
                    break
    except (CurvatureError, DivergenceError):
        if razor.best is None:
            raise
    finally:
        razor.method, razor.is_updated = method, updated
    if razor.best is not None:  # otherwise the burn-in keeps the prior
        razor.restore_best()


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
