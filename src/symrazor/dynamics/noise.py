"""Measurement noise of trajectories, estimated from differences along time."""

import math
from dataclasses import dataclass
from math import comb

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.dynamics.trajectories import Trajectories, divided_difference_weights

MAX_ORDER = 10
"""Highest order of the differences."""
AGREEMENT_ERRORS = 2.0
"""Estimates agree with the smallest one within this many of its standard errors."""

RELATIVE_NOISE_FLOOR = 1e-5
"""Smallest standard deviation of the noise, relative to the spread of a coordinate: rounding, and
errors of the integrator that made the data."""
CHI_SQUARED_MEDIAN, MEDIAN_EFFICIENCY = 0.4549, 0.37
"""Median of a squared standard normal variable, and efficiency of an estimate from it."""


@dataclass(frozen=True)
class NoiseEstimate:
    """Noise of the states.

    Args:
        variance: of each coordinate; infinite if no two states follow each other.
        freedom: degrees of freedom of the estimate.
        converged: whether differences of a higher order agree. Otherwise the motion is too fast for
            the time step, and the variance is only an upper bound.
    """

    variance: Float[Tensor, "d"]
    freedom: float
    converged: Bool[Tensor, "d"]

    def deviation(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "d"]:
        """Return the standard deviation, at least that of rounding, for states x."""
        return self.variance.sqrt().maximum(RELATIVE_NOISE_FLOOR * x.std(0))


def noise_estimate(data: Trajectories) -> NoiseEstimate:
    r"""Estimate the noise of each coordinate from differences along trajectories.

    The k-th divided difference $\sum_i w_i x_i$, $w_i \propto \prod_{j \ne i} 1/(t_i - t_j)$ with
    $\sum_i w_i^2 = 1$, of independent noise has the variance $\sigma^2$. The motion adds to it, the
    less the higher k. The lowest order that agrees with the smallest estimate is used. Where large
    differences are more frequent than in normal noise, the median replaces the mean.
    """
    states, clock = without_gaps(data)
    values, errors = [], []
    for k in range(1, min(MAX_ORDER, states.shape[1] - 1) + 1):
        windows, times = states.unfold(1, k + 1, 1), clock.unfold(1, k + 1, 1)
        weights = divided_difference_weights(times)[..., None, :]
        differences = (weights * windows).sum(-1).flatten(0, 1)
        differences = differences[differences.isfinite().all(-1)]
        if not len(differences):
            break
        # Overlapping differences are correlated; this is exact for equal time steps.
        effective = max(1.0, len(differences) * comb(2 * k, k) ** 2 / comb(4 * k, 2 * k))
        squares = differences.square()
        # The motion is often fast in a few places only, such as near the Sun: use the median there.
        robust = squares.median(0).values / CHI_SQUARED_MEDIAN
        mean, error = squares.mean(0), math.sqrt(2 / effective)
        fast = mean > robust * (1 + 3 * error / MEDIAN_EFFICIENCY**0.5)
        values.append(torch.where(fast, robust, mean))
        errors.append(torch.where(fast, error / MEDIAN_EFFICIENCY**0.5, error))
    d = states.shape[-1]
    if not values:
        unknown = states.new_full((d,), torch.inf)
        return NoiseEstimate(unknown, 1.0, torch.zeros(d, dtype=torch.bool))
    table, table_errors = torch.stack(values), torch.stack(errors)
    agrees = table <= table.amin(0) * (1 + AGREEMENT_ERRORS * table_errors)
    chosen = agrees.to(torch.int).argmax(0)
    variance = table.gather(0, chosen[None])[0]
    freedom = float(2 / table_errors.gather(0, chosen[None]).square().max())
    return NoiseEstimate(variance, freedom, chosen < len(values) - 1)


def without_gaps(data: Trajectories) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t"]]:
    """Return states and times with the observed ones first and NaN after them, on the CPU."""
    data = data.map(lambda part: part.cpu())
    order = (~data.observed).to(torch.int8).argsort(dim=1, stable=True)
    observed = data.observed.gather(1, order)
    states = data.states.gather(1, order[..., None].expand_as(data.states))
    states = torch.where(observed[..., None], states, torch.nan)
    return states, torch.where(observed, data.times.gather(1, order), torch.nan)
