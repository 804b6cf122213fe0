"""States of trajectories for the test of conserved quantities, in folds of whole trajectories."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.noise import NoiseEstimate, without_gaps
from symrazor.dynamics.trajectories import Trajectories

FOLDS = 4
MIN_TRAJECTORIES = 8
MAX_STATES = 4000
"""Largest number of states that are used."""
SLOW_DEGREE = 3
"""Degree of the polynomials in time that make up the slow part of a variation."""
MIN_LENGTH = SLOW_DEGREE + 1
"""Fewest states of a trajectory that is tested."""


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


def sample_states(
    data: Trajectories, noise: NoiseEstimate, seed: int, min_trajectories: int = 1
) -> Sample:
    """Choose at most `MAX_STATES` states, evenly along time, and divide trajectories into folds.

    Fewer than `min_trajectories` of `MIN_LENGTH` states or more raise ValueError.
    """
    states, _ = without_gaps(data)
    lengths = states.isfinite().all(-1).sum(1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(states), generator=generator)
    order = order[lengths[order] >= MIN_LENGTH]
    if len(order) < min_trajectories:
        raise ValueError(
            f"{len(order)} trajectories have {MIN_LENGTH} states or more; at least "
            f"{min_trajectories} are needed for a test."
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
    return Sample(
        x,
        torch.cat(owner),
        torch.arange(len(order)) % FOLDS,
        torch.cat(slow),
        noise.deviation(x),
        noise.freedom,
    )


def _slow_basis(count: int) -> Float[Tensor, "t k"]:
    """Return orthonormal polynomials of degree 1 to `SLOW_DEGREE` on equal steps."""
    t = torch.linspace(-1, 1, count, dtype=torch.float64)
    powers = torch.stack([t**k for k in range(SLOW_DEGREE + 1)], 1)
    result: Tensor = torch.linalg.qr(powers)[0][:, 1:]
    return result
