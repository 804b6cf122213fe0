"""The noise test of conserved quantities; see `invariants`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.eigenproblem import Directions, Features

RISE_SAFETY = 1.5
"""Factor on the expected rise of the statistics by estimated coefficients, which is approximate."""
LARGE_NOISE = 0.01
"""Noise, relative to the spread of a coordinate, from which curvature of functions counts."""


def run_test(
    features: Features, fits: Sequence[Directions], count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p-value, variation, its standard error and noise of the first directions.

    Each is tested on trajectories that it was not estimated from.
    """
    sample = features.sample
    vectors = torch.stack([fit.vectors[:, :count] for fit in fits])[sample.fold[sample.trajectory]]
    values = torch.einsum("nk,nkj->nj", features.values, vectors)
    noise = torch.einsum("nkd,nkj->njd", features.slopes, vectors).square().sum(-1)
    if float((sample.deviation / sample.x.std(0)).max()) > LARGE_NOISE:
        noise = _subtract_curvature(features, fits, count, noise)
    centred = sample.within(values)
    rise, slow_rise = _rise_by_estimation(features, fits, noise)
    whole = _ratio(
        centred.square(),
        noise * sample.share[:, None] + rise,
        sample.freedom / len(values),
        sample.noise_freedom,
    )
    components = sample.sum(torch.einsum("nk,nj->nkj", sample.slow, values)).square().flatten(0, 1)
    slow_noise = sample.sum(torch.einsum("nk,nj->nkj", sample.slow.square(), noise))
    slow = _ratio(components, (slow_noise + slow_rise).flatten(0, 1), 1.0, sample.noise_freedom)
    p = 2 * torch.minimum(whole.p, slow.p)
    total = values.var(0) - noise.mean(0)
    per_state = whole.expected / sample.freedom / total
    excess = (whole.ratio - 1) * per_state
    return p.clamp_max(1.0), excess, whole.error * per_state, noise.mean(0) / total


def _rise_by_estimation(
    features: Features, fits: Sequence[Directions], noise: Float[Tensor, "n j"]
) -> tuple[Float[Tensor, "n j"], Float[Tensor, "b k j"]]:
    """Return by how much errors of the coefficients raise squares and slow components.

    States far from the others, where small errors matter, have a large rise.
    """
    sample = features.sample
    fold = sample.fold[sample.trajectory]
    rise = torch.zeros_like(noise)
    slow_rise = noise.new_zeros(len(sample.fold), sample.slow.shape[1], noise.shape[1])
    within = sample.within(features.values)
    slow = sample.sum(torch.einsum("nk,nm->nkm", sample.slow, features.values))
    for f, fit in enumerate(fits):
        if not len(fit.errors):
            continue
        use, trajectories = (fold == f).nonzero()[:, 0], (sample.fold == f).nonzero()[:, 0]
        leverage = (within[use] @ fit.varying).square()
        weight = leverage.mT @ noise[use] / leverage.sum(0)[:, None]
        variance = RISE_SAFETY * fit.errors[:, None] * weight
        rise[use] = leverage @ variance
        slow_rise[trajectories] = (slow[trajectories] @ fit.varying).square() @ variance
    return rise, slow_rise


def _subtract_curvature(
    features: Features, fits: Sequence[Directions], count: int, noise: Tensor
) -> Tensor:
    """Correct the noise of combinations for its second order, see `Features.second_order`.

    Squared gradients at noisy states overestimate those at the true states.
    """
    fold = features.sample.fold[features.sample.trajectory]
    second = torch.zeros_like(noise)
    for f, fit in enumerate(fits):
        use = (fold == f).nonzero()[:, 0]
        second[use] = features.second_order(use, fit.vectors[:, :count])
    return (noise - 0.5 * second).maximum(0.2 * noise)


@dataclass
class _Ratio:
    """Sum of squares relative to its expectation, its standard error, and the p-value."""

    ratio: Tensor
    error: Tensor
    p: Tensor
    expected: Tensor


def _ratio(
    squares: Float[Tensor, "n j"],
    expected: Float[Tensor, "n j"],
    share: float,
    noise_freedom: float,
) -> _Ratio:
    """Compare squares with their expected values, if these vary over the data.

    The degrees of freedom are those of a sum of chi-squared variables with these expectations
    (Satterthwaite), `share` of them for lost means, reduced by the uncertainty of the noise.
    """
    total = expected.sum(0)
    freedom = share * total.square() / expected.square().sum(0)
    freedom = 1 / (1 / freedom + 1 / noise_freedom)
    ratio = squares.sum(0) / total
    p = torch.special.gammaincc(freedom / 2, freedom / 2 * ratio)
    return _Ratio(ratio, (2 / freedom).sqrt(), p, total)
