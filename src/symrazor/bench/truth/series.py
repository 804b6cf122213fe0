"""Series with a known answer: [n, channels, time], circular in time."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from symrazor.bench.truth.networks import (
    WIDTH,
    Architecture,
    OrbitPooled,
    dense,
    invariant,
    mirror,
)
from symrazor.bench.truth.pictures import shift_architectures
from symrazor.bench.truth.task import Draw, Shape, Task
from symrazor.groups import Group, cyclic_permutations, dihedral_permutations

LENGTH, PULSE = 40, 12
"""Time steps of a series, and of an event in it."""
RAMP_LENGTH = 24


def _events(kind: Tensor) -> Tensor:
    """Return pulses of three shapes: a bump, a wave, and two bumps."""
    t = (torch.arange(PULSE) + 0.5) / PULSE
    window = (math.pi * t).sin()
    shapes = torch.stack([window, (2 * math.pi * t).sin(), (3 * math.pi * t).sin().abs() * window])
    return shapes[kind]


def _placed(pulses: Tensor, start: Tensor, length: int) -> Tensor:
    """Return circular series [n, 1, length] with each pulse at its own time."""
    series = pulses.new_zeros(len(pulses), length)
    times = (start[:, None] + torch.arange(pulses.shape[1])) % length
    return series.scatter(1, times, pulses)[:, None]


def event_anywhere(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """An event at a uniform time of a circular series; the label is its shape.

    The label was drawn before the time, which a circular shift changes.
    """
    y = draw.integers(3)
    x = _placed(_events(y) * (1 + 0.2 * draw.normal(1)), draw.integers(LENGTH), LENGTH)
    return x + noise * draw.normal(1, LENGTH), y


def which_half(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """An event of a random shape; the label is the half in which it starts.

    A shift by half the length exchanges the labels, so that an invariant network can only guess.
    """
    y = draw.integers(2)
    start = LENGTH // 2 * y + draw.integers(LENGTH // 2 - 4)
    x = _placed(_events(draw.integers(3)), start, LENGTH)
    return x + noise * draw.normal(1, LENGTH), y


def _ramps(steep: Tensor, rising: Tensor, start: Tensor) -> Tensor:
    """Return asymmetric pulses of two lengths that rise or fall slowly."""
    t = torch.arange(PULSE) / PULSE
    lengths = torch.where(steep.bool(), 0.5, 1.0)[:, None]
    ramp = (t / lengths) * (t < lengths)
    ramp = torch.where(rising.bool()[:, None], ramp, ramp.flip(1))
    return _placed(ramp, start, RAMP_LENGTH)


def reversible(draw: Draw, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """A short or a long ramp, rising or falling, anywhere; the label is its length.

    Direction and time were drawn independently of the label: circular shifts and reversal leave it
    alone.
    """
    y = draw.integers(2)
    x = _ramps(y, draw.integers(2), draw.integers(RAMP_LENGTH))
    return x + noise * draw.normal(1, RAMP_LENGTH), y


def direction(draw: Draw, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """A short or a long ramp, rising or falling, anywhere; the label is its direction.

    Reversal exchanges the labels. A circular shift changes nothing.
    """
    y = draw.integers(2)
    x = _ramps(draw.integers(2), y, draw.integers(RAMP_LENGTH))
    return x + noise * draw.normal(1, RAMP_LENGTH), y


def _same(x: Tensor) -> Tensor:
    return x


def _reversible(shape: Shape) -> torch.nn.Module:
    return OrbitPooled(invariant(shape.inputs, WIDTH), (_same, mirror), shape.outputs)


def with_reversal(shape: Shape) -> Mapping[str, Architecture]:
    """Return networks that are invariant to shifts, to shifts and reversal, and to nothing."""
    shifts = partial(invariant, shape.inputs, shape.outputs)
    return {
        "reversible": Architecture(partial(_reversible, shape), {"cyclic": True, "dihedral": True}),
        "cyclic": Architecture(shifts, {"cyclic": True, "dihedral": False}),
        "dense": Architecture(
            partial(dense, shape.inputs, shape.outputs), {"cyclic": False, "dihedral": False}
        ),
    }


def ring_groups(points: int, seed: int) -> tuple[Group, ...]:
    """Return circular shifts, and shifts with reversals."""
    cyclic, dihedral = cyclic_permutations(points), dihedral_permutations(points)
    assert cyclic.permutations is not None
    assert dihedral.permutations is not None
    return (
        Group.from_permutations("cyclic", cyclic.permutations),
        Group.from_permutations("dihedral", dihedral.permutations),
    )


_ramp_groups = partial(ring_groups, RAMP_LENGTH)
TASKS = (
    Task(
        "event anywhere",
        "report",
        "series",
        event_anywhere,
        claims={"translation": True},
        architectures=shift_architectures,
        oracle="invariant",
        n=500,
    ),
    Task(
        "which half",
        "develop",
        "series",
        which_half,
        claims={"translation": False},
        architectures=shift_architectures,
        oracle="positional",
        n=500,
    ),
    Task(
        "ramps, either direction",
        "develop",
        "series",
        reversible,
        claims={"cyclic": True, "dihedral": True},
        architectures=with_reversal,
        oracle="reversible",
        groups=_ramp_groups,
        n=300,
    ),
    Task(
        "direction of a ramp",
        "report",
        "series",
        direction,
        claims={"cyclic": True, "dihedral": False},
        architectures=with_reversal,
        oracle="cyclic",
        groups=_ramp_groups,
        n=300,
    ),
)
