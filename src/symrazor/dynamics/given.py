"""What a user gives as trajectories: checked, with units of its own, some of it set aside."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.files import with_velocities
from symrazor.dynamics.trajectories import Trajectories

Given = Float[Tensor, "b t d"] | np.ndarray | Trajectories


def units(data: Trajectories) -> Float[Tensor, "d"]:
    """One unit for all positions, one for all momenta: the map stays canonical up to time."""
    seen = data.states[data.observed]
    if len(seen) == 0:
        raise ValueError("expected states that were seen, got none: all are missing (NaN)")
    sizes = [_size(part) for part in seen.chunk(2, dim=1)]
    if min(sizes) == 0:
        raise ValueError("expected positions and momenta that vary, got only zeros")
    n = data.phase // 2
    return torch.tensor([sizes[0]] * n + [sizes[1]] * n, dtype=torch.float64)


def _size(values: Tensor) -> float:
    """Root mean square, without overflow."""
    largest = float(values.abs().max())
    return largest * float((values / largest).square().mean().sqrt()) if largest > 0 else 0.0


def pace(data: Trajectories, scale: Float[Tensor, "d"]) -> float:
    """The unit of time: that in which scaled states change by about 1."""
    steps = data.states.diff(dim=1) / scale
    rates = steps / data.times.diff(dim=1)[..., None]
    both = data.observed[:, 1:] & data.observed[:, :-1]
    if not both.any():
        raise ValueError("expected two states in a row that were both seen, got none")
    rate = _size(rates[both])
    if rate == 0:
        raise ValueError("expected states that change with time, got constant ones")
    return 1 / rate


def given(trajectories: Given, times: Any, positions: bool) -> Trajectories:
    """What the user gave, checked."""
    if isinstance(trajectories, Trajectories):
        if times is not None:
            raise ValueError("expected no times beside Trajectories, which have their own")
        if not positions:
            return trajectories
        states, times = trajectories.states, trajectories.times
    elif times is None:
        raise ValueError("expected times [T] or [B, T] beside the states, got none")
    else:
        states = _tensor(trajectories, "states")
    clock = _tensor(times, "times")
    return Trajectories.of(with_velocities(states, clock) if positions else states, clock)


def _tensor(values: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(values).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"expected {name} as a tensor or array of numbers, got {type(values).__name__} "
            f"({error}); do pad trajectories of unequal length with NaN, or read a file with "
            "read_trajectories"
        ) from error


def split(data: Trajectories, seed: int) -> tuple[Trajectories, Trajectories]:
    """Every fifth trajectory is set aside; with fewer than five, all are used for both."""
    count = len(data)
    if count < 5:
        return data, data
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    aside, kept = order[: count // 5], order[count // 5 :]

    def pick(index: Tensor) -> Trajectories:
        return Trajectories(data.states[index], data.times[index], data.observed[index])

    return pick(kept), pick(aside)
