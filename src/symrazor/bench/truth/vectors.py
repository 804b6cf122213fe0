"""Vectors with a known answer: [n, features]; and trajectories: [n, states, coordinates]."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.bench.conserved import with_relative_noise
from symrazor.bench.conserved_systems import cases
from symrazor.bench.truth.networks import (
    Architecture,
    PlaneInvariant,
    Ring,
    dense,
    linear,
    ring_order,
)
from symrazor.bench.truth.points import ring_of_values
from symrazor.bench.truth.task import Draw, Half, Sample, Shape, Task
from symrazor.dynamics.trajectories import Trajectories
from symrazor.groups import Group, LieAlgebra

FEATURES = 10
PLANE_FEATURES = 6


def linear_target(draw: Draw, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """A linear function of normal features, with noise."""
    weights = torch.randn(FEATURES, generator=draw.shared())
    x = draw.normal(FEATURES)
    return x, x @ weights + noise * draw.normal()


def linear_classes(draw: Draw, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """The sign of a linear function of normal features, with normal noise.

    The log odds of the label are linear but for the shape of the noise (probit, not logit).
    """
    weights = torch.randn(FEATURES, generator=draw.shared())
    x = draw.normal(FEATURES)
    return x, (x @ weights + noise * weights.norm() * draw.normal() > 0).long()


def product_target(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """A sum of products of two features each; the best linear function is constant."""
    x = draw.normal(FEATURES)
    return x, x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3] + noise * draw.normal()


def _hidden_order(seed: int) -> Tensor:
    return torch.randperm(FEATURES, generator=torch.Generator().manual_seed(seed))


def hidden_ring(draw: Draw, noise: float = 0.6) -> tuple[Tensor, Tensor]:
    """A pattern at a uniform place of a ring in a hidden order; the label is its direction.

    The group that is asked about shifts this ring, which keeps the direction.
    """
    y = draw.integers(2)
    values = ring_of_values(draw, FEATURES, y, noise)
    x = torch.empty_like(values)
    x[:, _hidden_order(draw.seed)] = values
    return x, y


def fixed_places(draw: Draw, noise: float = 0.7) -> tuple[Tensor, Tensor]:
    """One feature of a ring in a hidden order is high, the one opposite low; two labels say where.

    The group that is asked about shifts this ring. A shift by half the ring exchanges the labels.
    """
    y = draw.integers(2)
    place = FEATURES // 2 * y + draw.integers(3)
    ring = torch.arange(FEATURES)
    high = (ring == place[:, None]).float()
    low = (ring == (place[:, None] + FEATURES // 2) % FEATURES).float()
    values = 2.5 * (high - low) + noise * draw.normal(FEATURES)
    x = torch.empty_like(values)
    x[:, _hidden_order(draw.seed)] = values
    return x, y


def ring(seed: int) -> tuple[Group]:
    """Return the cyclic shifts of the hidden ring."""
    order = _hidden_order(seed)
    shift = torch.empty(FEATURES, dtype=torch.long)
    shift[order] = order.roll(-1)
    return (Group.from_permutations("hidden ring", shift.unsqueeze(0)),)


def _basis(seed: int) -> Tensor:
    """Return a random orthonormal basis in float64."""
    z = torch.randn(
        PLANE_FEATURES,
        PLANE_FEATURES,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    basis: Tensor = torch.linalg.qr(z).Q
    return basis


def radius_in_plane(draw: Draw, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """A function of the radius in a hidden plane and of one direction outside.

    The group that is asked about rotates this plane, which changes neither.
    """
    x = draw.normal(PLANE_FEATURES)
    hidden = x @ _basis(draw.seed).float()
    y = 2 * hidden[:, :2].norm(dim=1).mul(1.5).sin() + hidden[:, 2]
    return x, y + noise * draw.normal()


def angle_in_plane(draw: Draw, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """A function of the angle in a hidden plane and of one direction outside.

    The group that is asked about rotates this plane; half a turn changes the sign of a term.
    """
    x = draw.normal(PLANE_FEATURES)
    hidden = x @ _basis(draw.seed).float()
    y = 2 * hidden[:, 0] / hidden[:, :2].norm(dim=1) + hidden[:, 2]
    return x, y + noise * draw.normal()


def plane(seed: int) -> tuple[Group]:
    """Return the rotations of the hidden plane."""
    basis = _basis(seed)
    turn = torch.zeros(PLANE_FEATURES, PLANE_FEATURES, dtype=torch.float64)
    turn[0, 1], turn[1, 0] = -1.0, 1.0
    generator = (basis @ turn @ basis.mT).unsqueeze(0)
    algebra = LieAlgebra(("hidden rotation",), ("radians",), generator)
    return (Group.from_matrices("hidden rotation", lie=algebra),)


def perceptrons(shape: Shape) -> Mapping[str, Architecture]:
    """Return a linear model and a network with two hidden layers."""
    return {
        "linear": Architecture(partial(linear, shape.inputs, shape.outputs), {"linear": True}),
        "dense": Architecture(partial(dense, shape.inputs, shape.outputs), {"linear": False}),
    }


def with_group(shape: Shape) -> Mapping[str, Architecture]:
    """Return a network that is invariant under the group, and networks that are not."""
    (group,) = shape.groups
    assert isinstance(group, Group)
    build: Callable[[], nn.Module]
    if group.permutations is not None:
        order = ring_order(group.permutations[0])
        build = partial(Ring, 1, shape.outputs, order)
    else:
        assert group.lie is not None
        build = partial(PlaneInvariant, group.lie.generators[0], shape.outputs)
    broken = {group.name: False}
    return {
        "invariant": Architecture(build, {group.name: True}),
        "dense": Architecture(partial(dense, shape.inputs, shape.outputs), broken),
        "linear": Architecture(partial(linear, shape.inputs, shape.outputs), broken),
    }


def trajectories(draw: Draw, system: float, noise: float = 0.005) -> tuple[Tensor, Tensor]:
    """Trajectories of a system whose conserved quantities are known from mechanics.

    The knob `system` is the index of a name in `SYSTEMS`.
    """
    case = next(c for c in cases() if c.name == list(SYSTEMS)[int(system)])
    seed = int(torch.randint(1 << 40, (1,), generator=draw.generator))
    data: Trajectories = with_relative_noise(case.simulate(seed), noise, seed)
    return data.states, data.times[0]


SYSTEMS = {
    "rotated anisotropic oscillator": 2,
    "chain of springs": 3,
    "damped oscillator": 0,
}
"""System -> number of functionally independent conserved quantities; all of them are quadratic."""


def _system(index: int, half: Half) -> Task:
    name, quantities = list(SYSTEMS.items())[index]
    known = {"conserved quantities": quantities}
    return Task(name, half, "trajectory", trajectories, known, knobs={"system": index}, n_test=0)


def _vectors(name: str, half: Half, sample: Sample, **more: Any) -> Task:
    return Task(name, half, "vector", sample, **{"architectures": perceptrons, "n": 300, **more})


TASKS = (
    _vectors("linear target", "report", linear_target, claims={"linear": True}, oracle="linear"),
    _vectors("linear classes", "develop", linear_classes, claims={"linear": True}, oracle="linear"),
    _vectors("products", "report", product_target, claims={"linear": False}, oracle="dense", n=500),
    _vectors(
        "hidden ring",
        "develop",
        hidden_ring,
        claims={"hidden ring": True},
        architectures=with_group,
        oracle="invariant",
        groups=ring,
    ),
    _vectors(
        "hidden ring, fixed places",
        "report",
        fixed_places,
        claims={"hidden ring": False},
        architectures=with_group,
        oracle="dense",
        groups=ring,
    ),
    _vectors(
        "hidden plane",
        "report",
        radius_in_plane,
        claims={"hidden rotation": True},
        architectures=with_group,
        oracle="invariant",
        groups=plane,
    ),
    _vectors(
        "hidden plane, angle",
        "develop",
        angle_in_plane,
        claims={"hidden rotation": False},
        architectures=with_group,
        oracle="dense",
        groups=plane,
        n=500,
    ),
    _system(0, "develop"),
    _system(1, "report"),
    _system(2, "develop"),
)
