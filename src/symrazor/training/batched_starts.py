"""Choose the starting widths of many `InvariantWeights` models by short trainings."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.invariance.invariant_weights import InvariantWeights
from symrazor.training.batched_training import BatchedConfig, Data, Member, evaluate, train

MIN_TRIAL_STEPS = 100
"""Steps in which the posterior of a starting point settles."""
TRIAL_SUBSET = 5000
"""Data on which starting points are compared."""

Share = float | Sequence[float]
"""A factor of all starting widths, or one factor for each generator."""


@torch.no_grad()
def choose_starts(
    model: InvariantWeights,
    data: Data,
    members: Sequence[Member],
    config: BatchedConfig,
    shares: Sequence[Share] = (1.0, 0.5, 0.25),
    steps: int | None = None,
) -> Float[Tensor, "shares models"]:
    """Start each model that learns its widths from the candidate widths with the highest bound.

    The gradient cannot leave some starting points: near a rotation width of 180 degrees the bound
    is flat or has a local optimum. Filters that have started to memorise the data do not gain from
    wide averages either. Short trainings of the posterior alone, at fixed widths, compare the
    candidates. The model keeps the posterior of the best one, because widths that move while the
    posterior is as wide as the prior move in the wrong direction.

    Args:
        model: a model with a leading dimension.
        data: training data.
        members: the models.
        config: options of the training that follows.
        shares: candidates, as factors of the starting widths; all widths must stay below their
            cap. A candidate is one factor, or one per generator: ``(1.0, (0.2, 0.2, 30.0))``
            compares the given start with one that mainly opens the third generator. Candidates
            that differ only in generators that a model masks are trained once.
        steps: steps per candidate; by default the fraction `hold` of `config.steps`, but at least
            100 or all of them. Posteriors that have not settled favour wide averages, which
            settle first.

    Returns:
        The bounds per datum; nan for models with fixed widths and for repeated candidates.
    """
    start = model.distribution.width.value.detach().clone()
    widths = _factors(shares, start)[:, None] * start
    if steps is None:
        fewest = min(MIN_TRIAL_STEPS, config.steps)
        steps = max(fewest, round(config.hold * config.steps))
    rates = (config.rates[0], config.rates[0] / 3)
    trial = replace(config, steps=steps, hold=1.0, rates=rates, note_every=steps)
    bounds = start.new_full((len(shares), len(members)), torch.nan, dtype=torch.float64)
    best: dict[int, InvariantWeights] = {}
    effective = (widths * model.distribution.mask).tolist()
    for row in range(len(shares)):
        new = [
            place
            for place, member in enumerate(members)
            if member.learn and all(w[place] != effective[row][place] for w in effective[:row])
        ]
        if not new:
            continue
        part = model.select(new)
        part.distribution.width.value = widths[row, new]
        bounds[row, new] = _trial_bounds(part, data, [members[place] for place in new], trial)
        winners = bounds.nan_to_num(-torch.inf).argmax(0).tolist()
        best |= {place: part.select([i]) for i, place in enumerate(new) if winners[place] == row}
    for place, part in best.items():
        model.replace([place], part)
    return bounds


def _factors(shares: Sequence[Share], start: Tensor) -> Float[Tensor, "shares k"]:
    """Return one row of factors per candidate."""
    count = start.shape[-1]
    rows = [[share] * count if isinstance(share, float | int) else list(share) for share in shares]
    if any(len(row) != count for row in rows):
        raise ValueError(
            f"Each share must be one number or {count} numbers, one per generator, got "
            f"{list(shares)}."
        )
    if not rows or min(min(row) for row in rows) <= 0:
        raise ValueError(f"shares must be positive, and at least one, got {list(shares)}.")
    return torch.tensor(rows).to(start)


def _trial_bounds(
    model: InvariantWeights, data: Data, members: Sequence[Member], trial: BatchedConfig
) -> Float[Tensor, " models"]:
    """Train the posterior alone; return bounds per datum, or log likelihoods for method "ml"."""
    with torch.enable_grad():
        train(model, data, members, trial)
    subset = Data(data.x[:, :TRIAL_SUBSET], data.y[:, :TRIAL_SUBSET])
    bound, _ = evaluate(model, subset, members)
    has_prior = torch.tensor([m.method != "ml" for m in members], device=data.y.device)
    return bound.log_likelihood / bound.n_data - has_prior * bound.complexity / data.size
