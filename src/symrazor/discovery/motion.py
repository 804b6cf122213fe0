"""What the learned dynamics do, beside what was seen: an animation for the run folder."""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.figures import ANIMATION_FRAMES, motion_animation
from symrazor.dynamics.trajectories import Trajectories

SHOWN = 4
"""Trajectories at most."""


def save_motion(simulator: nn.Module, seen: Trajectories, path: Path) -> bool:
    """Trajectories that were seen whole, and the learned ones from the same starts, as a GIF.

    Args:
        simulator: state and time in, state out.
        seen: the data.
        path: of the GIF.

    Returns:
        Whether there is a trajectory to show: without missing states, and learned ones that stay
        finite.
    """
    states, times = _whole(seen)
    if not len(states):
        return False
    moved = torch.stack([_follow(simulator, *one) for one in zip(states, times, strict=True)])
    if not bool(moved.isfinite().all()):
        return False
    motion_animation({"seen": states.transpose(0, 1), "learned": moved.transpose(0, 1)}, path)
    return True


def _whole(seen: Trajectories) -> tuple[Float[Tensor, "m t d"], Float[Tensor, "m t"]]:
    """The first few trajectories without gaps, as long as an animation lasts."""
    index = seen.observed[:, :ANIMATION_FRAMES].all(dim=1).nonzero()[:SHOWN, 0]
    return seen.states[index, :ANIMATION_FRAMES], seen.times[index, :ANIMATION_FRAMES]


def _follow(
    simulator: nn.Module, states: Float[Tensor, "t d"], times: Float[Tensor, "t"]
) -> Float[Tensor, "t d"]:
    """The learned trajectory from the first state, at the same times."""
    found = [states[0]]
    for gap in times.diff().tolist():
        found.append(simulator(found[-1], gap))
    return torch.stack(found)
