"""Series with a known answer: [n, channels, time], circular in time."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from symrazor.bench.truth.networks import (
    Architecture,
    OrbitPooled,
    dense,
    invariant,
    invariant_trunk,
    mirror,
)
from symrazor.bench.truth.pictures import shift_architectures
from symrazor.bench.truth.task import Draw, Shape, Task
from symrazor.groups import Group, cyclic_permutations, dihedral_permutations

LENGTH, PULSE = 40, 12
"""Time steps of a series, and of an event in it."""
SHORT = 24
"""Time steps of the series about reversal."""


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


def _templates() -> Tensor:
    """Return two asymmetric pulses with the same power; their reversals are two further pulses."""
    t = (torch.arange(PULSE) + 0.5) / PULSE
    chirp = (2 * math.pi * (t + 1.5 * t.square())).sin() * (math.pi * t).sin()
    decay = (4 * math.pi * t).sin() * (-2.5 * t).exp()
    pulses = torch.stack([chirp, decay])
    return pulses / pulses.square().mean(1, keepdim=True).sqrt()


def _pulses(draw: Draw, shape: Tensor, is_reversed: Tensor, noise: float) -> Tensor:
    """Return noisy series with a pulse or its reversal at a uniform time."""
    pulses = _templates()[shape]
    pulses = torch.where(is_reversed.bool()[:, None], pulses.flip(1), pulses)
    series = _placed(pulses, draw.integers(SHORT), SHORT)
    return series + noise * draw.normal(1, SHORT)


def either_direction(draw: Draw, noise: float = 0.8) -> tuple[Tensor, Tensor]:
    """One of two asymmetric pulses, forwards or backwards, anywhere; the label is which pulse.

    Direction and time were drawn independently of the label: circular shifts and reversal leave it
    alone.
    """
    y = draw.integers(2)
    return _pulses(draw, y, draw.integers(2), noise), y


def direction(draw: Draw, noise: float = 0.8) -> tuple[Tensor, Tensor]:
    """One of two asymmetric pulses, forwards or backwards, anywhere; the label is its direction.

    Reversal exchanges the labels. A circular shift changes nothing.
    """
    y = draw.integers(2)
    return _pulses(draw, draw.integers(2), y, noise), y


def sweep(draw: Draw, noise: float = 0.6) -> tuple[Tensor, Tensor]:
    """A sawtooth with rising or falling flanks, anywhere; the label is which.

    Reversal exchanges the labels. A circular shift changes nothing.
    """
    y = draw.integers(2)
    period = 6 + 3 * draw.integers(2)
    t = torch.arange(PULSE).expand(draw.n, -1)
    teeth = (t % period[:, None]) / (period[:, None] - 1) - 0.5
    teeth = torch.where(y.bool()[:, None], teeth.flip(1), teeth)
    series = _placed(teeth * 2, draw.integers(SHORT), SHORT)
    return series + noise * draw.normal(1, SHORT), y


def _same(x: Tensor) -> Tensor:
    return x


def _reversible(shape: Shape) -> torch.nn.Module:
    return OrbitPooled(invariant_trunk(shape.inputs), (_same, mirror), shape.outputs)


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


_ring_groups = partial(ring_groups, SHORT)
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
        "pulse, either direction",
        "develop",
        "series",
        either_direction,
        claims={"cyclic": True, "dihedral": True},
        architectures=with_reversal,
        oracle="reversible",
        groups=_ring_groups,
        n=200,
    ),
    Task(
        "direction of a sweep",
        "develop",
        "series",
        sweep,
        claims={"cyclic": True, "dihedral": False},
        architectures=with_reversal,
        oracle="cyclic",
        groups=_ring_groups,
        n=300,
    ),
    Task(
        "direction of a pulse",
        "report",
        "series",
        direction,
        claims={"cyclic": True, "dihedral": False},
        architectures=with_reversal,
        oracle="cyclic",
        groups=_ring_groups,
        n=300,
    ),
)
