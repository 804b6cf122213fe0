"""Volumes with a known answer: [n, 1, depth, height, width], circular."""

import torch
from torch import Tensor

from symrazor.bench.truth.pictures import shift_architectures
from symrazor.bench.truth.task import Draw, Task

SIDE = 8


def _bodies(kind: Tensor, place: Tensor) -> Tensor:
    """Return rods along x, plates across x, and balls, centred at places of a torus."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(SIDE)] * 3, indexing="ij"), -1)
    offset = (grid - place[:, None, None, None] + SIDE // 2) % SIDE - SIDE // 2
    widths = torch.tensor([[0.7, 0.7, 2.2], [1.8, 1.8, 0.5], [1.2, 1.2, 1.2]])[kind]
    z = offset / widths[:, None, None, None]
    bodies: Tensor = (-0.5 * z.square().sum(-1)).exp()[:, None]
    return bodies


def body_anywhere(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """A rod, a plate or a ball at a uniform place of a torus; the label is the shape.

    The label was drawn before the place, which a circular shift changes.
    """
    y = draw.integers(3)
    x = _bodies(y, draw.integers(SIDE, 3))
    return x + noise * draw.normal(1, SIDE, SIDE, SIDE), y


def upper_or_lower(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """A body of any shape in the upper or lower half of a torus; the label is the half.

    A shift by half the depth exchanges the labels, so that an invariant network can only guess.
    """
    y, place = draw.integers(2), draw.integers(SIDE, 3)
    place[:, 0] = SIDE // 2 * y + draw.integers(3)
    x = _bodies(draw.integers(3), place)
    return x + noise * draw.normal(1, SIDE, SIDE, SIDE), y


TASKS = (
    Task(
        "body anywhere",
        "develop",
        "volume",
        body_anywhere,
        claims={"translation": True},
        architectures=shift_architectures,
        oracle="invariant",
        n=400,
    ),
    Task(
        "body, upper or lower",
        "report",
        "volume",
        upper_or_lower,
        claims={"translation": False},
        architectures=shift_architectures,
        oracle="positional",
        n=400,
    ),
)
