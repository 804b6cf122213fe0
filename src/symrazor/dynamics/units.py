"""Preparation of a user's trajectories: validation, units, stride and split."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.data.datasets import extrapolate_times
from symrazor.dynamics.trajectories import Trajectories, noise_variance, with_velocities

TrajectoryInput = Float[Tensor, "b t d"] | np.ndarray | Trajectories

MAX_OFFSET_STDS = 2.0
"""Entries whose mean is further from zero than this many standard deviations are centred."""
MIN_STEP_CHANGE = 0.08
"""Smallest change per step to learn from, without noise and relative to the size of states."""
LARGE_STEP_CHANGE = 0.5
"""Change per step, relative to the size of states, that is large enough whatever the noise."""
MIN_STATES = 4
"""States that every trajectory keeps, at least, when states are taken further apart."""


@dataclass(frozen=True)
class Units:
    """Units in which states and their rates of change are about 1.

    There is one unit for all positions and one for all momenta, so that scaling is canonical up to
    a change of the unit of time.

    Args:
        centre: [2n], the state that is mapped to zero.
        scale: [2n], the unit of each entry of a state.
        time: the unit of time.
    """

    centre: Float[Tensor, "d"]
    scale: Float[Tensor, "d"]
    time: float

    def to_scaled(self, data: Trajectories) -> Trajectories:
        """Return trajectories in these units."""
        states = (data.states - self.centre) / self.scale
        return Trajectories(states, data.times / self.time, data.observed)

    def to_user(
        self, A: Float[Tensor, "d d"], b: Float[Tensor, "d"]
    ) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d"]]:
        """Return a quadratic quantity of scaled states as one of the user's states, of norm 1."""
        A = A / self.scale[:, None] / self.scale
        b = b / self.scale - A @ self.centre
        norm = (A.square().sum() + b.square().sum()).sqrt()
        return A / norm, b / norm

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {"centre": self.centre.tolist(), "scale": self.scale.tolist(), "clock": self.time}


def choose_units(data: Trajectories) -> Units:
    """Choose units in which states and their rates of change are about 1.

    Raises:
        ValueError: no state is observed, or the states are constant.
    """
    centre, scale = _centre_and_scale(data)
    return Units(centre, scale, _time_unit(data, scale))


def _centre_and_scale(data: Trajectories) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
    states = data.states[data.observed]
    if len(states) == 0:
        raise ValueError("No state is observed: all are missing (NaN).")
    # Divide by the largest entry first, so that no square overflows.
    largest = states.abs().max().clamp_min(1e-300)
    mean, spread = largest * (states / largest).mean(0), largest * (states / largest).std(0)
    centre = torch.where(mean.abs() > MAX_OFFSET_STDS * spread, mean, 0.0)
    sizes = [_root_mean_square(half) for half in (states - centre).chunk(2, dim=1)]
    if min(sizes) == 0:
        raise ValueError("Positions or momenta are constant: there is no motion to learn from.")
    n = data.phase // 2
    scale = torch.tensor([sizes[0]] * n + [sizes[1]] * n, dtype=torch.float64)
    return centre, scale


def _root_mean_square(values: Tensor) -> float:
    """Return the root mean square without overflow."""
    largest = float(values.abs().max())
    return largest * float((values / largest).square().mean().sqrt()) if largest > 0 else 0.0


def _time_unit(data: Trajectories, scale: Float[Tensor, "d"]) -> float:
    """Return the time in which scaled states change by about 1.

    Only steps between half and twice the median are used: very short ones show mainly noise, very
    long ones say little about the rate.
    """
    steps, gaps = data.states.diff(dim=1) / scale, data.times.diff(dim=1)
    use = data.observed[:, 1:] & data.observed[:, :-1]
    if not use.any():
        raise ValueError("No two consecutive states are observed: there is nothing to learn from.")
    median = gaps[use].median()
    use = use & (gaps >= median / 2) & (gaps <= 2 * median)
    rate = _root_mean_square((steps / gaps[..., None])[use])
    if rate == 0:
        raise ValueError("States are constant in time: there is no motion to learn from.")
    return 1 / rate


def choose_stride(data: Trajectories) -> int:
    """Return the stride, a power of two, at which states change visibly from one to the next.

    States that were recorded densely differ by little but noise. The change over one stride,
    without the noise, should be at least `MIN_STEP_CHANGE`.
    """
    states = torch.where(data.observed[..., None], data.states, torch.nan)
    states = states / _centre_and_scale(data)[1]
    noise = noise_variance(Trajectories(states, data.times, data.observed)).mean()
    noise = noise.nan_to_num(0.0, 0.0)  # infinite if no two consecutive states are observed
    stride, length = 1, states.shape[1]
    while 2 * MIN_STATES * stride <= length:
        change = (states[:, stride:] - states[:, :-stride]).square().nanmean()
        if change >= LARGE_STEP_CHANGE**2 or change - 2 * noise >= MIN_STEP_CHANGE**2:
            break
        stride *= 2
    return stride


def interleave(data: Trajectories, stride: int) -> Trajectories:
    """Split each trajectory into `stride` interleaved ones of every `stride`-th state."""
    length = data.states.shape[1] // stride * stride

    def split_steps(values: Tensor) -> Tensor:
        parts: Tensor = values[:, :length].unflatten(1, (-1, stride))
        return parts.transpose(1, 2).flatten(0, 1)

    return Trajectories(
        split_steps(data.states), split_steps(data.times), split_steps(data.observed)
    )


def as_trajectories(trajectories: TrajectoryInput, times: Any, positions: bool) -> Trajectories:
    """Validate a user's states and times.

    Args:
        trajectories: states, or `Trajectories`.
        times: of the states; None for `Trajectories`.
        positions: whether states are positions only; velocities are appended.

    Raises:
        ValueError: invalid states or times, or times that are missing or given twice.
    """
    if isinstance(trajectories, Trajectories):
        if times is not None:
            raise ValueError("Trajectories have their own times; leave out times=.")
        if not positions:
            return trajectories
        states = torch.where(trajectories.observed[..., None], trajectories.states, torch.nan)
        times = trajectories.times
    elif times is None:
        raise ValueError("Pass the times of the states, of shape [T] or [B, T].")
    else:
        states = _as_tensor(trajectories, "states")
    clock = extrapolate_times(states, _as_tensor(times, "times"))
    return Trajectories.of(with_velocities(states, clock) if positions else states, clock)


def _as_tensor(values: Any, name: str) -> Tensor:
    try:
        tensor = torch.as_tensor(values).detach().cpu()
        if tensor.is_complex():
            raise TypeError("complex numbers")
        return tensor.double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be a tensor or array of real numbers, got {type(values).__name__} "
            f"({error}). Pad trajectories of unequal length with NaN, or read a file with "
            "read_trajectories."
        ) from error


def split(data: Trajectories, seed: int) -> tuple[Trajectories, Trajectories]:
    """Hold out a random fifth of the trajectories; with fewer than five, use all for both parts."""
    count = len(data)
    if count < 5:
        return data, data
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held_out, training = order[: count // 5], order[count // 5 :]

    def select(index: Tensor) -> Trajectories:
        return Trajectories(data.states[index], data.times[index], data.observed[index])

    return select(training), select(held_out)
