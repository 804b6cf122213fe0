r"""Conserved quantities from trajectories alone: a generalised eigenproblem with a noise test.

Let $\phi_1, \dots, \phi_m$ be functions of the state (`symrazor.dynamics.libraries`). The
covariance $W$ of $\phi$ within trajectories, around each trajectory's mean, and the covariance $V$
over all states both contain measurement noise of covariance

$$ N = E\, D \Sigma D^\top, \qquad D = \partial\phi/\partial x, $$

where $\Sigma$ is the noise of the states (`noise_estimate`). Without noise, a combination
$C = c^\top\phi$ varies within trajectories by the fraction

$$ \lambda = \frac{c^\top (W - N)\, c}{c^\top (V - N)\, c} $$

of its variance. Stationary points of this ratio are generalised eigenvectors, and conserved
quantities have $\lambda = 0$.

**The test.** Trajectories are divided into folds. Directions are estimated without a fold, and the
variation of $C$ along trajectories is compared with the noise in it on that fold. There are two
statistics: the whole variation, and its slow part (the first polynomials in time), where a drift
stands out from the noise. For a conserved direction both are 1 up to sampling error, and follow a
chi-squared distribution. Estimated coefficients raise them by a known amount (`_inflation`).
Directions are tested in the order of $\lambda$, up to the first that is not conserved:

- refuted, if the p-value is below a threshold;
- conserved, if the upper confidence limit of $\lambda$ is below `MAX_VARIATION`;
- undecided otherwise: the data are too few or too noisy.

Both thresholds hold for all tests of a call together: the probability of any wrong decision is at
most `FAMILY_ERROR`.

**Libraries** are tried from simple to rich. A quantity whose gradient is a combination of the
gradients of others is a function of them: $P^2$ is not new once $P$ is known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.libraries import Library, libraries_for
from symrazor.dynamics.noise import NoiseEstimate, noise_estimate, without_gaps
from symrazor.dynamics.proposals import echelon
from symrazor.dynamics.trajectories import Trajectories

FAMILY_ERROR = 0.01
"""Probability of any wrong decision in one call."""
MAX_VARIATION = 0.02
"""Largest fraction of the variance of a conserved quantity within trajectories."""
MIN_SIGNAL = 1.0
"""Smallest variance of a combination relative to the noise in it; others are not considered."""
FOLDS = 4
MIN_TRAJECTORIES = 8
STATES_PER_FUNCTION = 4
"""Degrees of freedom per function that a library needs, at least."""
MAX_STATES = 4000
"""States that are used, at most."""
MAX_TESTED, MAX_TESTED_VARIATION = 40, 0.15
"""Directions that are tested in one library, at most, and their estimated variation."""
SLOW_DEGREE = 3
"""Degree of the polynomials in time that make up the slow part of a variation."""
LARGE_NOISE = 0.01
"""Noise, relative to the spread of a coordinate, from which curvature of functions counts."""
RELATIVE_NOISE_FLOOR = 1e-5
"""Smallest standard deviation of the noise, relative to the spread of a coordinate: rounding, and
errors of the integrator that made the data."""
MAX_DEPENDENCE = 0.03
"""Functions of other quantities have less than this fraction of new squared gradient."""
MIN_TERM, MAX_TERMS = 0.02, 8
"""Terms of a formula: their smallest contribution relative to the largest one, and their number."""
SIMPLE_ERRORS, MIN_SIMPLE_P = 3.0, 0.05
"""Coefficients are simplified within this many standard errors, and smallest p-value of a simple
formula that is shown."""
MAX_UNEXPLAINED = 0.05
"""So are quantities of which a quadratic function of others leaves less than this fraction."""
RANK_TOLERANCE = 1e-9
"""Relative variance below which a combination of functions is an identity."""
STEP = 0.5
"""Step of the differences that give second derivatives, in standard deviations of the noise."""


# ---------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Quantity:
    """A combination of functions of the state, with the result of its test.

    Args:
        library: the functions.
        coefficients: [m]; the largest contribution has coefficient 1.
        errors: [m], their standard errors (jackknife over the folds).
        p_value: probability of a larger variation if the quantity is conserved.
        variation: estimated fraction of its variance within trajectories, without noise.
        limit: upper confidence limit of this fraction.
        noise: noise variance in the quantity, relative to its variance.
        spread: [m], standard deviation of each function over the data.
        simple: a formula with simple coefficients that the data cannot tell from the estimate.
    """

    library: Library
    coefficients: Float[Tensor, "m"]
    errors: Float[Tensor, "m"]
    p_value: float
    variation: float
    limit: float
    noise: float
    spread: Float[Tensor, "m"]
    simple: "Simple | None" = None

    @property
    def formula(self) -> str:
        """The largest terms, such as "q^2 + 0.667 p^2"."""
        return format_terms(self.coefficients, self.library.names, self.spread)

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        """Return the values of the quantity."""
        return self.library(x) @ self.coefficients

    def gradient(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return its gradients."""
        return self.library.combined_gradients(x, self.coefficients[:, None])[:, 0]


@dataclass(frozen=True)
class Simple:
    """A quantity with simple coefficients, and the p-value of its test."""

    coefficients: Float[Tensor, "m"]
    formula: str
    p_value: float


def format_terms(
    coefficients: Float[Tensor, "m"], names: Sequence[str], spread: Float[Tensor, "m"]
) -> str:
    """Return the terms by their contribution to the variance, the largest first."""
    size = (coefficients * spread).abs()
    order = [int(k) for k in size.argsort(descending=True) if size[k] > MIN_TERM * size.max()]
    parts = []
    for k in order[:MAX_TERMS]:
        c = float(coefficients[k])
        number = "" if abs(abs(c) - 1) < 5e-4 else f"{abs(c):.3g} "
        parts.append(f"{'-' if c < 0 else '+'} {number}{names[k]}")
    if len(order) > MAX_TERMS:
        parts.append(f"+ ... ({len(order) - MAX_TERMS} more terms)")
    return " ".join(parts).removeprefix("+ ")


@dataclass
class Findings:
    """Result of `find_conserved`.

    Args:
        quantities: functionally independent conserved quantities.
        functions: further conserved quantities, which are functions of these; quadratic functions
            of them, such as squares and products, are left out.
        undecided: combinations that may be conserved; the data cannot tell.
        libraries: titles of the libraries that were searched.
        skipped: libraries that were not searched, with the reason.
        noise: of the states.
    """

    quantities: list[Quantity] = field(default_factory=list)
    functions: list[Quantity] = field(default_factory=list)
    undecided: list[Quantity] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    noise: NoiseEstimate | None = None

    @property
    def all(self) -> list[Quantity]:
        """All conserved quantities, dependent ones included."""
        return [*self.quantities, *self.functions]


def find_conserved(
    data: Trajectories,
    names: Sequence[str] | None = None,
    functions: dict[str, Callable[[Tensor], Tensor]] | None = None,
    seed: int = 0,
) -> Findings:
    """Find conserved quantities of trajectories in libraries of functions.

    Args:
        data: trajectories; missing states, irregular times and different lengths are allowed.
        names: of the coordinates; x1, x2, ... by default.
        functions: further functions of the state [n, d] -> [n], by name.
        seed: of the folds, and of the choice of states if there are many.

    Raises:
        ValueError: fewer than `MIN_TRAJECTORIES` trajectories with three states or more.
    """
    noise = noise_estimate(data)
    sample = _sample(data, noise, seed)
    d = sample.x.shape[1]
    findings = Findings(noise=noise)
    candidates = libraries_for(sample.x, names or [f"x{i + 1}" for i in range(d)], functions)
    level = FAMILY_ERROR / (2 * len(candidates))
    for library in candidates:
        if len(findings.quantities) >= d - 1:
            break  # d - 1 quantities determine the orbits: there is no further one
        needed = STATES_PER_FUNCTION * len(library)
        if needed > sample.freedom:
            findings.skipped.append(
                f"{library.title}: {len(library)} functions need {needed} states in addition to "
                f"one per trajectory, but there are {sample.freedom}"
            )
            continue
        findings.libraries.append(library.title)
        conserved, undecided = _search(library, sample, level)
        dependent: list[Quantity] = []
        for quantity in conserved:
            new = is_independent(quantity, findings.quantities, sample.x)
            full = len(findings.quantities) >= d - 1
            (findings.quantities if new and not full else dependent).append(quantity)
        if len(dependent) < len(conserved):
            findings.functions += [
                quantity
                for quantity in dependent
                if _unexplained(quantity, findings.quantities, sample.x) > MAX_UNEXPLAINED
            ]
        findings.undecided += [
            quantity
            for quantity in undecided
            if is_independent(quantity, findings.quantities, sample.x)
        ]
    return findings


def is_independent(quantity: Quantity, known: Sequence[Quantity], x: Float[Tensor, "n d"]) -> bool:
    """Return whether a quantity is not a function of known ones, nor nearly so.

    Its gradient must not be a combination of theirs at the states x, and a quadratic function of
    the known quantities must not explain its values.
    """
    if not known:
        return True
    few = x[:: -(-len(x) // 300)]
    unit = x.std(0).clamp_min(1e-300)
    gradient = quantity.gradient(few) * unit
    others = torch.stack([other.gradient(few) * unit for other in known], -1)
    others = others / others.norm(dim=1, keepdim=True).clamp_min(1e-300)
    basis, values, _ = torch.linalg.svd(others, full_matrices=False)
    basis = basis * (values > 0.02 * values[:, :1])[:, None]
    inside = torch.einsum("ndk,nd->nk", basis, gradient)
    new = 1 - inside.square().sum() / gradient.square().sum()
    return float(new) > MAX_DEPENDENCE and _unexplained(quantity, known, x) > MAX_UNEXPLAINED


def _unexplained(quantity: Quantity, known: Sequence[Quantity], x: Tensor) -> float:
    """Return the fraction of the variance that a quadratic function of known ones leaves."""
    base = torch.stack([other(x) for other in known], 1)
    base = (base - base.mean(0)) / base.std(0)
    squares = (base[:, :, None] * base[:, None]).flatten(1)
    terms = torch.cat([torch.ones_like(base[:, :1]), base, squares], 1)
    values = quantity(x)
    # The redundant products require a solver for rank-deficient problems.
    fitted = terms @ torch.linalg.lstsq(terms, values[:, None], driver="gelsd").solution
    return float((values - fitted[:, 0]).var() / values.var())


# ---------------------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class Sample:
    """Observed states, sorted by trajectory and time.

    Args:
        x: states.
        trajectory: index of the trajectory of each state, 0 .. B - 1.
        fold: of each trajectory.
        slow: [n, k], orthonormal polynomials in time along each trajectory, without the constant.
        deviation: standard deviation of the noise.
        noise_freedom: degrees of freedom of the noise estimate.
    """

    x: Float[Tensor, "n d"]
    trajectory: Tensor
    fold: Tensor
    slow: Float[Tensor, "n k"]
    deviation: Float[Tensor, "d"]
    noise_freedom: float

    @property
    def freedom(self) -> int:
        """Number of states less the number of trajectories."""
        return len(self.x) - len(self.fold)

    def within(self, values: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Subtract the mean of each trajectory."""
        counts = self.trajectory.bincount().to(values)[:, None]
        return values - (self.sum(values) / counts)[self.trajectory]

    def sum(self, values: Float[Tensor, "n *m"]) -> Float[Tensor, "b *m"]:
        """Return the sum over each trajectory."""
        total = values.new_zeros(len(self.fold), *values.shape[1:])
        return total.index_add_(0, self.trajectory, values)

    @property
    def share(self) -> Float[Tensor, "n"]:
        """Share of the noise of a state that remains after the mean is subtracted: 1 - 1/T."""
        return 1 - 1 / self.trajectory.bincount().to(self.x)[self.trajectory]


def _sample(data: Trajectories, noise: NoiseEstimate, seed: int) -> Sample:
    """Choose at most `MAX_STATES` states, evenly along time, and divide trajectories into folds."""
    states, _ = without_gaps(data)
    lengths = states.isfinite().all(-1).sum(1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(states), generator=generator)
    order = order[lengths[order] >= SLOW_DEGREE + 2]
    if len(order) < MIN_TRAJECTORIES:
        raise ValueError(
            f"{len(order)} trajectories have {SLOW_DEGREE + 2} states or more; at least "
            f"{MIN_TRAJECTORIES} are needed for a test."
        )
    per_trajectory = max(3 * SLOW_DEGREE, MAX_STATES // len(order))
    order = order[: MAX_STATES // min(per_trajectory, int(lengths[order].min()))]
    rows, owner, slow = [], [], []
    bases: dict[int, Tensor] = {}
    for b, trajectory in enumerate(order):
        T = int(lengths[trajectory])
        count = min(T, per_trajectory)
        rows.append(states[trajectory, torch.linspace(0, T - 1, count).round().long()])
        owner.append(torch.full((count,), b))
        slow.append(bases.setdefault(count, _slow_basis(count)))
    x = torch.cat(rows)
    floor = RELATIVE_NOISE_FLOOR * x.std(0)
    return Sample(
        x,
        torch.cat(owner),
        torch.arange(len(order)) % FOLDS,
        torch.cat(slow),
        noise.variance.sqrt().maximum(floor),
        noise.freedom,
    )


def _slow_basis(count: int) -> Float[Tensor, "t k"]:
    """Return orthonormal polynomials of degree 1 to `SLOW_DEGREE` on equal steps."""
    t = torch.linspace(-1, 1, count, dtype=torch.float64)
    powers = torch.stack([t**k for k in range(SLOW_DEGREE + 1)], 1)
    result: Tensor = torch.linalg.qr(powers)[0][:, 1:]
    return result


# ------------------------------------------------------------------------------------------ search


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

    def second_order(self, use: Tensor, c: Float[Tensor, "k j"]) -> Float[Tensor, "n j"]:
        r"""Return $\sum_{il} (\sigma_i \sigma_l \partial_i \partial_l C)^2$ of combinations.

        `use` are the states. Curvature of removed products of known quantities is neglected.
        """
        x, sigma = self.sample.x[use], self.sample.deviation
        coefficients = c.new_zeros(len(self.library), c.shape[1])
        coefficients[self.kept] = c / self.scale[:, None]
        total = c.new_zeros(len(x), c.shape[1])
        for i in range(len(sigma)):
            shift = torch.zeros_like(x)
            shift[:, i] = STEP * sigma[i]
            ahead, behind = (
                self.library.combined_gradients(x + side * shift, coefficients) * sigma
                for side in (1, -1)
            )
            total += ((ahead - behind) / (2 * STEP)).square().sum(-1)
        return total


@dataclass
class Moments:
    """Covariances of the functions over the trajectories of some folds.

    Args:
        within: W; with `noise_within`.
        slow: covariance of the slow components; with `noise_slow`.
        total: V; with `noise_total`.
        freedom: degrees of freedom of W.
    """

    within: Tensor
    noise_within: Tensor
    slow: Tensor
    noise_slow: Tensor
    total: Tensor
    noise_total: Tensor
    freedom: float


def _moments(features: Features, use: Tensor) -> Moments:
    """Return the moments of the trajectories in `use` (a mask)."""
    sample = features.sample
    states = use[sample.trajectory]
    phi, slopes = features.values[states], features.slopes[states]
    n, freedom = len(phi), float(len(phi) - int(use.sum()))
    centred = sample.within(features.values)[states]
    slow = torch.einsum("nk,nm->nkm", sample.slow, features.values)
    slow = sample.sum(slow)[use].flatten(0, 1)
    noise, noise_within, noise_slow = (
        _gram(slopes, weight[states])
        for weight in (
            torch.ones_like(sample.share),
            sample.share,
            sample.slow.square().sum(1),
        )
    )
    mean = phi.mean(0)
    return Moments(
        centred.mT @ centred / freedom,
        noise_within / freedom,
        slow.mT @ slow / len(slow),
        noise_slow / len(slow),
        phi.mT @ phi / n - torch.outer(mean, mean),
        noise / n,
        freedom,
    )


def _gram(slopes: Float[Tensor, "n k d"], weight: Float[Tensor, "n"]) -> Float[Tensor, "k k"]:
    """Return the weighted sum over states of the noise covariance of the functions."""
    rows = (slopes * weight.sqrt()[:, None, None]).transpose(1, 2).flatten(0, 1)
    return rows.mT @ rows


@dataclass
class Directions:
    """Generalised eigenvectors, and the rise of both statistics by their estimation.

    Args:
        variation: eigenvalues, ascending.
        vectors: [k, j] columns of unit variance without noise.
        noise: noise variance of each.
        rise: of the whole variation, relative to the noise.
        slow_rise: of the slow part.
    """

    variation: Float[Tensor, "j"]
    vectors: Float[Tensor, "k j"]
    noise: Float[Tensor, "j"]
    rise: float
    slow_rise: float

    def project(self, vectors: Float[Tensor, "k j"], count: int) -> "Directions":
        """Return combinations of the first `count` directions that are nearest to `vectors`."""
        own = self.vectors[:, :count]
        return replace(self, vectors=own @ torch.linalg.lstsq(own, vectors).solution)


def directions(moments: Moments) -> Directions:
    """Solve the generalised eigenproblem among combinations with more signal than noise."""
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
    slow = (basis * ((moments.slow - moments.noise_slow) @ basis)).sum(0)
    return Directions(variation, basis, noise, *_inflation(variation, noise, slow, moments.freedom))


def _inflation(
    variation: Tensor, noise: Tensor, slow: Tensor, freedom: float
) -> tuple[float, float]:
    r"""Return by how much estimated coefficients raise the statistics of a conserved direction.

    As in linear regression, the coefficient of a direction i that is not conserved has the error
    variance $\nu / (M \lambda_i) \cdot (1 + \nu_i / \lambda_i)$, where $\nu$ is the noise of the
    quantity, M the degrees of freedom, and the last factor is due to noise in the functions.
    """
    varies = variation > 4 * noise * math.sqrt(2 / freedom)
    variation, noise, slow = variation[varies], noise[varies], slow[varies]
    error = (1 + noise / variation) / (variation * freedom)
    return float((error * variation).sum()), float((error * slow.clamp_min(0)).sum())


def _search(
    library: Library, sample: Sample, level: float
) -> tuple[list[Quantity], list[Quantity]]:
    """Return conserved and undecided quantities of one library, tested by cross-fitting."""
    features = Features(library, sample)
    if not len(features.kept):
        return [], []
    everything = torch.ones_like(sample.fold, dtype=torch.bool)
    full = directions(_moments(features, everything))
    fits = [directions(_moments(features, sample.fold != f)) for f in range(FOLDS)]
    plausible = min(int((fit.variation < MAX_TESTED_VARIATION).sum()) for fit in (full, *fits))
    count = min(MAX_TESTED, plausible)
    if not count:
        return [], []
    tests = _test(features, fits, count)
    z = normal_quantile(1 - level)
    p, variation, error, _ = tests
    limit = variation.clamp_min(0) + z * error
    accepted = _leading((p >= level) & (limit <= MAX_VARIATION))
    plausible = _leading(p >= level)
    basis = readable_basis(full.vectors[:, :accepted])
    # Combinations of conserved quantities are tested again, as they are reported.
    combined = [fit.project(basis, accepted) for fit in fits]
    conserved = _quantities(features, basis, combined, z)
    if not all(q.p_value >= level and q.limit <= MAX_VARIATION for q in conserved):
        basis = full.vectors[:, :accepted]
        combined = [fit.project(basis, accepted) for fit in fits]
        conserved = _quantities(features, basis, combined, z)
    rest = full.vectors[:, accepted:plausible]
    others = [replace(fit, vectors=fit.vectors[:, accepted:plausible]) for fit in fits]
    return conserved, _quantities(features, rest, others, z)


def _leading(true: Tensor) -> int:
    """Return the number of leading entries that are true."""
    return int(true.to(torch.int).cumprod(0).sum())


def readable_basis(vectors: Float[Tensor, "k j"]) -> Float[Tensor, "k j"]:
    """Return a basis of the span in which each combination has few functions."""
    return echelon(vectors.mT).mT if vectors.shape[1] else vectors


def _quantities(
    features: Features, vectors: Float[Tensor, "k j"], fits: Sequence[Directions], z: float
) -> list[Quantity]:
    """Return the combinations of all data with the tests of the combinations of each fold."""
    if not vectors.shape[1]:
        return []
    tests = _test(features, fits, vectors.shape[1])
    library, kept, scale = features.library, features.kept, features.scale
    spread = vectors.new_zeros(len(library))
    spread[kept] = scale
    quantities = []
    for j, (p, variation, error, noise) in enumerate(torch.stack(tests, 1).tolist()):
        pivot = int(vectors[:, j].abs().argmax())
        raw = vectors[:, j] / scale
        folds = torch.stack([fit.vectors[:, j] for fit in fits]) / scale
        folds = folds / folds[:, pivot, None] - (raw / raw[pivot])
        coefficients, errors = (torch.zeros_like(spread) for _ in range(2))
        coefficients[kept] = raw / raw[pivot]
        errors[kept] = ((FOLDS - 1) / FOLDS * folds.square().sum(0)).sqrt()
        limit = max(variation, 0.0) + z * error
        quantity = Quantity(library, coefficients, errors, p, variation, limit, noise, spread, None)
        quantities.append(replace(quantity, simple=_simplify(features, quantity)))
    return quantities


def _simplify(features: Features, quantity: Quantity) -> Simple | None:
    """Return a quantity with simple coefficients if the data cannot tell it from the estimate.

    Coefficients within `SIMPLE_ERRORS` of a multiple of 1/2 are replaced by it.
    """
    c = quantity.coefficients
    nearest = (2 * c).round() / 2
    near = (c - nearest).abs() <= SIMPLE_ERRORS * quantity.errors
    simple = torch.where(near, nearest, c)
    if bool((simple == c).all()):
        return None
    scaled = (simple[features.kept] * features.scale)[:, None]
    fixed = Directions(scaled[0], scaled, scaled[0], 0.0, 0.0)
    p, *_ = _test(features, [fixed] * FOLDS, 1)
    if not float(p[0]) >= MIN_SIMPLE_P:
        return None
    formula = format_terms(simple, quantity.library.names, quantity.spread)
    return Simple(simple, formula, float(p[0]))


def _test(
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
    rise, slow_rise = (
        torch.tensor([getattr(fit, name) for fit in fits], dtype=torch.float64)
        for name in ("rise", "slow_rise")
    )
    fold = sample.fold[sample.trajectory]
    whole = _ratio(
        sample.within(values).square(),
        noise * sample.share[:, None] * (1 + rise[fold])[:, None],
        sample.freedom / len(values),
        sample.noise_freedom,
    )
    components = sample.sum(torch.einsum("nk,nj->nkj", sample.slow, values)).square().flatten(0, 1)
    slow_noise = sample.sum(torch.einsum("nk,nj->nkj", sample.slow.square(), noise))
    slow_noise = slow_noise * (1 + slow_rise[sample.fold])[:, None, None]
    slow = _ratio(components, slow_noise.flatten(0, 1), 1.0, sample.noise_freedom)
    p = 2 * torch.minimum(whole.p, slow.p)
    total = values.var(0) - noise.mean(0)
    per_state = whole.expected / sample.freedom / total
    excess = (whole.ratio - 1) * per_state
    return p.clamp_max(1.0), excess, whole.error * per_state, noise.mean(0) / total


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


def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal distribution."""
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))
