r"""Estimate the range of uniform poses on a circle from predicted angles.

A network that predicts the angle e by which an input was turned sees only the sum of e and the pose
of the input. The difference of the predicted and the true angle is therefore the pose of the input,
relative to the usual pose of its class, plus the error of the network. Over the inputs of which the
network is certain, these differences have the density

$$ (1 - \epsilon)\, (U_{[-v, v]} * N_{\sigma}) + \epsilon / 2\pi , $$

where v is the range, $\sigma$ the error of the network and the natural variation of the inputs, and
$\epsilon$ a share of misunderstood inputs. `fit_window` returns the posterior of v. Unlike the
cross-entropy of the predictions, it does not count the error of the network as a part of the range.
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
OUTLIER_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
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


def fit_window(angles: Float[Tensor, " n"]) -> Window:
    """Return the posterior of the range from the differences of predicted and true angles."""
    cells = ((angles / (2 * math.pi) + 0.5) * CELLS).long().clamp(0, CELLS - 1)
    counts = cells.bincount(minlength=CELLS).double()
    center = 2 * math.pi * ((torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS - 0.5)
    width = math.pi * (torch.arange(WIDTHS, dtype=torch.float64) + 0.5) / WIDTHS
    error = torch.tensor(ERROR_DEGREES, dtype=torch.float64).deg2rad()
    outliers = torch.tensor(OUTLIER_SHARES, dtype=torch.float64).view(-1, 1, 1, 1)
    v, sigma = width.view(-1, 1, 1), error.view(-1, 1)
    wrapped = [center + 2 * math.pi * turn for turn in (-1, 0, 1)]
    density = sum(
        torch.special.ndtr((at + v) / sigma) - torch.special.ndtr((at - v) / sigma)
        for at in wrapped
    ) / (2 * v)  # fmt: skip
    mixed = (1 - outliers) * density + outliers / (2 * math.pi)
    log_likelihood = TEMPER * (mixed.clamp(min=1e-12).log() @ counts)
    error_prior = (-error.rad2deg() / TYPICAL_ERROR).log_softmax(0)
    partial = (log_likelihood + error_prior).permute(1, 0, 2).flatten(1).logsumexp(1)
    partial = partial - math.log(len(outliers) * WIDTHS)
    whole = torch.tensor([-TEMPER * float(counts.sum()) * math.log(2 * math.pi)])
    prior = torch.tensor([1 - WHOLE_PRIOR] * WIDTHS + [WHOLE_PRIOR]).log()
    posterior = (torch.cat([partial, whole.double()]) + prior).softmax(0).cumsum(0)
    values = torch.cat([width, torch.tensor([math.pi], dtype=torch.float64)])
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    low, middle, high = values[torch.searchsorted(posterior, levels).clamp(max=WIDTHS)].tolist()
    return Window(middle, low, high)
