"""Trajectories: which quantities are conserved, and a network that moves states by one step."""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.data import Dataset
from symrazor.data.resolution import moments, warn_if_coarse
from symrazor.discovery.question import Options
from symrazor.dynamics.config import DiscoverConfig
from symrazor.dynamics.discovery import discover as find
from symrazor.dynamics.mechanics import advance
from symrazor.dynamics.result import Discovered
from symrazor.dynamics.trained import ScaledSimulator
from symrazor.dynamics.trajectories import Trajectories
from symrazor.dynamics.units import as_trajectories
from symrazor.layers.path import traced
from symrazor.training.checkpoint import fingerprint

LONGEST, MOST = 0.1, 20
"""Longest step of the integrator within a step of the data, and how many of them at most."""


@dataclass(frozen=True)
class Dynamics:
    """What was found, and the step of the data.

    Args:
        found: by `symrazor.dynamics.discovery`.
        dt: time between two states, the median.
        seen: the data, with momenta.
    """

    found: Discovered
    dt: float
    seen: Trajectories

    @property
    def verdict(self) -> str:
        """In words."""
        return self.found.verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {**self.found.to_dict(), "dt": self.dt}

    def network(self) -> nn.Module:
        """Plain torch modules: states [n, 2k] in, states after `dt` out, in the data's units."""
        step = _Step(self.found.simulator(), self.dt)
        return nn.Sequential(traced(step, "Step")).eval()


def discover(data: Dataset, options: Options) -> Dynamics:
    """What `symrazor.dynamics.discovery` finds.

    Raises:
        ValueError: an odd number of coordinates, or times that do not fit or increase.
        KeyboardInterrupt: stopped; the same call goes on, if there is a run folder.
    """
    times = data.times
    if data.x.shape[2] % 2 and not options.positions:
        raise ValueError(
            f"{data.source} has an odd number of coordinates ({data.x.shape[2]}); trajectories "
            "need as many momenta as positions. Add the momenta, or use --positions for positions "
            "only, or --kind series."
        )
    if times is None:
        warnings.warn(f"no times in {data.source}: states are taken to be 1 apart", stacklevel=3)
        times = torch.arange(data.x.shape[1], dtype=torch.float64)
    gaps = times.double().diff(dim=-1)
    _warn_if_coarse(data, times, gaps)
    found = find(
        data.x,
        times,
        minutes=options.minutes,
        seed=options.seed,
        progress=options.progress,
        positions=options.positions,
        device=options.place(),
        steps=options.epochs or DiscoverConfig.steps,
        resume=_place(data.x, times, options),
    )
    seen = as_trajectories(data.x, times, options.positions)
    return Dynamics(found, float(gaps.median()), seen)


def _warn_if_coarse(data: Dataset, times: Tensor, gaps: Tensor) -> None:
    """Warn about coordinates and times whose changes are lost to rounding."""
    latest, gap = times.double().abs().max().reshape(1), gaps.median().reshape(1)
    warn_if_coarse(latest, gap, times.dtype, ["the times"], data.source)
    seen = data.x[~data.x.isnan().any(2)]
    if len(seen):
        names = [f"x[:, :, {k}]" for k in range(seen.shape[1])]
        warn_if_coarse(*moments(seen), data.x.dtype, names, data.source)


def _place(states: Tensor, times: Tensor, options: Options) -> Path | None:
    """Where the run is kept while it is unfinished; another one for other data or options."""
    asked = [options.minutes, options.seed, options.epochs, options.positions, options.device]
    numbers = torch.tensor([ord(c) for c in repr(asked)])
    return options.work(f"trajectories {fingerprint(states, times, numbers)[:12]}")


class _Step(nn.Module):
    """Move states by one fixed time: float64 units around a float32 simulator, on the CPU."""

    centre: Tensor
    scale: Tensor

    def __init__(self, simulator: ScaledSimulator, dt: float) -> None:
        super().__init__()
        self.simulator = copy.deepcopy(simulator.simulator).cpu().float()
        self.register_buffer("centre", simulator.centre.detach().cpu().double())
        self.register_buffer("scale", simulator.scale.detach().cpu().double())
        self.dt = dt / simulator.time_unit
        self.steps = min(MOST, max(1, round(self.dt / LONGEST + 0.5)))

    def forward(self, state: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        x = ((state.double() - self.centre) / self.scale).float().unsqueeze(0)
        field = self.simulator.hamiltonian.field
        x = advance(self.simulator.integrator, field, x, self.dt, self.steps)
        return x.squeeze(0).double() * self.scale + self.centre
