r"""Fit vector fields to noisy trajectories by multiple shooting.

Trajectories are cut into windows. For each window the initial state is estimated together with the
parameters of the field, which all windows share, so that the noise of the states does not bias the
parameters. The sum of squared residuals is minimised by the Gauss-Newton method. Derivatives are
differences, and the initial states are eliminated window by window.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.dynamics.fields import ParametricField
from symrazor.dynamics.mechanics import rk4
from symrazor.dynamics.noise import without_gaps
from symrazor.dynamics.trajectories import Trajectories

MAX_EVALUATIONS = 2000
"""States that are integrated side by side, at most, so that they stay in the cache."""
STATE_STEP = 1e-5
"""Step of differences in a state, in standard deviations of its coordinate."""
ITERATIONS, FIRST_ITERATIONS = 12, 3
"""Of the Gauss-Newton method, and for initial states before parameters move."""
CONVERGED_SHARE = 0.97
"""Share of the windows whose initial states have to converge."""
JACOBIAN_SAVING = 4
"""Steps of the integrator for residuals per step for their derivatives."""
OUTLIER = 30.0
"""Windows whose squared residuals exceed this multiple of the median at first are left out."""
MIN_IMPROVEMENT = 1e-3
"""Relative decrease of the sum of squares below which the iteration ends."""
MAX_COST, MIN_WINDOWS = 60_000, 30
"""Windows times derivatives times steps of the integrator, at most, and fewest windows that are
used: a field with many parameters is fitted to fewer windows."""
HOPELESS = 1e3
"""Squared residuals relative to the noise above which no term is removed: the field is wrong."""
POOR = 30.0
"""The same above which a field is not fitted to all windows."""
MIN_T = 3.0
"""Coefficients below this many standard errors are removed."""


@dataclass(frozen=True)
class Windows:
    """W windows of consecutive states.

    Args:
        states: [W, T, d].
        gaps: [W, T - 1], times between them.
        deviation: [d], standard deviation of the noise.
        spread: [d], standard deviation of the coordinates.
    """

    states: Float[Tensor, "w t d"]
    gaps: Float[Tensor, "w g"]
    deviation: Float[Tensor, "d"]
    spread: Float[Tensor, "d"]

    def __len__(self) -> int:
        return len(self.states)

    def at(self, use: Bool[Tensor, "w"]) -> "Windows":
        """Return the windows where `use` is true."""
        return Windows(self.states[use], self.gaps[use], self.deviation, self.spread)

    @property
    def freedom(self) -> int:
        """Degrees of freedom: numbers in all states minus numbers in initial states."""
        return self.states.numel() - self.states[:, 0].numel()


def windows_of(
    data: Trajectories, length: int, limit: int, deviation: Float[Tensor, "d"]
) -> Windows:
    """Return at most `limit` windows of `length` states, spread evenly over the data."""
    states, times = without_gaps(data)
    length = min(length, states.shape[1])
    count = states.shape[1] // length
    cut = states[:, : count * length].unflatten(1, (count, length)).flatten(0, 1)
    clock = times[:, : count * length].unflatten(1, (count, length)).flatten(0, 1)
    complete = cut.isfinite().all(-1).all(-1).nonzero()[:, 0]
    if not len(complete):
        raise ValueError(f"No trajectory has {length} observed states.")
    chosen = complete[torch.linspace(0, len(complete) - 1, min(limit, len(complete))).long()]
    spread = data.states[data.observed].std(0).cpu().double()
    return Windows(cut[chosen].double(), clock[chosen].double().diff(dim=1), deviation, spread)


@dataclass(frozen=True)
class Fit:
    """A fitted field.

    Args:
        field: the field with its fitted parameters.
        covariance: covariance of the parameters.
        chi_squared: squared residuals relative to the noise, per degree of freedom.
    """

    field: ParametricField
    covariance: Float[Tensor, "k k"]
    chi_squared: float

    @property
    def errors(self) -> Float[Tensor, "k"]:
        """Standard errors of the parameters."""
        return self.covariance.diagonal().clamp_min(0).sqrt()

    def draws(self, count: int, seed: int = 0) -> list[ParametricField]:
        """Return fields with parameters drawn from their uncertainty, in pairs around the mean."""
        values, vectors = torch.linalg.eigh(self.covariance)
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(-(-count // 2), len(values), generator=generator, dtype=values.dtype)
        z = torch.cat([z, -z])
        changes = (z * values.clamp_min(0).sqrt()) @ vectors.mT
        return [self.field.at(self.field.parameters + change) for change in changes]


def integrate(
    field: ParametricField,
    start: Float[Tensor, "p w d"],
    parameters: Float[Tensor, "p k"],
    gaps: Float[Tensor, "w g"],
    substeps: int,
) -> Float[Tensor, "p w t d"]:
    """Return the states at all times of the windows, for each batch of parameters."""
    x, states = start, [start]
    for gap in gaps.unbind(1):
        h = (gap / substeps)[:, None]
        for _ in range(substeps):
            x = rk4(lambda z: field.velocity(z, parameters), x, h)
        states.append(x)
    return torch.stack(states, 2)


def fit_field(field: ParametricField, windows: Windows, substeps: int) -> Fit | None:
    """Fit the parameters of a field; None if the integration diverges.

    A field that does not fit a few windows is not fitted to all. Parameters that do not differ from
    zero are removed, and the others fitted again.
    """
    fit = _gauss_newton(field, _spread(windows, MIN_WINDOWS), substeps)
    if fit is None or fit.chi_squared > POOR:
        return fit
    fit = refit(fit.field, windows, substeps)
    for _ in range(3):
        if fit is None or fit.chi_squared > HOPELESS:
            return fit
        kept = fit.field.parameters.abs() > MIN_T * fit.errors
        if bool(kept.all()) or not bool(kept.any()):
            break
        fit = refit(fit.field.only(kept), windows, substeps)
    return fit


def refit(field: ParametricField, windows: Windows, substeps: int) -> Fit | None:
    """Fit the parameters of a field that starts near the data; None if the integration diverges."""
    return _gauss_newton(field, _affordable(field, windows, substeps), substeps)


def _affordable(field: ParametricField, windows: Windows, substeps: int) -> Windows:
    """Return windows, spread evenly, whose derivatives cost at most `MAX_COST`."""
    derivatives = len(field.parameters) + windows.states.shape[2]
    steps = substeps * windows.gaps.shape[1]
    return _spread(windows, max(MIN_WINDOWS, MAX_COST // (derivatives * steps)))


def _spread(windows: Windows, count: int) -> Windows:
    """Return at most `count` windows, spread evenly."""
    if count >= len(windows):
        return windows
    chosen = torch.linspace(0, len(windows) - 1, count).long()
    use = torch.zeros(len(windows), dtype=torch.bool)
    use[chosen] = True
    return windows.at(use)


def residual_ratio(field: ParametricField, windows: Windows, substeps: int) -> float:
    """Return the squared residuals per degree of freedom after fitting initial states only.

    The worst tenth of the windows is left out: near a singularity the right initial state may not
    be found.
    """
    _, total = _fit_starts(field, windows, substeps)
    count = len(total) - len(total) // 10
    best = total.nan_to_num(math.inf).sort().values[:count]
    ratio = float(best.sum()) / max(1.0, windows.freedom * count / len(total))
    return ratio if math.isfinite(ratio) else math.inf


def _fit_starts(
    field: ParametricField, windows: Windows, substeps: int, iterations: int = ITERATIONS
) -> tuple[Float[Tensor, "w d"], Float[Tensor, "w"]]:
    """Return the best initial states for fixed parameters, and the sums of squared residuals.

    Every window has its own damping. The iteration ends when most windows no longer improve.
    """
    start, parameters = windows.states[:, 0], field.parameters
    residual = _residuals(field, start[None], parameters[None], windows, substeps)[0]
    total, damping = residual.square().sum(1), torch.full((len(windows),), 1e-3).double()
    identity = torch.eye(start.shape[1], dtype=start.dtype)
    for _ in range(iterations):
        A, _ = _jacobians(field, start, parameters, windows, substeps, 0)
        A = torch.nan_to_num(A, 0.0, 0.0, 0.0)
        information = A.mT @ A
        scale = information.diagonal(dim1=1, dim2=2).mean(1)
        ridge = information + ((damping * scale + 1e-300)[:, None, None] * identity)
        slope = (A.mT @ torch.nan_to_num(residual, 0.0, 0.0, 0.0).unsqueeze(-1)).squeeze(-1)
        tried = start - torch.linalg.solve(ridge, slope.unsqueeze(-1)).squeeze(-1)
        after = _residuals(field, tried[None], parameters[None], windows, substeps)[0]
        new = after.square().sum(1)
        better = (new < total) | (new.isfinite() & ~total.isfinite())
        change = (new / total.clamp_min(1e-300) - 1).abs().nan_to_num(math.inf)
        finished = int((change <= MIN_IMPROVEMENT).sum()) >= CONVERGED_SHARE * len(change)
        start = torch.where(better[:, None], tried, start)
        residual = torch.where(better[:, None], after, residual)
        total = torch.where(better, new, total)
        damping = torch.where(better, damping / 5, damping * 10)
        if finished:
            break
    return start, total


def _gauss_newton(field: ParametricField, windows: Windows, substeps: int) -> Fit | None:
    """Minimise the squared residuals over initial states and parameters; None if they diverge.

    Windows that the first parameters cannot follow at all are left out.
    """
    parameters = field.parameters
    start, total_of_window = _fit_starts(field, windows, substeps, FIRST_ITERATIONS)
    limit = OUTLIER * total_of_window.nan_to_num(math.inf).median()
    usable = total_of_window <= limit
    if not bool(usable.any()):
        return None
    start, windows = start[usable], windows.at(usable)
    k = len(parameters)
    residual = _residuals(field, start[None], parameters[None], windows, substeps)[0]
    total, damping = float(residual.square().sum()), 1e-4
    information = torch.zeros(k, k, dtype=torch.float64)
    for _ in range(ITERATIONS):
        A, B = _jacobians(field, start, parameters, windows, substeps, k)
        if not math.isfinite(total) or not bool(A.isfinite().all() & B.isfinite().all()):
            return None
        Q, R = torch.linalg.qr(A)
        projected = B - Q @ (Q.mT @ B)  # the part that no change of the initial states explains
        information = torch.einsum("wrk,wrl->kl", projected, projected)
        slope = torch.einsum("wrk,wr->k", projected, residual)
        before = total
        for _ in range(5):
            ridge = information + torch.diag(damping * information.diagonal() + 1e-300)
            step = -torch.linalg.lstsq(ridge, slope[:, None], driver="gelsd").solution[:, 0]
            stepped = (residual + B @ step).unsqueeze(-1)
            move = -torch.linalg.solve_triangular(R, Q.mT @ stepped, upper=True).squeeze(-1)
            moved = parameters + step
            tried = _residuals(field, (start + move)[None], moved[None], windows, substeps)[0]
            new = float(tried.square().sum())
            if new < total:  # false for NaN
                start, parameters, residual, total = start + move, moved, tried, new
                damping /= 5
                break
            damping *= 10
        if total > (1 - MIN_IMPROVEMENT) * before:
            break
    freedom = max(1, windows.freedom - k)
    covariance = torch.linalg.pinv(information, hermitian=True) * max(1.0, total / freedom)
    return Fit(field.at(parameters), covariance, total / freedom)


def _residuals(
    field: ParametricField, start: Tensor, parameters: Tensor, windows: Windows, substeps: int
) -> Float[Tensor, "p w r"]:
    """Return the residuals of all states, in standard deviations of the noise."""
    predicted = integrate(field, start, parameters, windows.gaps, substeps)
    residuals: Tensor = ((predicted - windows.states) / windows.deviation).flatten(2)
    return residuals


def _jacobians(
    field: ParametricField,
    start: Float[Tensor, "w d"],
    parameters: Float[Tensor, "k"],
    windows: Windows,
    substeps: int,
    k: int,
) -> tuple[Float[Tensor, "w r d"], Float[Tensor, "w r k"]]:
    """Return derivatives of the residuals in the initial states and in k parameters.

    Derivatives need not be as exact as residuals: the integrator takes fewer steps.
    """
    d = start.shape[1]
    substeps = max(1, substeps // JACOBIAN_SAVING)
    state_steps = STATE_STEP * torch.diag(windows.spread)
    # The first row is unchanged: the base of the finite differences.
    moves = torch.cat([state_steps.new_zeros(1, d), state_steps, start.new_zeros(k, d)])
    changes = torch.zeros(1 + d + k, len(parameters), dtype=start.dtype)
    changes[1 + d :, :k] = torch.diag(field.steps[:k])
    residuals = []
    for chosen in torch.arange(1 + d + k).split(max(1, MAX_EVALUATIONS // len(start))):
        states = start + moves[chosen, None]
        changed = parameters + changes[chosen]
        residuals.append(_residuals(field, states, changed, windows, substeps))
    shifted = torch.cat(residuals)
    size = torch.cat([state_steps.diagonal(), field.steps[:k]])
    jacobian = ((shifted[1:] - shifted[0]) / size[:, None, None]).permute(1, 2, 0)
    return jacobian[:, :, :d], jacobian[:, :, d:]
