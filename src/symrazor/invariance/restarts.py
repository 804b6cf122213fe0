"""Where widths start, when a given start may be near a poor optimum.

All rotations at once are a symmetric point: near a width of 180 degrees the bound is flat, or has
an optimum of its own, and a gradient does not leave it. And filters that have begun to learn the
data by heart have no use for a wide average any more. A few short trainings of the posterior alone,
at shares of the start, tell where to begin.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.invariance.batched_training import Data, Member, Schedule, evaluate, train
from symrazor.invariance.invariant_weights import InvariantWeights

LEAST = 100
"""Steps of a trial in which a posterior settles."""

SUBSET = 5000
"""Data on which the fit of a candidate is measured."""


Share = float | Sequence[float]
"""A factor of all starting widths, or one for each generator."""


@torch.no_grad()
def choose_starts(
    model: InvariantWeights,
    data: Data,
    members: Sequence[Member],
    schedule: Schedule,
    shares: Sequence[Share] = (1.0, 0.5, 0.25),
    steps: int | None = None,
) -> Float[Tensor, "shares models"]:
    """Begin each model that learns its widths at the share of its start with the best bound.

    The posterior of the best trial is kept as well: a width that moves while the posterior is still
    as wide as the prior moves away from where it should.

    Args:
        model: with a leading dimension.
        data: training data.
        members: what each model is.
        schedule: of the training that follows.
        shares: of the starting widths, each tried once; all of them below the cap. A share is a
            number, or one for each generator: ``(1.0, (0.2, 0.2, 30.0))`` asks whether to begin
            with a little of everything or with much of the third alone. Shares that differ only
            where a model has a mask are one trial.
        steps: of each trial; by default the schedule's share `hold` of its steps, at least 100
            (or all of them): posteriors that have not settled favour wide averages, which settle
            first.

    Returns:
        The bounds per datum that were compared; nan for models that keep their widths, and where
        a share was no new trial.

    Raises:
        ValueError: no shares, or a share that leads to a width at the cap.
    """
    start = model.distribution.width.value.detach().clone()
    factors = _factors(shares, start)
    least = min(LEAST, schedule.steps)
    count = max(least, round(schedule.hold * schedule.steps)) if steps is None else steps
    rates = (schedule.rates[0], schedule.rates[0] / 3)
    trial = replace(schedule, steps=count, hold=1.0, rates=rates, note_every=count)
    bounds = start.new_full((len(shares), len(members)), torch.nan, dtype=torch.float64)
    best: dict[int, InvariantWeights] = {}
    widths = factors[:, None] * start
    seen = (widths * model.distribution.mask).tolist()
    for row in range(len(shares)):
        earlier = seen[:row]
        fresh = [
            place
            for place, member in enumerate(members)
            if member.learn and all(other[place] != seen[row][place] for other in earlier)
        ]
        if not fresh:
            continue
        part = model.select(fresh)
        part.distribution.width.value = widths[row, fresh]
        bounds[row, fresh] = _tried(part, data, [members[i] for i in fresh], trial)
        ahead = bounds.nan_to_num(-torch.inf).argmax(0).tolist()
        best |= {own: part.select([i]) for i, own in enumerate(fresh) if ahead[own] == row}
    for own, part in best.items():
        model.replace([own], part)
    return bounds


def _factors(shares: Sequence[Share], start: Tensor) -> Float[Tensor, "shares k"]:
    """Shares as one row of factors each."""
    count = start.shape[-1]
    rows = [[share] * count if isinstance(share, float | int) else list(share) for share in shares]
    if any(len(row) != count for row in rows):
        raise ValueError(
            f"expected shares of one number or of {count}, one for each generator, got "
            f"{list(shares)}"
        )
    if not rows or min(min(row) for row in rows) <= 0:
        raise ValueError(f"expected positive shares of the starting widths, got {list(shares)}")
    return torch.tensor(rows).to(start)


def _tried(
    model: InvariantWeights, data: Data, members: Sequence[Member], trial: Schedule
) -> Tensor:
    """Bounds per datum after a training of the posterior alone; with "ml" the fit alone."""
    with torch.enable_grad():
        train(model, data, members, trial)
    part = Data(data.x[:, :SUBSET], data.y[:, :SUBSET])
    found, _ = evaluate(model, part, members)
    paid = torch.tensor([m.method != "ml" for m in members], device=data.y.device)
    return found.log_likelihood / found.n_data - paid * found.complexity / data.size
