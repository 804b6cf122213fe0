"""What a user gives as trajectories: checked, with units of its own, some of it set aside."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.data.datasets import extrapolate_times
from symrazor.dynamics.trajectories import Trajectories, noise_variance, with_velocities

Given = Float[Tensor, "b t d"] | np.ndarray | Trajectories


FAR = 2.0
"""Entries further from zero than so many of their spreads are shifted to their mean."""
STILL, FAST = 0.08, 0.5
"""From one state to the next, relative to the size of states: a change below the first, noise left
out, is too small to learn from; one above the second is large, whatever the noise."""
SHORTEST = 4
"""States that are left of a trajectory of which only every s-th is taken, at least."""


@dataclass(frozen=True)
class Units:
    """Of a user's states and times; inside, states and their rates are about 1.

    One unit for all positions and one for all momenta: the map stays canonical up to time.

    Args:
        centre: [2n], where inside is zero.
        scale: [2n], the unit of each entry of a state.
        clock: the unit of time.
    """

    centre: Float[Tensor, "d"]
    scale: Float[Tensor, "d"]
    clock: float

    def scaled(self, data: Trajectories) -> Trajectories:
        """Trajectories in these units."""
        states = (data.states - self.centre) / self.scale
        return Trajectories(states, data.times / self.clock, data.observed)

    def quantity(
        self, A: Float[Tensor, "d d"], b: Float[Tensor, "d"]
    ) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d"]]:
        """A quadratic quantity of scaled states as one of the user's, of norm 1."""
        A = A / self.scale[:, None] / self.scale
        b = b / self.scale - A @ self.centre
        size = (A.square().sum() + b.square().sum()).sqrt()
        return A / size, b / size

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {"centre": self.centre.tolist(), "scale": self.scale.tolist(), "clock": self.clock}


def units(data: Trajectories) -> Units:
    """Units in which states, and their changes with time, are about 1.

    Raises:
        ValueError: states that do not tell.
    """
    centre, scale = _sizes(data)
    return Units(centre, scale, _pace(data, scale))


def _sizes(data: Trajectories) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
    """Centre and scale."""
    seen = data.states[data.observed]
    if len(seen) == 0:
        raise ValueError("expected states that were seen, got none: all are missing (NaN)")
    largest = seen.abs().max().clamp_min(1e-300)
    mean, spread = largest * (seen / largest).mean(0), largest * (seen / largest).std(0)
    centre = torch.where(mean.abs() > FAR * spread, mean, 0.0)
    sizes = [_size(part) for part in (seen - centre).chunk(2, dim=1)]
    if min(sizes) == 0:
        raise ValueError("expected positions and momenta that vary, got constant ones")
    n = data.phase // 2
    scale = torch.tensor([sizes[0]] * n + [sizes[1]] * n, dtype=torch.float64)
    return centre, scale


def _size(values: Tensor) -> float:
    """Root mean square, without overflow."""
    largest = float(values.abs().max())
    return largest * float((values / largest).square().mean().sqrt()) if largest > 0 else 0.0


def _pace(data: Trajectories, scale: Float[Tensor, "d"]) -> float:
    """The unit of time: that in which scaled states change by about 1.

    Of steps that are about as long as most: over a very short one nothing but noise is seen, over a
    very long one nothing of the rate.
    """
    steps, gaps = data.states.diff(dim=1) / scale, data.times.diff(dim=1)
    both = data.observed[:, 1:] & data.observed[:, :-1]
    if not both.any():
        raise ValueError("expected two states in a row that were both seen, got none")
    usual = gaps[both].median()
    both = both & (gaps >= usual / 2) & (gaps <= 2 * usual)
    rate = _size((steps / gaps[..., None])[both])
    if rate == 0:
        raise ValueError("expected states that change with time, got constant ones")
    return 1 / rate


def stride(data: Trajectories) -> int:
    """How many steps apart states should be: 1, or more where they hardly change in one step.

    States that were recorded often differ by noise and little else. The change over s steps, less
    the noise, should be seen; s is a power of two.
    """
    states = torch.where(data.observed[..., None], data.states, torch.nan) / _sizes(data)[1]
    noise = noise_variance(Trajectories(states, data.times, data.observed)).mean()
    noise = noise.nan_to_num(0.0, 0.0)  # no two states in a row do not tell
    found, length = 1, states.shape[1]
    while 2 * SHORTEST * found <= length:
        change = (states[:, found:] - states[:, :-found]).square().nanmean()
        if change >= FAST**2 or change - 2 * noise >= STILL**2:
            break
        found *= 2
    return found


def spaced(data: Trajectories, every: int) -> Trajectories:
    """Each trajectory as `every` interleaved ones, of every s-th state."""
    length = data.states.shape[1] // every * every

    def parted(values: Tensor) -> Tensor:
        parts: Tensor = values[:, :length].unflatten(1, (-1, every))
        return parts.transpose(1, 2).flatten(0, 1)

    return Trajectories(parted(data.states), parted(data.times), parted(data.observed))


def given(trajectories: Given, times: Any, positions: bool) -> Trajectories:
    """What the user gave, checked."""
    if isinstance(trajectories, Trajectories):
        if times is not None:
            raise ValueError("expected no times beside Trajectories, which have their own")
        if not positions:
            return trajectories
        states = torch.where(trajectories.observed[..., None], trajectories.states, torch.nan)
        times = trajectories.times
    elif times is None:
        raise ValueError("expected times [T] or [B, T] beside the states, got none")
    else:
        states = _tensor(trajectories, "states")
    clock = extrapolate_times(states, _tensor(times, "times"))
    return Trajectories.of(with_velocities(states, clock) if positions else states, clock)


def _tensor(values: Any, name: str) -> Tensor:
    try:
        found = torch.as_tensor(values).detach().cpu()
        if found.is_complex():
            raise TypeError("complex numbers")
        return found.double()
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
