"""Choose the simulator that a user gets: the most accurate one on trajectories set aside."""

import torch
from jaxtyping import Float
from torch import Tensor

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
from symrazor.dynamics.trajectories import Trajectories

PREFERENCE = 1.02
"""Largest error of the first simulator, which conserves what was found, relative to the best."""
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


def most_accurate(names: list[str], rollouts: Rollouts) -> str:
    """Return the name with the smallest error; the first one if it is nearly as accurate."""
    best = min(names, key=rollouts.mean)
    nearly = rollouts.mean(names[0]) <= PREFERENCE * rollouts.mean(best)
    return names[0] if nearly else best


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
