r"""Conserved quantities from trajectories alone: a generalised eigenproblem with a noise test.

Let $\phi_1, \dots, \phi_m$ be functions of the state (`symrazor.dynamics.libraries`). The
covariance $W$ of $\phi$ within trajectories, around each trajectory's mean, and the covariance $V$
over all states both contain measurement noise of covariance

$$ N = E\, D \Sigma D^\top, \qquad D = \partial\phi/\partial x, $$

where $\Sigma$ is the noise of the states (`noise_estimate`). Without noise, a combination
$C = c^\top\phi$ varies within trajectories by the fraction

$$ \lambda = \frac{c^\top (W - N)\, c}{c^\top (V - N)\, c} $$

of its variance. Stationary points of this ratio are generalised eigenvectors, and conserved
quantities have $\lambda = 0$. Terms of second order in $\Sigma$ correct $\phi$ and $N$.

**The test.** Trajectories are divided into folds. Directions are estimated without a fold, and
$c^\top W c / c^\top N c$ is measured on it. For a conserved direction the ratio is 1 up to sampling
error and follows an F distribution. (Coefficients that are estimated from M degrees of freedom
raise the ratio by $m / M$, which is taken into account.) Directions are tested in the order of
$\lambda$, up to the first that fails:

- refuted, if the p-value is below `REFUTED`;
- conserved, if an upper confidence limit of $\lambda$ is below `MAX_VARIATION`;
- undecided otherwise: the data are too few or too noisy.

Libraries are tried from simple to rich. A quantity counts as new only if its gradient is not a
combination of the gradients of earlier ones: $P^2$ is not new once $P$ is known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import comb

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.libraries import Library, libraries_for
from symrazor.dynamics.trajectories import Trajectories

REFUTED = 1e-4
"""Quantities with a smaller p-value are not conserved."""
CONFIDENCE_DEVIATIONS = 3.0
"""Standard deviations of the upper confidence limit of the variation along trajectories."""
MAX_VARIATION = 0.005
"""Largest fraction of the variance of a conserved quantity within trajectories (confidence limit)."""
MIN_SIGNAL = 1.0
"""Smallest variance of a function relative to the noise in it; others are not considered."""
FOLDS = 4
MIN_TRAJECTORIES = 8
STATES_PER_FUNCTION = 4
"""Degrees of freedom per function that a library needs, at least."""
MAX_STATES = 4000
"""States that are used, at most."""
MAX_ORDER = 10
"""Highest order of the differences that estimate the noise."""
RELATIVE_NOISE_FLOOR = 1e-5
"""Smallest standard deviation of the noise, relative to that of a coordinate: rounding, and errors
of the integrator that made the data."""
MAX_DEPENDENCE = 0.03
"""Quantities are functions of others if less than this fraction of their squared gradient is new."""
RANK_TOLERANCE = 1e-9
"""Relative variance below which a combination of functions is an identity."""


# ------------------------------------------------------------------------------------------- noise


@dataclass(frozen=True)
class NoiseEstimate:
    """Noise of the states.

    Args:
        variance: [d], of each coordinate.
        freedom: degrees of freedom of the estimate.
        converged: [d], whether differences of higher order agree; otherwise the motion is too fast
            for the time step, and the variance is an upper bound.
    """

    variance: Float[Tensor, "d"]
    freedom: float
    converged: Tensor


def noise_estimate(data: Trajectories) -> NoiseEstimate:
    r"""Estimate the noise of each coordinate from differences along trajectories.

    The k-th divided difference $\sum_i w_i x_i$, $w_i \propto \prod_{j \ne i} 1/(t_i - t_j)$ with
    $\sum_i w_i^2 = 1$, of independent noise has the variance $\sigma^2$. The motion adds to it, the
    less the higher k. The lowest order within the sampling error of the smallest value is used.
    """
    states, clock = _without_gaps(data)
    orders = range(1, min(MAX_ORDER, states.shape[1] - 1) + 1)
    values, errors, freedom = [], [], []
    for k in orders:
        windows, times = states.unfold(1, k + 1, 1), clock.unfold(1, k + 1, 1)
        weights = divided_difference_weights(times)[..., None, :]
        differences = (weights * windows).sum(-1).flatten(0, 1)
        differences = differences[differences.isfinite().all(-1)]
        if len(differences) < 2:
            break
        # Variance of an average of overlapping squared differences, for equal time steps.
        df = max(1.0, len(differences) * comb(2 * k, k) ** 2 / comb(4 * k, 2 * k))
        values.append(differences.square().mean(0))
        errors.append(math.sqrt(2 / df))
        freedom.append(df)
    if not values:
        d = states.shape[-1]
        return NoiseEstimate(
            states.new_full((d,), torch.inf), 1.0, torch.zeros(d, dtype=torch.bool)
        )
    table, error = torch.stack(values), states.new_tensor(errors)[:, None]
    best = table.amin(0)
    agrees = table <= best * (1 + 2 * error)
    chosen = agrees.to(torch.int).argmax(0)  # the lowest order that agrees with the smallest value
    variance = table.gather(0, chosen[None])[0]
    converged = chosen < len(values) - 1
    return NoiseEstimate(variance, min(freedom[int(k)] for k in chosen), converged)


def _without_gaps(data: Trajectories) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t"]]:
    """Return states and times with the observed ones first and NaN after them."""
    order = (~data.observed).to(torch.int8).argsort(dim=1, stable=True)
    observed = data.observed.gather(1, order)
    states = data.states.gather(1, order[..., None].expand_as(data.states))
    states = torch.where(observed[..., None], states, torch.nan)
    return states, torch.where(observed, data.times.gather(1, order), torch.nan)


def divided_difference_weights(times: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    """Return the weights of the divided difference over these times, with unit norm."""
    gaps = times[..., :, None] - times[..., None, :]
    gaps = gaps / gaps.abs().amax((-2, -1), keepdim=True)
    gaps = gaps + torch.eye(times.shape[-1], dtype=times.dtype)  # skip the factor j = i
    return torch.nn.functional.normalize(1 / gaps.prod(-1), dim=-1)


# ---------------------------------------------------------------------------------------- moments


@dataclass(frozen=True)
class Sample:
    """Observed states with their trajectory and fold, and the noise of each coordinate."""

    x: Float[Tensor, "n d"]
    trajectory: Tensor
    fold: Tensor
    deviation: Float[Tensor, "d"]
    noise: NoiseEstimate

    @property
    def freedom(self) -> int:
        """Number of states less the number of trajectories."""
        return len(self.x) - int(self.trajectory.max()) - 1


@dataclass
class Moments:
    """Sums over the states of one fold, for standardised functions."""

    within: Tensor
    noise_within: Tensor
    total: Tensor
    noise_total: Tensor
    sum: Tensor
    n: float
    freedom: float

    def __add__(self, other: "Moments") -> "Moments":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moments(*(a + b for a, b in pairs))

    @property
    def covariances(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W, N within trajectories, V and N over all states."""
        mean = self.sum / self.n
        V = self.total / self.n - torch.outer(mean, mean)
        within = (self.within / self.freedom, self.noise_within / self.freedom)
        return *within, V, self.noise_total / self.n


class Features:
    """Values of the functions of a library at the states of a sample, with their noise.

    Functions are standardised; `kept` are those that are not constant.
    """

    def __init__(self, library: Library, sample: Sample) -> None:
        self.library, self.sample = library, sample
        values = library(sample.x)
        finite = values.isfinite().all(0)
        spread = values.std(0)
        kept = finite & (spread > 1e-13 * values.abs().amax(0).clamp_min(1e-300))
        self.kept = kept.nonzero()[:, 0]
        self.scale = spread[self.kept]
        slopes = self._slopes(sample.x)
        second = []
        h = 0.5
        for i, sigma in enumerate(sample.deviation):
            step = torch.zeros_like(sample.x)
            step[:, i] = h * sigma
            change = self._slopes(sample.x + step) - self._slopes(sample.x - step)
            second.append(change / (2 * h))
        curvature = torch.stack(second, -1)  # sigma_i sigma_j d_i d_j phi, [n, m, d, d]
        values = values[:, self.kept] / self.scale
        self.values = values - 0.5 * curvature.diagonal(dim1=-2, dim2=-1).sum(-1)
        self.values = self.values - self.values.mean(0)
        self.slopes, self.curvature = slopes, curvature

    def _slopes(self, x: Tensor) -> Tensor:
        """Return gradients times the noise of each coordinate."""
        slopes = self.library.gradients(x)[:, self.kept]
        return slopes * self.sample.deviation / self.scale[:, None]

    def moments(self, fold: int) -> Moments:
        """Return the sums over one fold."""
        sample = self.sample
        use = (sample.fold == fold).nonzero()[:, 0]
        phi, trajectory = self.values[use], sample.trajectory[use]
        _, index, counts = trajectory.unique(return_inverse=True, return_counts=True)
        means = phi.new_zeros(len(counts), phi.shape[1]).index_add_(0, index, phi)
        centred = phi - (means / counts[:, None])[index]
        share = 1 - 1 / counts[index].to(phi)
        noise, noise_within = (self._noise(use, weight) for weight in (torch.ones_like(share), share))
        return Moments(
            centred.mT @ centred,
            noise_within,
            phi.mT @ phi,
            noise,
            phi.sum(0),
            float(len(use)),
            float(len(use) - len(counts)),
        )

    def _noise(self, use: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted sum over states of the noise covariance of the functions."""
        root = weight.sqrt()[:, None, None]
        first = (self.slopes[use] * root).transpose(1, 2).flatten(0, 1)
        second = (self.curvature[use].flatten(2) * root).transpose(1, 2).flatten(0, 1)
        return first.mT @ first - 0.5 * second.mT @ second

    def state_noise(self, c: Float[Tensor, "m"], use: Tensor) -> Float[Tensor, "n"]:
        """Return the noise variance of one combination at each state."""
        first = torch.einsum("nmd,m->nd", self.slopes[use], c).square().sum(-1)
        second = torch.einsum("nmde,m->nde", self.curvature[use], c).square().sum((-2, -1))
        return (first - 0.5 * second).clamp_min(0.1 * first)


def directions(moments: Moments) -> tuple[Tensor, Tensor]:
    r"""Return the generalised eigenvalues $\lambda$, ascending, and eigenvectors as rows.

    Directions without signal are removed. Rows have unit variance without noise.
    """
    W, N, V, NV = moments.covariances
    values, vectors = torch.linalg.eigh(V)
    basis = vectors[:, values > RANK_TOLERANCE * values[-1]]
    basis = basis / (basis * (V @ basis)).sum(0).sqrt()
    # Keep directions whose variance exceeds the noise in it.
    values, vectors = torch.linalg.eigh(basis.mT @ (V - NV) @ basis)
    basis = basis @ vectors
    kept = values * (1 + MIN_SIGNAL) > MIN_SIGNAL
    basis = basis[:, kept] / values[kept].sqrt()
    variation, combination = torch.linalg.eigh(basis.mT @ (W - N) @ basis)
    return variation, (basis @ combination).mT
