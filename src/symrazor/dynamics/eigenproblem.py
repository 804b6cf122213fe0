"""The eigenproblem whose first directions are conserved, and their noise test; see `invariants`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.library import Library
from symrazor.dynamics.samples import FOLDS, Sample

MIN_SIGNAL = 1.0
"""Smallest variance of a combination relative to the noise in it; others are not considered."""
RANK_TOLERANCE = 1e-9
"""Relative variance below which a combination of functions is an identity."""
STEP = 0.5
"""Step of the differences that give second derivatives, in standard deviations of the noise."""
RISE_SAFETY = 1.5
"""Factor on the expected rise of the statistics by estimated coefficients, which is approximate."""
MAX_CURVATURE = 0.1
"""Largest variance that noise causes through curvature of a function, relative to its slope."""
LARGE_NOISE = 0.01
"""Noise, relative to the spread of a coordinate, from which curvature of functions counts."""


class Features:
    """Standardised functions of a library at the states of a sample.

    `kept` are the functions that are finite and not constant; `values` [n, k] and `slopes`
    [n, k, d], gradients times the noise of each coordinate.
    """

    def __init__(self, library: Library, sample: Sample) -> None:
        self.library, self.sample = library, sample
        values = library(sample.x)
        spread = values.std(0)
        largest = values.abs().amax(0)
        self.kept = (values.isfinite().all(0) & (spread > 1e-13 * largest)).nonzero()[:, 0]
        self.scale = spread[self.kept]
        values = values[:, self.kept] / self.scale
        self.values = values - values.mean(0)
        self.slopes = self.scaled_slopes(sample.x)

    def scaled_slopes(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n k d"]:
        """Return gradients of the functions times the noise of each coordinate."""
        slopes = self.library.gradients(x)[:, self.kept]
        scaled: Tensor = slopes * self.sample.deviation / self.scale[:, None]
        return scaled

    def is_noise_linear(self) -> bool:
        """Return whether noise changes all functions nearly linearly, as the tests assume."""
        first, second = (torch.zeros(len(self.library)).double() for _ in range(2))
        for i, varying, library in self._parts:
            shift = torch.zeros_like(self.sample.deviation)
            shift[i] = self.sample.deviation[i]
            behind, here, ahead = (library(self.sample.x + k * shift) for k in (-1, 0, 1))
            first[varying] += (0.5 * (ahead - behind)).square().mean(0)
            second[varying] += 0.5 * (ahead + behind - 2 * here).square().mean(0)
        return bool((second <= MAX_CURVATURE * first)[self.kept].all())

    def second_order(
        self, x: Float[Tensor, "n d"], c: Float[Tensor, "k j"]
    ) -> Float[Tensor, "n j"]:
        r"""Return $\sum_{il} (\sigma_i \sigma_l \partial_i \partial_l C)^2$ of combinations."""
        sigma = self.sample.deviation
        coefficients = c.new_zeros(len(self.library), c.shape[1])
        coefficients[self.kept] = c / self.scale[:, None]
        total = c.new_zeros(len(x), c.shape[1])
        for i, varying, library in self._parts:
            shift = torch.zeros_like(x)
            shift[:, i] = STEP * sigma[i]
            ahead, behind = (
                library.combined_gradients(x + side * shift, coefficients[varying]) * sigma
                for side in (1, -1)
            )
            total += ((ahead - behind) / (2 * STEP)).square().sum(-1)
        return total

    @cached_property
    def _parts(self) -> list[tuple[int, Tensor, Library]]:
        """Each coordinate, with the indices and the library of the functions that depend on it."""
        kept = set(self.kept.tolist())
        parts = []
        for i in range(self.sample.x.shape[1]):
            varying = [k for k in self.library.depending_on(i) if k in kept]
            if varying:
                parts.append((i, torch.tensor(varying), self.library.subset(varying)))
        return parts


@dataclass
class Moments:
    """Covariances of the functions over some trajectories.

    Args:
        within: W; with `noise_within`.
        total: V; with `noise_total`.
        freedom: degrees of freedom of W.
    """

    within: Tensor
    noise_within: Tensor
    total: Tensor
    noise_total: Tensor
    freedom: float


def fold_moments(features: Features) -> tuple[Moments, list[Moments]]:
    """Return the moments of all trajectories, and of those outside of each fold."""
    folds = [_sums(features, features.sample.fold == f) for f in range(FOLDS)]
    everything = _Sums(*(torch.stack(parts).sum(0) for parts in zip(*folds, strict=True)))
    without = [_Sums(*(a - b for a, b in zip(everything, fold, strict=True))) for fold in folds]
    return everything.moments(), [sums.moments() for sums in without]


class _Sums(NamedTuple):
    """Numbers of states and of degrees of freedom, and sums over states."""

    states: Tensor
    freedom: Tensor
    within: Tensor
    noise_within: Tensor
    values: Tensor
    squares: Tensor
    noise: Tensor

    def moments(self) -> Moments:
        """Return the covariances."""
        mean = self.values / self.states
        return Moments(
            self.within / self.freedom,
            self.noise_within / self.freedom,
            self.squares / self.states - torch.outer(mean, mean),
            self.noise / self.states,
            float(self.freedom),
        )


def _sums(features: Features, use: Tensor) -> _Sums:
    """Return the sums over the trajectories in `use` (a mask)."""
    sample = features.sample
    states = use[sample.trajectory]
    phi, slopes = features.values[states], features.slopes[states]
    centred, share = sample.within(features.values)[states], sample.share[states]
    states_count, freedom = torch.tensor([len(phi), len(phi) - int(use.sum())]).to(phi)
    noise = noise_covariance(slopes, torch.ones_like(share))
    equal = bool((share == share[0]).all())
    return _Sums(
        states_count,
        freedom,
        centred.mT @ centred,
        share[0] * noise if equal else noise_covariance(slopes, share),
        phi.sum(0),
        phi.mT @ phi,
        noise,
    )


def noise_covariance(
    slopes: Float[Tensor, "n k d"], weight: Float[Tensor, "n"]
) -> Float[Tensor, "k k"]:
    """Return the weighted sum over states of the noise covariance of the functions."""
    rows = (slopes * weight.sqrt()[:, None, None]).transpose(1, 2).flatten(0, 1)
    return rows.mT @ rows


@dataclass
class Directions:
    """Generalised eigenvectors, and the uncertainty of the conserved ones.

    Args:
        variation: eigenvalues, ascending.
        vectors: [k, j] columns of unit variance without noise.
        varying: [k, i], the directions that are not conserved.
        errors: [i], variance of their coefficients in a conserved direction, relative to its noise,
            times the share of the leverage that is not noise.
    """

    variation: Float[Tensor, "j"]
    vectors: Float[Tensor, "k j"]
    varying: Float[Tensor, "k i"]
    errors: Float[Tensor, "i"]

    def project(self, vectors: Float[Tensor, "k j"], count: int) -> "Directions":
        """Return combinations of the first `count` directions that are nearest to `vectors`."""
        own = self.vectors[:, :count]
        return replace(self, vectors=own @ torch.linalg.lstsq(own, vectors, driver="gels").solution)


def fixed_direction(vectors: Float[Tensor, "k j"]) -> Directions:
    """Return directions that were not estimated."""
    return Directions(vectors[0], vectors, vectors[:, :0], vectors[0, :0])


def directions(moments: Moments) -> Directions:
    r"""Solve the generalised eigenproblem among combinations with more signal than noise.

    As in linear regression, the coefficient of a direction i that is not conserved has the error
    variance $\nu / (M \lambda_i) \cdot (1 + \nu_i / \lambda_i)$, where $\nu$ is the noise of the
    conserved quantity, M the degrees of freedom, and the last factor is due to noise in the
    functions.
    """
    V, NV = moments.total, moments.noise_total
    values, vectors = torch.linalg.eigh(V)
    basis = vectors[:, values > RANK_TOLERANCE * values[-1]]
    basis = basis / (basis * (V @ basis)).sum(0).sqrt()
    values, vectors = torch.linalg.eigh(basis.mT @ (V - NV) @ basis)
    basis = basis @ vectors
    kept = values * (1 + MIN_SIGNAL) > MIN_SIGNAL
    basis = basis[:, kept] / values[kept].sqrt()
    true = moments.within - moments.noise_within
    variation, combination = torch.linalg.eigh(basis.mT @ true @ basis)
    basis = basis @ combination
    noise = (basis * (moments.noise_within @ basis)).sum(0)
    varies = variation > 4 * noise * math.sqrt(2 / moments.freedom)
    # Of the leverage, lambda + nu, the noise nu is already part of the noise of the quantity.
    errors = 1 / (variation[varies] * moments.freedom)
    return Directions(variation, basis, basis[:, varies], errors)


def noise_test(
    features: Features, fits: Sequence[Directions], count: int, curvature: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p-value, variation, its standard error and noise of the first directions.

    Each is tested on trajectories that it was not estimated from. Without `curvature`, which takes
    most of the time, the noise is an upper bound and the p-value conservative.
    """
    sample = features.sample
    curvature = curvature and float((sample.deviation / sample.x.std(0)).max()) > LARGE_NOISE
    if all(fit is fits[0] for fit in fits):
        values, noise = _values_and_noise(features, slice(None), fits[0], count, curvature)
    else:
        values, noise = features.values.new_empty(2, len(sample.x), count)
        fold = sample.fold[sample.trajectory]
        for f, fit in enumerate(fits):
            parts = _values_and_noise(features, fold == f, fit, count, curvature)
            values[fold == f], noise[fold == f] = parts
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
    # Trajectories far from the others, where errors of the coefficients matter, tell little.
    information = sample.sum(noise) / sample.sum(noise + rise).clamp_min(1e-300)
    weight = information[sample.trajectory]
    weighted = _ratio(
        weight * centred.square(),
        weight * (noise * sample.share[:, None] + rise),
        sample.freedom / len(values),
        sample.noise_freedom,
    )
    p = 2 * torch.minimum(torch.minimum(whole.p, weighted.p), slow.p)
    size = weight.sum(0)
    mean_noise = (weight * noise).sum(0) / size
    mean = (weight * values).sum(0) / size
    total = (weight * (values - mean).square()).sum(0) / size - mean_noise
    per_state = weighted.expected / size * (len(values) / sample.freedom) / total
    excess = (weighted.ratio - 1) * per_state
    return p.clamp_max(1.0), excess, weighted.error * per_state, mean_noise / total


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


def _values_and_noise(
    features: Features, use: Tensor | slice, fit: Directions, count: int, curvature: bool
) -> tuple[Float[Tensor, "n j"], Float[Tensor, "n j"]]:
    """Return the first combinations at the states in `use`, and the noise variance in them.

    With `curvature`, the noise is corrected for its second order, see `Features.second_order`:
    squared gradients at noisy states overestimate those at the true states.
    """
    vectors = fit.vectors[:, :count]
    slopes = torch.einsum("nkd,kj->njd", features.slopes[use], vectors)
    noise = slopes.square().sum(-1)
    if curvature:
        second = features.second_order(features.sample.x[use], vectors)
        noise = (noise - 0.5 * second).maximum(0.2 * noise)
    return features.values[use] @ vectors, noise


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
