"""Find conserved quantities in trajectories, and animate the learned dynamics."""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.data import Dataset
from symrazor.data.arrays import moments, warn_if_coarse
from symrazor.discovery.question import Options
from symrazor.dynamics.config import DiscoverConfig
from symrazor.dynamics.conserving import ConservingSimulator
from symrazor.dynamics.discovery import as_trajectories
from symrazor.dynamics.discovery import discover as discover_dynamics
from symrazor.dynamics.figures import ANIMATION_FRAMES, motion_animation
from symrazor.dynamics.mechanics import advance
from symrazor.dynamics.network_result import ScaledSimulator
from symrazor.dynamics.result import Discovered
from symrazor.dynamics.trajectories import Trajectories, observed_states
from symrazor.layers.path import traced
from symrazor.training.checkpoint import fingerprint

MAX_STEP, MAX_STEPS = 0.1, 20
"""Largest step of the integrator, and largest number of its steps per time step of the data."""
MAX_ANIMATED = 4
"""Largest number of trajectories in an animation."""


@dataclass(frozen=True)
class Dynamics:
    """The learned dynamics of trajectories.

    Args:
        discovered: result of `symrazor.dynamics.discovery`.
        dt: median time between two states.
        observed: the data, with momenta.
    """

    discovered: Discovered
    dt: float
    observed: Trajectories

    @property
    def verdict(self) -> str:
        """The conserved quantities in words."""
        return self.discovered.verdict

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        x = observed_states(self.observed)
        sizes = {"scale": x.std(0).tolist(), "centre": x.mean(0).tolist()}
        return {**self.discovered.to_dict(), **sizes, "dt": self.dt}

    @property
    def size(self) -> int:
        """Number of coordinates of a state."""
        return self.observed.phase

    def network(self) -> nn.Module:
        """Return plain torch modules that map states [n, 2k] to states after `dt`."""
        simulator = self.discovered.simulator()
        step: nn.Module
        if isinstance(simulator, ConservingSimulator):
            step = _Step(simulator, self.dt)
        else:
            assert isinstance(simulator, ScaledSimulator)
            step = _NetworkStep(simulator, self.dt)
        plain = nn.Sequential(traced(step, "Step")).eval()
        for module in plain.modules():  # safetensors stores contiguous tensors only
            for key, value in module.named_buffers(recurse=False):
                module.register_buffer(key, value.clone(memory_format=torch.contiguous_format))
        return plain


def learn_dynamics(data: Dataset, options: Options) -> Dynamics:
    """Learn the dynamics of trajectories and their conserved quantities.

    Raises:
        ValueError: a single coordinate, or times that do not fit or increase.
        KeyboardInterrupt: stopped; with a run folder, the same call resumes.
    """
    times, coordinates = data.times, data.x.shape[2]
    if coordinates == 1 and not options.positions:
        raise ValueError(
            f"{data.source} has one coordinate, but the state of a moving system has at least two. "
            "Add the momentum, use --positions for positions only, or use --kind series."
        )
    if times is None:
        warnings.warn(f"{data.source} has no times: states are assumed to be 1 apart", stacklevel=3)
        times = torch.arange(data.x.shape[1], dtype=torch.float64)
    gaps = times.double().diff(dim=-1)
    _warn_if_coarse(data, times, gaps)
    discovered = discover_dynamics(
        data.x,
        times,
        minutes=options.minutes,
        seed=options.seed,
        progress=options.progress,
        positions=options.positions,
        device=options.resolved_device(),
        steps=options.epochs or DiscoverConfig.steps,
        network=None if options.epochs is None else True,
        resume=_resume_folder(data.x, times, options),
    )
    return Dynamics(
        discovered, float(gaps.median()), as_trajectories(data.x, times, options.positions)
    )


def _warn_if_coarse(data: Dataset, times: Tensor, gaps: Tensor) -> None:
    """Warn about coordinates and times whose changes are lost to rounding."""
    latest, gap = times.double().abs().max().reshape(1), gaps.median().reshape(1)
    warn_if_coarse(latest, gap, times.dtype, ["the times"], data.source)
    observed = data.x[~data.x.isnan().any(2)]
    if len(observed):
        names = [f"x[:, :, {k}]" for k in range(observed.shape[1])]
        warn_if_coarse(*moments(observed), data.x.dtype, names, data.source)


def _resume_folder(states: Tensor, times: Tensor, options: Options) -> Path | None:
    """Return the folder of the unfinished run; it depends on data and options."""
    if options.out is None:
        return None
    key = [options.minutes, options.seed, options.epochs, options.positions, options.device]
    characters = torch.tensor([ord(c) for c in repr(key)])
    return options.unfinished_folder(f"trajectories {fingerprint(states, times, characters)[:12]}")


class _Step(nn.Module):
    """Move states by one fixed time, on the CPU."""

    def __init__(self, simulator: ConservingSimulator, dt: float) -> None:
        super().__init__()
        self.simulator, self.dt = simulator, dt
        self.steps = simulator.steps(dt)
        # Plain networks are expected to have a parameter, which tells their type.
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)

    def forward(self, state: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return self.simulator.advance(state.double() * self.one, self.dt, self.steps)


class _NetworkStep(nn.Module):
    """Move states by one fixed time: float64 units around a float32 simulator, on the CPU."""

    centre: Tensor
    scale: Tensor

    def __init__(self, simulator: ScaledSimulator, dt: float) -> None:
        super().__init__()
        self.simulator = copy.deepcopy(simulator.simulator).cpu().float()
        self.register_buffer("centre", simulator.centre.detach().cpu().double())
        self.register_buffer("scale", simulator.scale.detach().cpu().double())
        self.dt = dt / simulator.time_unit
        self.steps = min(MAX_STEPS, max(1, round(self.dt / MAX_STEP + 0.5)))

    def forward(self, state: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        x = ((state.double() - self.centre) / self.scale).float().unsqueeze(0)
        field = self.simulator.hamiltonian.field
        x = advance(self.simulator.integrator, field, x, self.dt, self.steps)
        return x.squeeze(0).double() * self.scale + self.centre


def save_animation(simulator: nn.Module, observed: Trajectories, path: Path) -> bool:
    """Write observed trajectories and learned ones from the same initial states as a GIF.

    The simulator maps a state and a time to a state. Returns whether the file was written: it needs
    a trajectory without missing states, and learned trajectories that stay finite.
    """
    complete = observed.observed[:, :ANIMATION_FRAMES].all(dim=1).nonzero()[:MAX_ANIMATED, 0]
    states = observed.states[complete, :ANIMATION_FRAMES]
    times = observed.times[complete, :ANIMATION_FRAMES]
    if not len(states):
        return False
    trajectories = []
    for start, gaps in zip(states[:, 0], times.diff(dim=1).tolist(), strict=True):
        trajectory = [start]
        for gap in gaps:
            trajectory.append(simulator(trajectory[-1], gap))
        trajectories.append(torch.stack(trajectory))
    learned = torch.stack(trajectories)
    if not bool(learned.isfinite().all()):
        return False
    motion_animation({"seen": states.transpose(0, 1), "learned": learned.transpose(0, 1)}, path)
    return True
