"""Where widths start, when a given start may be near a poor optimum.

All rotations at once are a symmetric point: near a width of 180 degrees the bound is flat, or has
an optimum of its own, and a gradient does not leave it. A few short trainings of the posterior
alone, at shares of the start, tell which side of it to begin on.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.invariant.model import InvariantWeights
from symrazor.invariant.training import Data, Member, Schedule, evaluate, train

LEAST = 100
"""Steps of a trial in which a posterior settles."""

SUBSET = 5000
"""Data on which the fit of a candidate is measured."""


def choose_starts(
    model: InvariantWeights,
    data: Data,
    members: Sequence[Member],
    schedule: Schedule,
    shares: Sequence[float] = (1.0, 0.5, 0.25),
    steps: int | None = None,
) -> Float[Tensor, "shares models"]:
    """Set the widths of each model that learns them to the share of its start with the best bound.

    Args:
        model: with a leading dimension; its posterior is reset.
        data: training data.
        members: what each model is.
        schedule: of the training that follows.
        shares: of the starting widths, each tried once.
        steps: of each trial; by default the schedule's share `hold` of its steps, at least 100:
            posteriors that have not settled favour wide averages, which settle first.

    Returns:
        The bounds per datum that were compared.
    """
    start = model.distribution.width.value.detach().clone()
    scale = model.scale.value.detach().clone()
    count = max(LEAST, round(schedule.hold * schedule.steps)) if steps is None else steps
    rates = (schedule.rates[0], schedule.rates[0] / 3)
    trial = replace(schedule, steps=count, hold=1.0, rates=rates, note_every=count)
    part = Data(data.x[:, :SUBSET], data.y[:, :SUBSET])
    bounds = []
    for share in shares:
        model.distribution.width.value = start * share
        train(model, data, members, trial)
        found, _ = evaluate(model, part, members)
        fit = found.log_likelihood / found.n_data
        bounds.append(fit - found.complexity / data.size)
        reset(model, scale)
    compared = torch.stack(bounds)
    best = torch.tensor(shares).to(start)[compared.argmax(0)]
    learn = torch.tensor([m.learn for m in members], device=start.device)
    best = torch.where(learn, best, 1.0)
    model.distribution.width.value = start * best.unsqueeze(1)
    return compared


@torch.no_grad()
def reset(model: InvariantWeights, scale: Tensor) -> None:
    """Put the posterior back to the prior, and the outputs' scale to a value."""
    model.posterior.mean.zero_()
    model.posterior.root.log_diagonal.zero_()
    model.posterior.root.lower.zero_()
    model.scale.value = scale
