r"""Estimate the range of uniform poses from predicted amounts.

A network that predicts the angle e by which an input was turned sees only the sum of e and the pose
of the input. The difference of the predicted and the true angle is therefore the pose of the input,
relative to the usual pose of its class, plus the error of the network. Over the inputs of which the
network is certain, these differences have the density

$$ (1 - \epsilon)\, (U_{[-v, v]} * N_{\sigma}) + \epsilon / 2\pi , $$

where v is the range, $\sigma$ the error of the network and the natural variation of the inputs, and
$\epsilon$ a share of misunderstood inputs. `fit_window` returns the posterior of v. Unlike the
cross-entropy of the predictions, it does not count the error of the network as a part of the range.

On a line, amounts are limited to $[-a, a]$, and predictions near the ends are drawn to the middle.
But if a movement takes an input exactly to the usual pose, the predicted mean is 0 for every range.
The pose is therefore minus the amount at which the predicted mean changes its sign (`positions`).
For a range v > 1 (in units of a), the mean is 0 wherever the sum of amount and pose is less than
v - 1: nothing is known there. An input whose mean does not change its sign counts as beyond the
ends. With means below $\mu$ = `MIN_MEAN` taken for 0, the sign changes for poses up to
$\min(1 - \mu,\; 2 - 2\mu - v)$, so that ranges can be read up to $2 - 2\mu$. If the
network cannot see the amount of an input, the mean does not change its sign either. Such inputs
are counted at the ends, whatever the range.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

WINDOW_SHARE = 0.2
"""Share of the inputs, those with the least predicted entropy, whose angles are used."""
CELLS, WIDTHS = 180, 90
"""Cells of the histogram of differences, and tested ranges, on the circle."""
ERROR_DEGREES, TYPICAL_ERROR = (2, 4, 6, 8, 11, 15, 20, 28, 36, 45), 8
"""Tested errors in degrees, and the mean of their exponential prior."""
LINE_CELLS, MIN_MEAN = 18, 0.1
"""Cells of the histogram on a line, and smallest mean with a sign, in largest amounts."""
LINE_ERRORS, TYPICAL_LINE_ERROR = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.45), 0.12
FAR = 100.0
GOLDEN_RATIO = 0.5 * (math.sqrt(5) - 1)
OUTLIER_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
ENDS_PRIOR = 0.2
"""Prior probability that misunderstood inputs on a line are at its ends; else they are uniform."""
WHOLE_PRIOR = 0.5
"""Prior probability of the whole circle; the other ranges are equally probable."""
TEMPER = 0.5
"""Power of the likelihood: inputs share errors of the network, and poses need not be uniform."""
LEVELS = (0.025, 0.5, 0.975)


@dataclass(frozen=True)
class Window:
    """Posterior of the range of poses, in radians to either side: median and 95 % interval."""

    range: float
    low: float
    high: float


def predicted_angles(log_p: Float[Tensor, "n bins"]) -> Float[Tensor, " n"]:
    """Return the mean direction of densities over the bins of a circle, of which 0 is the first."""
    bins = log_p.shape[1]
    angle = 2 * math.pi * torch.arange(bins, dtype=torch.float64) / bins
    p = log_p.double().exp()
    return torch.atan2(p @ angle.sin(), p @ angle.cos())


def positions(log_p: Float[Tensor, "n draws bins"]) -> Float[Tensor, " n"]:
    """Return poses in [-1, 1] from predictions for amounts that fill the line evenly.

    They are multiples of 2 / draws, spread evenly over that distance; at the ends, poses are 1 or
    -1 or beyond.
    """
    n, draws, bins = log_p.shape
    amount = 2 * (torch.arange(bins, dtype=torch.float64) + 0.5) / bins - 1
    mean = log_p.double().exp() @ amount
    above, below = ((sign * mean > MIN_MEAN).double().mean(1) for sign in (1, -1))
    spread = (GOLDEN_RATIO * torch.arange(n, dtype=torch.float64)).frac() - 0.5
    pose = above - below + 2 / draws * spread
    pose = torch.where(above == 0, -1.0, pose)
    return torch.where(below == 0, 1.0, pose).clamp(-1, 1)


def fit_window(angles: Float[Tensor, " n"]) -> Window:
    """Return the posterior of the range from the differences of predicted and true angles."""
    cells = ((angles / (2 * math.pi) + 0.5) * CELLS).long().clamp(0, CELLS - 1)
    edges = 2 * math.pi * (torch.arange(CELLS + 1, dtype=torch.float64) / CELLS - 0.5)
    width = math.pi * (torch.arange(WIDTHS, dtype=torch.float64) + 0.5) / WIDTHS
    error = torch.tensor(ERROR_DEGREES, dtype=torch.float64).deg2rad()
    density = sum(
        _cell_probabilities(edges + 2 * math.pi * turn, width, error) for turn in (-1, 0, 1)
    )
    assert isinstance(density, Tensor)
    error_prior = (-error.rad2deg() / TYPICAL_ERROR).log_softmax(0)
    counts = cells.bincount(minlength=CELLS)
    return _posterior(counts, density, width, error_prior, math.pi, ends_prior=0.0)


def fit_line(positions: Float[Tensor, " n"]) -> Window:
    """Return the posterior of a range on a line, in units of the largest amount.

    Args:
        positions: poses with errors, cut to [-1, 1].
    """
    cells = ((positions + 1) / 2 * LINE_CELLS).long().clamp(0, LINE_CELLS - 1)
    edges = 2 * torch.arange(LINE_CELLS + 1, dtype=torch.float64) / LINE_CELLS - 1
    edges[0], edges[-1] = -FAR, FAR
    steps = (torch.arange(WIDTHS, dtype=torch.float64) + 0.5) / WIDTHS
    width = torch.cat([steps, 1 + (1 - 2 * MIN_MEAN) * steps])
    error = torch.tensor(LINE_ERRORS, dtype=torch.float64)
    visible = torch.minimum(width, 2 - 2 * MIN_MEAN - width).clamp(max=1 - MIN_MEAN)
    share = (visible / width).view(-1, 1, 1)
    density = share * _cell_probabilities(edges, visible, error)
    density[:, :, [0, -1]] += (1 - share) / 2
    prior = (-error / TYPICAL_LINE_ERROR).log_softmax(0)
    return _posterior(cells.bincount(minlength=LINE_CELLS), density, width, prior, None, ENDS_PRIOR)


def _cell_probabilities(edges: Tensor, width: Tensor, error: Tensor) -> Tensor:
    """Return probabilities of cells, [widths, errors, cells], of a uniform plus a normal number."""
    v, sigma = width.view(-1, 1, 1), error.view(-1, 1)

    def integrated(z: Tensor) -> Tensor:
        """Return the antiderivative of the normal distribution function."""
        value: Tensor = z * torch.special.ndtr(z) + (-0.5 * z * z).exp() / math.sqrt(2 * math.pi)
        return value

    below = integrated((edges + v) / sigma) - integrated((edges - v) / sigma)
    probabilities: Tensor = (below * sigma / (2 * v)).diff(dim=2)
    return probabilities


def _posterior(
    counts: Tensor,
    density: Tensor,
    width: Tensor,
    error_prior: Tensor,
    full_circle: float | None,
    ends_prior: float,
) -> Window:
    """Return quantiles of the range; `full_circle` is the range of evenly distributed poses."""
    n, cells = counts.double(), counts.shape[0]
    anywhere, ends = n.new_full((cells,), 1 / cells), n.new_zeros(cells)
    ends[[0, -1]] = 0.5
    share = torch.tensor(OUTLIER_SHARES, dtype=torch.float64).view(-1, 1, 1, 1)
    priors = [(anywhere, 1 - ends_prior), (ends, ends_prior)]
    likelihoods = [
        TEMPER * (((1 - share) * density + share * place).clamp(min=1e-12).log() @ n)
        + math.log(prior)
        for place, prior in priors
        if prior
    ]
    log_likelihood = torch.cat(likelihoods)
    by_width = (log_likelihood + error_prior).permute(1, 0, 2).flatten(1).logsumexp(1)
    posterior, values = by_width - math.log(len(share) * len(width)), width
    if full_circle is not None:
        even = -TEMPER * n.sum() * math.log(cells) + math.log(WHOLE_PRIOR / (1 - WHOLE_PRIOR))
        posterior = torch.cat([posterior, even.view(1)])
        values = torch.cat([width, width.new_tensor([full_circle])])
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    places = torch.searchsorted(posterior.softmax(0).cumsum(0), levels)
    low, middle, high = values[places.clamp(max=len(values) - 1)].tolist()
    return Window(middle, low, high)
