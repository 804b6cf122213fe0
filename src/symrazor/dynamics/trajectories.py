"""Trajectories and the transitions in them."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.dynamics.phase import freedom
from symrazor.dynamics.reference import solve
from symrazor.dynamics.systems import System


@dataclass(frozen=True)
class Trajectories:
    """B trajectories of T states each.

    Args:
        states: [B, T, 2n], float64.
        times: [B, T], increasing along each row.
        observed: [B, T], False where a state is missing.
    """

    states: Float[Tensor, "b t d"]
    times: Float[Tensor, "b t"]
    observed: Bool[Tensor, "b t"]

    @classmethod
    def of(cls, states: Tensor, times: Tensor, observed: Tensor | None = None) -> "Trajectories":
        """Check and complete: shared times are repeated, missing states found by their NaN.

        Raises:
            ValueError: not [B, T, 2n], times that do not fit or do not increase, infinite states;
                the trajectory and the row are named.
        """
        if states.ndim != 3 or states.shape[1] < 2:
            raise ValueError(
                "expected states [trajectories, times >= 2, 2n], got shape "
                f"{tuple(states.shape)}; do stack trajectories of equal length, or pad with NaN"
            )
        freedom(states.shape[2])
        wide, clock = states.double(), times.double()
        if clock.ndim == 1:
            clock = clock.expand(len(wide), -1)
        if clock.shape != wide.shape[:2]:
            raise ValueError(
                f"expected times [{wide.shape[1]}] or {list(wide.shape[:2])}, "
                f"got {list(times.shape)}"
            )
        _check_clock(clock)
        infinite = torch.isinf(wide).any(-1)
        if infinite.any():
            b, t = (int(i) for i in infinite.nonzero()[0])
            raise ValueError(f"expected finite states, got infinity in trajectory {b}, row {t}")
        seen = torch.isfinite(wide).all(-1)
        if observed is not None:
            if observed.shape != seen.shape or observed.dtype != torch.bool:
                raise ValueError(
                    f"expected observed {list(seen.shape)} of True and False, got "
                    f"{list(observed.shape)} of {observed.dtype}"
                )
            seen = seen & observed
        return cls(wide, clock, seen)

    @property
    def phase(self) -> int:
        """Entries of a state."""
        return self.states.shape[2]

    def __len__(self) -> int:
        return len(self.states)

    def noisy(self, variance: float, seed: int) -> "Trajectories":
        """The same with independent normal noise on every state.

        Raises:
            ValueError: a variance below 0.
        """
        _check_variance(variance)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.states.shape, generator=generator, dtype=torch.float64)
        return Trajectories(self.states + variance**0.5 * noise, self.times, self.observed)

    def to(self, device: torch.device | str) -> "Trajectories":
        """The same on another device."""
        parts = (self.states, self.times, self.observed)
        return Trajectories(*(part.to(device) for part in parts))


def _check_variance(variance: float) -> None:
    if not variance >= 0:
        raise ValueError(f"expected a variance of noise of 0 or more, got {variance}")


def _check_clock(clock: Float[Tensor, "b t"]) -> None:
    wrong = ~(clock.diff(dim=1) > 0) | clock[:, 1:].isinf()  # also NaN
    if wrong.any():
        b, t = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"expected finite, increasing times, got {clock[b, t]:g} then {clock[b, t + 1]:g} in "
            f"trajectory {b}, rows {t} and {t + 1}"
        )


@dataclass(frozen=True)
class Transitions:
    """N data: from a state over a time to the H states that follow.

    Args:
        x: [N, 2n], where they start.
        y: [N, H, 2n], what was seen.
        gaps: [N, H], the time from the state before.
        seen: [N, H], 1 where there is something to compare with, else 0.
    """

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n h d"]
    gaps: Float[Tensor, "n h"]
    seen: Float[Tensor, "n h"]

    def __len__(self) -> int:
        return len(self.x)

    def at(self, index: Tensor) -> "Transitions":
        """Some of them."""
        return Transitions(self.x[index], self.y[index], self.gaps[index], self.seen[index])

    def to(self, *where: torch.device | torch.dtype | str) -> "Transitions":
        """On another device or of another type."""
        parts = [self.x, self.y, self.gaps, self.seen]
        for place in where:
            parts = [part.to(place) for part in parts]
        return Transitions(*parts)


def transitions(
    data: Trajectories, noise: float = 0.0, seed: int = 0, horizon: int = 1
) -> Transitions:
    """Every window of `horizon` steps that starts at a state that was seen.

    Args:
        data: the trajectories.
        noise: variance of noise added to the targets, drawn once.
        seed: of the noise.
        horizon: steps of a window; 1 is the paper's.

    Raises:
        ValueError: no window is left, or a variance below 0.
    """
    _check_variance(noise)
    length = data.states.shape[1]
    if not 1 <= horizon < length:
        raise ValueError(f"expected a horizon of 1 to {length - 1} steps, got {horizon}")
    starts = length - horizon
    index = torch.arange(starts)[:, None] + torch.arange(1, horizon + 1)
    x = data.states[:, :starts].flatten(0, 1)
    y = data.states[:, index].flatten(0, 1)
    gaps = data.times.diff(dim=1)[:, index - 1].flatten(0, 1)
    seen = data.observed[:, index].flatten(0, 1)
    use = data.observed[:, :starts].flatten() & seen.any(1)
    if not use.any():
        raise ValueError("expected two states in a row that were both seen, got none")
    generator = torch.Generator().manual_seed(seed)
    y = y + noise**0.5 * torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device)
    return Transitions(x[use], torch.nan_to_num(y)[use], gaps[use], seen.to(y)[use])


def simulate(
    system: System,
    count: int,
    steps: int,
    dt: float,
    seed: int,
    tolerance: float = 1e-10,
) -> Trajectories:
    """`count` true trajectories of `steps` steps from the system's own starts.

    Raises:
        ValueError: no trajectory or no step, or `dt` that is not positive.
        FloatingPointError: the tolerance is not reached.
    """
    if count < 1 or steps < 1 or not dt > 0:
        raise ValueError(
            f"expected count >= 1, steps >= 1 and dt > 0, got {count}, {steps} and {dt}"
        )
    generator = torch.Generator().manual_seed(seed)
    start = system.start(count, generator)
    times = dt * torch.arange(steps + 1, dtype=torch.float64)
    return Trajectories.of(solve(system.field, start, times, tolerance), times)
