"""Sets and rings of points with a known answer: [n, points, features]."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.bench.truth.networks import Architecture, DeepSets, Ring, dense
from symrazor.bench.truth.task import Draw, Half, Sample, Shape, Task
from symrazor.groups import Group, cyclic_permutations, symmetric

POINTS = 12
HALF = POINTS // 2


def cloud(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Points on a circle, on a line through the middle, or in a cloud; the label is the shape.

    Points are drawn independently of each other, given the shape, so that their order carries no
    information.
    """
    y = draw.integers(3)
    angle, tilt = 6.2832 * draw.uniform(POINTS), 6.2832 * draw.uniform(1)
    along = draw.normal(POINTS)
    circle = torch.stack([angle.cos(), angle.sin()], 2)
    line = torch.stack([along * tilt.cos(), along * tilt.sin()], 2)
    blob = 0.7 * draw.normal(POINTS, 2)
    x = torch.stack([circle, line, blob], 1)[torch.arange(draw.n), y]
    return x + noise * draw.normal(POINTS, 2), y


def two_teams(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Points of two teams; the label is which team has the larger spread.

    Permutations inside a team change nothing. Exchanging the teams exchanges the labels.
    """
    y = draw.integers(2)
    spread = torch.where(y[:, None] == torch.arange(2), 1.4, 0.8).repeat_interleave(HALF, 1)
    x = spread[:, :, None] * draw.normal(POINTS, 2)
    return x + noise * draw.normal(POINTS, 2), y


def ring_of_values(draw: Draw, points: int, y: Tensor, noise: float) -> Tensor:
    """Return values [n, points] on a ring: three neighbours stand out, in one of two directions.

    Both directions have the same values. Their place is uniform.
    """
    pattern = torch.zeros(points)
    pattern[:3] = torch.tensor([2.0, 1.0, -2.0])
    levels = torch.stack([pattern, pattern.flip(0)])[y]
    order = (torch.arange(points) + draw.integers(points)[:, None]) % points
    return levels.gather(1, order) + noise * draw.normal(points)


def direction_on_ring(draw: Draw, noise: float = 0.6) -> tuple[Tensor, Tensor]:
    """A pattern at a uniform place of a ring; the label is its direction.

    A cyclic shift keeps the direction. Another order of the same values has the other label: a
    network that ignores the order can only guess.
    """
    y = draw.integers(2)
    return ring_of_values(draw, POINTS, y, noise)[:, :, None], y


def ordered(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """A random walk; the label is whether it drifts upwards from the first point to the last.

    Reversing the order exchanges the labels, so that a permutation-invariant network can only
    guess; the walks are centred.
    """
    y = draw.integers(2)
    steps = 0.5 * draw.normal(POINTS, 2)
    steps[:, :, 0] += 0.25 * (2.0 * y[:, None] - 1)
    walk = steps.cumsum(1)
    x = walk - walk.mean(1, keepdim=True)
    return x + noise * draw.normal(POINTS, 2), y


def _permutation() -> Group:
    generators = symmetric(POINTS).permutations
    assert generators is not None
    return Group.from_permutations("permutation", generators)


def with_teams(seed: int) -> tuple[Group, ...]:
    """Return all permutations, and those inside the two halves."""
    small = symmetric(HALF).permutations
    assert small is not None
    rest = torch.arange(HALF, POINTS).expand(len(small), -1)
    first = torch.cat([small, rest], 1)
    second = torch.cat([rest - HALF, small + HALF], 1)
    return _permutation(), Group.from_permutations("within teams", torch.cat([first, second]))


def with_ring(seed: int) -> tuple[Group, ...]:
    """Return all permutations, and cyclic shifts."""
    shift = cyclic_permutations(POINTS).permutations
    assert shift is not None
    return _permutation(), Group.from_permutations("cyclic", shift)


def architectures(shape: Shape) -> Mapping[str, Architecture]:
    """Return networks for the groups that the problem asks about; alone, for permutations."""
    features = shape.inputs[1]
    names = [g if isinstance(g, str) else g.name for g in shape.groups] or ["permutation"]
    made: dict[str, Architecture] = {}
    for name in names:
        holds = {other: name in (other, "permutation") for other in names}
        build: Callable[[], nn.Module]
        match name:
            case "within teams":
                build = partial(DeepSets, features, shape.outputs, 2)
            case "cyclic":
                build = partial(Ring, features, shape.outputs, range(shape.inputs[0]))
            case _:
                build = partial(DeepSets, features, shape.outputs)
        made[name] = Architecture(build, holds)
    broken = dict.fromkeys(names, False)
    return {**made, "dense": Architecture(partial(dense, shape.inputs, shape.outputs), broken)}


def _task(name: str, half: Half, sample: Sample, **more: Any) -> Task:
    return Task(name, half, "set", sample, **{"architectures": architectures, "n": 500, **more})


TASKS = (
    _task("cloud of points", "develop", cloud, claims={"permutation": True}, oracle="permutation"),
    _task(
        "two teams",
        "report",
        two_teams,
        claims={"permutation": False, "within teams": True},
        oracle="within teams",
        groups=with_teams,
    ),
    _task(
        "ring of points",
        "develop",
        direction_on_ring,
        claims={"permutation": False, "cyclic": True},
        oracle="cyclic",
        groups=with_ring,
        n=300,
    ),
    _task("ordered points", "report", ordered, claims={"permutation": False}, oracle="dense"),
)
