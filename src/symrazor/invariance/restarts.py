"""Choose where widths start, if the given start may be near a poor optimum.

All rotations together are a symmetric point: near a width of 180 degrees the bound is flat or has a
local optimum, which a gradient does not leave. And filters that have started to memorise the data
do not profit from a wide average. A few short trainings of the posterior alone, at fractions of the
start, show where to begin.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.invariance.batched_training import Data, Member, Schedule, evaluate, train
from symrazor.invariance.invariant_weights import InvariantWeights

MIN_TRIAL_STEPS = 100
"""Steps in which a posterior converges."""

MAX_FIT_DATA = 5000
"""Number of data on which the fit of a candidate is measured."""


Share = float | Sequence[float]
"""A factor of all starting widths, or one per generator."""


@torch.no_grad()
def choose_starts(
    model: InvariantWeights,
    data: Data,
    members: Sequence[Member],
    schedule: Schedule,
    shares: Sequence[Share] = (1.0, 0.5, 0.25),
    steps: int | None = None,
) -> Float[Tensor, "shares models"]:
    """Start each model that learns its widths at the share of its start with the best bound.

    The posterior of the best trial is kept as well: widths that move while the posterior is still
    as wide as the prior move in the wrong direction.

    Args:
        model: with a leading dimension.
        data: training data.
        members: description of each model.
        schedule: schedule of the training that follows.
        shares: factors of the starting widths, each tried once; all widths must stay below the cap.
            A share is a number, or one number per generator: ``(1.0, (0.2, 0.2, 30.0))`` compares a
            little of everything with much of the third generator. Shares that differ only where a
            model is masked are tried once.
        steps: steps of each trial; by default the schedule's fraction `hold` of its steps, at least
            100 (or all of them), because posteriors that have not converged favour wide averages,
            which converge first.

    Returns:
        The bounds per data point that were compared; nan for models with fixed widths and for
        shares that were not tried again.

    Raises:
        ValueError: if there are no shares, or a share leads to a width at the cap.
    """
    start = model.distribution.width.value.detach().clone()
    factors = _factors(shares, start)
    min_steps = min(MIN_TRIAL_STEPS, schedule.steps)
    trial_steps = max(min_steps, round(schedule.hold * schedule.steps)) if steps is None else steps
    rates = (schedule.rates[0], schedule.rates[0] / 3)
    trial = replace(schedule, steps=trial_steps, hold=1.0, rates=rates, note_every=trial_steps)
    bounds = start.new_full((len(shares), len(members)), torch.nan, dtype=torch.float64)
    best: dict[int, InvariantWeights] = {}
    widths = factors[:, None] * start
    tried = (widths * model.distribution.mask).tolist()
    for row in range(len(shares)):
        earlier = tried[:row]
        untried = [
            place
            for place, member in enumerate(members)
            if member.learn and all(other[place] != tried[row][place] for other in earlier)
        ]
        if not untried:
            continue
        part = model.select(untried)
        part.distribution.width.value = widths[row, untried]
        bounds[row, untried] = _trial_bounds(part, data, [members[i] for i in untried], trial)
        best_rows = bounds.nan_to_num(-torch.inf).argmax(0).tolist()
        best |= {
            index: part.select([i]) for i, index in enumerate(untried) if best_rows[index] == row
        }
    for index, part in best.items():
        model.replace([index], part)
    return bounds


def _factors(shares: Sequence[Share], start: Tensor) -> Float[Tensor, "shares k"]:
    """Return the shares as one row of factors each."""
    count = start.shape[-1]
    rows = [[share] * count if isinstance(share, float | int) else list(share) for share in shares]
    if any(len(row) != count for row in rows):
        raise ValueError(
            f"A share must be one number or {count} numbers, one for each generator, got "
            f"{list(shares)}."
        )
    if not rows or min(min(row) for row in rows) <= 0:
        raise ValueError(f"Shares of the starting widths must be positive, got {list(shares)}.")
    return torch.tensor(rows).to(start)


def _trial_bounds(
    model: InvariantWeights, data: Data, members: Sequence[Member], trial: Schedule
) -> Tensor:
    """Return bounds per data point after training the posterior alone; for "ml" only the fit."""
    with torch.enable_grad():
        train(model, data, members, trial)
    part = Data(data.x[:, :MAX_FIT_DATA], data.y[:, :MAX_FIT_DATA])
    evidence, _ = evaluate(model, part, members)
    pays_complexity = torch.tensor([m.method != "ml" for m in members], device=data.y.device)
    return (
        evidence.log_likelihood / evidence.n_data
        - pays_complexity * evidence.complexity / data.size
    )
