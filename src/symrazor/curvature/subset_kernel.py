r"""Estimate the log-determinant of all data from a subset, between two bounds.

By the bounds (3) and (5) of `kernel`, the log-determinant lies, in expectation, between
$L = \log|I + (N/n) \Delta^{-1} H_n|$ and $U = (N/n) \log|I + \Delta^{-1} H_n|$, of the same subset,
for which $L \le U$ always holds (Bernoulli's inequality for every eigenvalue). `SubsetKernel` uses
$\sqrt{L U}$, which is not a bound. It is exact for n = N. Up to the deviations of L and U from
their expectations, its relative error is at most $\sqrt{U/L} - 1$, which falls to 0 as n grows.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.linalg.blocks import Block, LogPrecisions
from symrazor.linalg.eigen_jobs import Spectrum


@dataclass
class SubsetKernel(Block):
    r"""The log-determinant of all data from a subset: the geometric mean of two bounds.

    Args:
        scaled: the matrix of the subset, scaled to all data.
        repeats: size of the data set over that of the subset.
    """

    scaled: Block
    repeats: float

    def __post_init__(self) -> None:
        self.names = self.scaled.names

    def bounds(self, log_precision: LogPrecisions) -> tuple[Tensor, Tensor]:
        """Return L and U, see above."""
        unscaled = {name: log_precision[name] + math.log(self.repeats) for name in self.names}
        return self.scaled.logdet(log_precision), self.repeats * self.scaled.logdet(unscaled)

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        """Return the geometric mean of both bounds; their mean where they are almost zero."""
        lower, upper = self.bounds(log_precision)
        if float(lower.detach()) <= torch.finfo(torch.float64).eps:
            return (lower + upper) / 2
        return (lower * upper).sqrt()

    @property
    def spectrum(self) -> Float[Tensor, " m"]:
        """Eigenvalues of the scaled matrix; zeros may be missing."""
        return self.scaled.spectrum

    def prepare(self) -> list[Spectrum]:
        """Return no jobs: there are no eigenvalues."""
        return []

    def draw(
        self, log_precision: LogPrecisions, noise: Float[Tensor, "s p"]
    ) -> Float[Tensor, "s p"]:
        """Draw from the posterior of the scaled matrix."""
        return self.scaled.draw(log_precision, noise)

    def covariance(
        self, log_precision: LogPrecisions, jacobian: Float[Tensor, "n c p"]
    ) -> Float[Tensor, "n c c"]:
        """Return the covariance of the posterior of the scaled matrix."""
        return self.scaled.covariance(log_precision, jacobian)
