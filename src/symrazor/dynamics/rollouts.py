"""Compare simulators by long rollouts from the first states of trajectories set aside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.fields import FreeField
from symrazor.dynamics.libraries import libraries_for
from symrazor.dynamics.mechanics import rk4
from symrazor.dynamics.regression import regress, velocity_estimates
from symrazor.dynamics.trajectories import Trajectories, observed_states

Simulate = Callable[[Tensor, float], Tensor]
"""States and a time -> states."""
MAX_TRAJECTORIES, MAX_ROLLOUT = 20, 100
"""Trajectories and time steps that are compared, at most."""
SPARSE_LIBRARY = "cubic functions"
BASELINE_SUBSTEPS = 4


@dataclass(frozen=True)
class Rollouts:
    """Errors of simulators along time.

    Args:
        times: [t], mean time since the first state.
        errors: name -> [t], root mean square error relative to the spread of the coordinates; at
            most 1 for each entry of a state.
        noise: the same for the noise of the states alone.
    """

    times: list[float]
    errors: dict[str, list[float]]
    noise: float

    def mean(self, name: str) -> float:
        """Return the root mean square over all times."""
        values = torch.tensor(self.errors[name])
        return float(values.square().mean().sqrt())

    def only(self, names: Sequence[str]) -> "Rollouts":
        """Return the errors of these simulators."""
        return replace(self, errors={name: self.errors[name] for name in names})

    def to_dict(self) -> dict[str, object]:
        """Return plain numbers for JSON."""
        return {"times": self.times, "errors": self.errors, "noise": self.noise}


@torch.no_grad()
def compare_rollouts(
    simulators: dict[str, Simulate], data: Trajectories, deviation: Float[Tensor, "d"]
) -> Rollouts:
    """Return the errors of simulators that start at the first observed state."""
    states, clock = data.states.double().cpu(), data.times.double().cpu()
    observed = data.observed.cpu()
    use = observed[:, 0].nonzero()[:MAX_TRAJECTORIES, 0]
    steps = min(MAX_ROLLOUT, states.shape[1] - 1)
    spread = observed_states(data).std(0).clamp_min(1e-300)
    errors: dict[str, list[float]] = {}
    for name, simulate in simulators.items():
        errors[name] = []
        x = states[use, 0]
        for k in range(1, steps + 1):
            gaps = clock[use, k] - clock[use, k - 1]
            x = _advance(simulate, x, gaps)
            error = ((x - states[use, k]) / spread).nan_to_num(1.0, 1.0, -1.0).clamp(-1, 1)
            seen = observed[use, k]
            value = error[seen].square().mean().sqrt() if bool(seen.any()) else torch.nan
            errors[name].append(float(value))
    times = (clock[use, 1 : steps + 1] - clock[use, :1]).mean(0).tolist() if len(use) else []
    noise = float((deviation / spread).square().mean().sqrt())
    return Rollouts(times, errors, noise)


def _advance(simulate: Simulate, x: Tensor, gaps: Float[Tensor, "b"]) -> Tensor:
    """Advance each state by its own time."""
    if float(gaps.max() - gaps.min()) <= 1e-9 * float(gaps.max()):
        return simulate(x, float(gaps[0]))
    moved = [simulate(row[None], float(gap)) for row, gap in zip(x, gaps, strict=True)]
    return torch.cat(moved)


def baselines(
    training: Trajectories, deviation: Float[Tensor, "d"], max_functions: int = 120
) -> dict[str, Simulate]:
    """Return linear least squares from one state to the next, and a sparse regression.

    The regression chooses among polynomials to degree three, for velocities of local polynomials.
    Without a common time step there is no linear map.
    """
    found: dict[str, Simulate] = {}
    fitted = linear_map(training)
    if fitted is not None:
        matrix, gap = fitted

        def linear(x: Tensor, t: float) -> Tensor:
            for _ in range(max(1, round(t / gap))):
                x = x @ matrix[:-1] + matrix[-1]
            return x

        found["linear least squares"] = linear
    field = sparse_field(training, deviation, max_functions)
    if field is not None:

        def sparse(x: Tensor, t: float) -> Tensor:
            for _ in range(BASELINE_SUBSTEPS):
                x = rk4(field, x, t / BASELINE_SUBSTEPS)
            return x

        found["sparse regression"] = sparse
    return found


def linear_map(training: Trajectories) -> tuple[Float[Tensor, "e d"], float] | None:
    """Return the affine map from one state to the next, and the time step; None without one."""
    states, times = training.states.double().cpu(), training.times.double().cpu()
    gaps = times.diff(dim=1)
    gap = float(gaps.median())
    both = (training.observed[:, 1:] & training.observed[:, :-1]).cpu()
    enough = int(both.sum()) > 2 * states.shape[2]
    if not enough or float((gaps - gap).abs().max()) > 1e-6 * gap:
        return None
    before, after = states[:, :-1][both], states[:, 1:][both]
    rows = torch.cat([before, torch.ones_like(before[:, :1])], 1)
    size = rows.std(0).clamp_min(1e-12 * rows.abs().max())
    size[-1] = 1.0
    solution = torch.linalg.lstsq(rows / size, after, driver="gelsd").solution
    return solution / size[:, None], gap


def sparse_field(
    training: Trajectories, deviation: Float[Tensor, "d"], max_functions: int = 120
) -> FreeField | None:
    """Regress velocities on polynomials to degree three; None if there are too many."""
    x, velocity = velocity_estimates(training, deviation)
    names = [f"x{i + 1}" for i in range(x.shape[1])]
    libraries = {library.title: library for library in libraries_for(x, names)}
    library = libraries.get(SPARSE_LIBRARY)
    if library is None or len(library) > max_functions:
        return None
    return regress(library, x, velocity)
