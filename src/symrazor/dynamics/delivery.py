"""Choose the simulator that a user gets: the most accurate one on trajectories set aside."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.conserving import ConservingSimulator
from symrazor.dynamics.fields import FreeField
from symrazor.dynamics.findings import Findings
from symrazor.dynamics.libraries import polynomials
from symrazor.dynamics.library import Library
from symrazor.dynamics.rollouts import (
    BASELINE_SUBSTEPS,
    Rollouts,
    linear_map,
    sparse_field,
)
from symrazor.dynamics.shooting import residual_ratio, windows_of
from symrazor.dynamics.simulators import longest_windows
from symrazor.dynamics.trajectories import Trajectories

MAX_ROLLOUT_RATIO = 1.5
"""Largest rollout error, relative to the smallest one, of equations that are compared further."""
MAX_WINDOWS = 40
"""Largest number of trajectories, or parts of them, on which equations are compared."""
MAX_SQUARES = 2.0
"""Largest sum of squared residuals per degree of freedom, in units of the noise variance, of
equations that fit up to the noise."""
TIE = 2.0
"""Largest difference of two sums of squared residuals, in units of the noise variance, that is a
tie. The first equations, which conserve the quantities that were found, win a tie."""
LINEAR_SUBSTEPS = 8


def candidates(
    findings: Findings | None,
    training: Trajectories,
    deviation: Float[Tensor, "d"],
    x: Float[Tensor, "n d"],
) -> dict[str, ConservingSimulator]:
    """Return simulators by name, the fitted equations first; baselines join as equations.

    Args:
        findings: with the fitted equations and what they conserve.
        training: trajectories that the baselines are fitted to.
        deviation: standard deviation of the noise.
        x: states of the data.
    """
    gap = float(training.times.diff(dim=1).median())
    found: dict[str, ConservingSimulator] = {}
    best = None if findings is None else findings.fields.best
    if findings is not None and best is not None:
        name, step = f"equations of motion ({best.name})", gap / best.substeps
        field = best.fit.field
        found[name] = ConservingSimulator(field, findings.quantities, step, x)
        if findings.quantities:
            found[f"{name}, not projected"] = ConservingSimulator(field, [], step, x)
    linear = linear_field(training)
    if linear is not None:
        found["linear equations"] = ConservingSimulator(linear, [], gap / LINEAR_SUBSTEPS, x)
    sparse = sparse_field(training, deviation)
    if sparse is not None:
        step = gap / BASELINE_SUBSTEPS
        found["sparse regression of velocities"] = ConservingSimulator(sparse, [], step, x)
    return found


def most_accurate(
    models: Mapping[str, nn.Module],
    rollouts: Rollouts,
    held_out: Trajectories,
    deviation: Float[Tensor, "d"],
) -> str:
    """Return the name of the simulator that fits held-out trajectories best.

    Rollouts from a noisy state show the noise rather than the errors of an accurate simulator.
    Equations are therefore compared by their residuals on whole trajectories, from initial states
    that are fitted to these. If no equations fit up to the noise, the simulator with the smallest
    rollout error is returned.
    """
    smallest = min(rollouts.mean(name) for name in models)
    near = [name for name in models if rollouts.mean(name) <= MAX_ROLLOUT_RATIO * smallest]
    try:
        windows = windows_of(held_out, longest_windows(held_out), MAX_WINDOWS, deviation)
    except ValueError:
        near, windows = [], None
    left = {}
    for name in near:
        model = models[name]
        if windows is not None and isinstance(model, ConservingSimulator):
            steps = model.steps(float(windows.gaps.median()))
            left[name] = windows.freedom * residual_ratio(model.field, windows, steps)
    best = min(left.values(), default=math.inf)
    if windows is None or best > MAX_SQUARES * windows.freedom:
        return min(models, key=rollouts.mean)
    return next(name for name, squares in left.items() if squares <= best + TIE)


def linear_field(training: Trajectories) -> FreeField | None:
    """Return the linear equations whose flow is the linear map from one state to the next.

    None without a common time step, or if no real equations have this flow.
    """
    fitted = linear_map(training)
    if fitted is None:
        return None
    matrix, gap = fitted
    d = matrix.shape[1]
    affine = torch.cat([matrix, torch.eye(d + 1, dtype=matrix.dtype)[:, d:]], 1)
    values, vectors = torch.linalg.eig(affine)
    inverse, rank = torch.linalg.inv_ex(vectors)
    if int(rank) or bool((values.abs() == 0).any()):
        return None
    logarithm = (vectors * values.log()) @ inverse / gap
    if float(logarithm.imag.abs().max()) > 1e-6 * float(logarithm.abs().max()):
        return None
    names = [f"x{i + 1}" for i in range(d)]
    library = Library("linear functions", names, [], polynomials(d, 1))
    coefficients = torch.cat([logarithm.real[d:, :d], logarithm.real[:d, :d]])
    active = torch.ones(d + 1, d, dtype=torch.bool)
    scale = coefficients.abs().clamp_min(1e-12)
    return FreeField(library, active, scale, coefficients[active])
