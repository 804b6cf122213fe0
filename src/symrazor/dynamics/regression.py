"""First estimates of the parameters of vector fields, by regression of velocities."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.fields import FreeField, HamiltonianField, NewtonianField, ParametricField
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import symplectic_form
from symrazor.dynamics.noise import without_gaps
from symrazor.dynamics.trajectories import Trajectories, observed_states

LOW_NOISE = 0.005
"""Noise, relative to the spread of a coordinate, below which velocities need no smoothing."""
MAX_NOT_VELOCITY = 0.3
"""Largest squared difference between the second half of the coordinates and the velocities of the
first half, relative to these."""
RANK_TOLERANCE = 1e-8


def velocity_estimates(
    data: Trajectories, deviation: Float[Tensor, "d"]
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """Return states and velocities by local polynomials: a smooth one, or exact if noise is low."""
    states, times = without_gaps(data)
    low = bool((deviation < LOW_NOISE * observed_states(data).std(0)).all())
    size = min(7 if low else 5, (states.shape[1] + 1) // 2 * 2 - 1)
    degree = size - 1 if low else min(3, size - 1)
    x, t = states.unfold(1, size, 1).mT.flatten(0, 1), times.unfold(1, size, 1).flatten(0, 1)
    use = x.isfinite().all(-1).all(-1)
    x, t = x[use], t[use]
    t = t - t[:, size // 2, None]
    unit = t.abs().amax(1, keepdim=True)
    powers = torch.stack([(t / unit) ** k for k in range(degree + 1)], -1)
    solution = torch.linalg.lstsq(powers, x, driver="gels").solution
    return solution[:, 0], solution[:, 1] / unit


def regress(
    library: Library,
    x: Float[Tensor, "n d"],
    velocity: Float[Tensor, "n d"],
    sparse: bool = True,
) -> FreeField:
    """Regress velocities on the functions of a library; `sparse` removes unneeded terms."""
    values = library(x)
    values = torch.cat([torch.ones_like(x[:, :1]), values], 1)
    size = values.square().mean(0).sqrt().clamp_min(1e-300)
    unit = velocity.square().mean(0).sqrt().clamp_min(1e-300)
    scaled, target = values / size, velocity / unit
    active = torch.ones(len(size), x.shape[1], dtype=torch.bool)
    coefficients = torch.zeros(len(size), x.shape[1], dtype=x.dtype)
    for i in range(x.shape[1]):
        active[:, i], coefficients[:, i] = _regression(scaled, target[:, i], sparse)
    scale = unit / size[:, None]
    return FreeField(library, active, scale, (coefficients * scale)[active])


def _regression(values: Tensor, target: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
    """Return used terms and their coefficients; `sparse` removes terms without a clear effect."""
    active = torch.ones(values.shape[1], dtype=torch.bool)
    coefficients = torch.zeros(values.shape[1], dtype=values.dtype)
    for _ in range(6):
        part = values[:, active]
        solution = torch.linalg.lstsq(part, target[:, None], driver="gelsd").solution[:, 0]
        left = (target - part @ solution).square().sum() / max(1, len(part) - part.shape[1])
        gram = torch.linalg.pinv(part.mT @ part, hermitian=True)
        errors = (gram.diagonal().clamp_min(0) * left).sqrt()
        coefficients = torch.zeros_like(coefficients)
        coefficients[active] = solution
        kept = (solution.abs() > 2 * errors) & (solution.abs() > 1e-3)
        if not sparse or bool(kept.all()) or not bool(kept.any()):
            break
        active[active.clone()] = kept
        coefficients = torch.where(active, coefficients, 0.0)
    return active, coefficients


def regress_energy(
    library: Library,
    x: Float[Tensor, "n d"],
    velocity: Float[Tensor, "n d"],
    sparse: bool = True,
) -> HamiltonianField:
    """Regress velocities on the fields of the functions of a library, see `regress`."""
    fields = library.gradients(x) @ symplectic_form(x.shape[1] // 2).mT  # [n, m, d]
    unit = velocity.square().mean(0).sqrt().clamp_min(1e-300)
    rows = (fields / unit).transpose(1, 2).flatten(0, 1)
    size = rows.square().mean(0).sqrt().clamp_min(1e-300)
    active, coefficients = _regression(rows / size, (velocity / unit).flatten(), sparse)
    scale = 1 / size
    used = library.subset(active.nonzero()[:, 0].tolist() or [0])
    kept = active if bool(active.any()) else torch.arange(len(active)) == 0
    return HamiltonianField(used, scale[kept], (coefficients * scale)[kept])


def regress_masses(
    libraries: Sequence[Library], x: Float[Tensor, "n d"], velocity: Float[Tensor, "n d"]
) -> list[tuple[str, ParametricField]]:
    """Return potentials and masses for positions and velocities, for libraries where they fit."""
    n = x.shape[1] // 2
    left = (velocity[:, :n] - x[:, n:]).square().mean() / x[:, n:].square().mean()
    if x.shape[1] % 2 or n < 2 or float(left) > MAX_NOT_VELOCITY:
        return []
    fields: list[tuple[str, ParametricField]] = []
    for library in libraries:
        gradients = library.gradients(x)
        of_positions = (gradients[:, :, n:].abs().amax((0, 2)) == 0).nonzero()[:, 0].tolist()
        potential = _regress_potential(library.subset(of_positions), x, velocity[:, n:])
        if potential is not None:
            fields.append((f"masses and potential: {library.title}", potential))
    return fields


def _regress_potential(
    library: Library, x: Float[Tensor, "n d"], acceleration: Float[Tensor, "n k"]
) -> NewtonianField | None:
    """Return the masses for which forces are most nearly a gradient; None if one is negative."""
    n = acceleration.shape[1]
    unit = acceleration.square().mean(0).sqrt().clamp_min(1e-300)
    force = torch.diag_embed(acceleration / unit).flatten(0, 1)  # columns: of each mass
    rows = -library.gradients(x)[:, :, :n].transpose(1, 2).flatten(0, 1)
    size = rows.square().mean(0).sqrt().clamp_min(1e-300)
    vectors, values, _ = torch.linalg.svd(rows / size, full_matrices=False)
    basis = vectors[:, values > RANK_TOLERANCE * values[:1]]
    left = force - basis @ (basis.mT @ force)
    mass = torch.linalg.eigh(left.mT @ left)[1][:, 0] / unit
    mass = mass / mass[0]
    if not bool((mass > 0).all() & mass.isfinite().all()):
        return None
    active, coefficients = _regression(rows / size, (acceleration * mass).flatten(), sparse=True)
    if not bool(active.any()):
        return None
    scale, inverse = 1 / size[active], 1 / mass[1:]
    return NewtonianField(
        library.subset(active.nonzero()[:, 0].tolist()),
        torch.cat([scale, inverse]),
        torch.cat([coefficients[active] * scale, inverse]),
    )
