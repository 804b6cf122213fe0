r"""Define flows of vectors, of point clouds and of series, see `symrazor.invariance.flows`.

A generator G transforms a vector by $\exp(e\,G)$. If $\exp(2\pi G) = 1$, the flow is a circle, else
a line. Entries that no generator changes, such as the target of a regression, may be appended to
each vector: the flow then asks about the joint distribution of inputs and targets, $y(T x) = y(x)$.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from symrazor.invariance.flows import MAX_OFFSET, SHIFT_SHARE, Flow, add, per_input

CIRCLE_BINS, LINE_BINS = 84, 12
"""Cells of an amount; 84 is a multiple of 2, 3, 4, 6 and 7, the orders of common cyclic groups."""
MAX_LOG_SCALE, MAX_LOG_STRETCH = math.log(1.5), math.log(1.25)
"""Largest tested log factors of point clouds and of the time of series."""
CLOSED = 1e-4
"""Error of exp(2 pi G) up to which a flow counts as closed."""


def vector_flows(
    generators: Mapping[str, Float[Tensor, "d d"]], end: float = 1.0
) -> tuple[Flow, ...]:
    """Return a flow of vectors [n, d] or point clouds [n, points, d] for every generator.

    Args:
        generators: name -> matrix.
        end: largest amount of flows that are not circles.
    """
    flows = []
    for name, generator in generators.items():
        shape, size = generator.shape, len(generator)
        if shape != (size, size) or not generator.isfinite().all():
            raise ValueError(f"Generator {name!r} must be a square matrix, got {list(shape)}.")
        move = partial(act, generator.float())
        if is_circle(generator):
            flows.append(
                Flow(name, "circle", CIRCLE_BINS, math.pi, "degrees", move, 180 / math.pi,
                     min_range=18)
            )  # fmt: skip
        else:
            flows.append(Flow(name, "line", LINE_BINS, end, "", move, min_range=0.15 * end))
    return tuple(flows)


def is_circle(generator: Float[Tensor, "d d"]) -> bool:
    """Return whether the flow returns to the start after a full turn."""
    turn = torch.matrix_exp(2 * math.pi * generator.double())
    return bool((turn - torch.eye(len(generator))).abs().max() < CLOSED)


def point_flows(dims: int) -> tuple[Flow, ...]:
    """Return rotations, reflections and the scale of point clouds in 2 or 3 dimensions."""
    if dims not in (2, 3):
        raise ValueError(f"Point clouds must have 2 or 3 coordinates, got {dims}.")
    axes = {"rotation": (0, 1)} if dims == 2 else {
        "rotation about x": (1, 2),
        "rotation about y": (2, 0),
        "rotation about z": (0, 1),
    }  # fmt: skip
    rotations = {name: torch.zeros(dims, dims) for name in axes}
    for name, (i, j) in axes.items():
        rotations[name][j, i], rotations[name][i, j] = 1, -1
    reflections = [
        Flow(f"reflection of {'xyz'[axis]}", "choice", 2, 1, "probability", partial(_reflect, axis))
        for axis in range(dims)
    ]
    scale = Flow("scale", "line", LINE_BINS, MAX_LOG_SCALE, "factor", _scale, min_range=1.2)
    return (*vector_flows(rotations), *reflections, scale)


def series_flows(shape: Sequence[int]) -> tuple[Flow, ...]:
    """Return shift, stretch, reversal, amplitude and offset of series [c, t]."""
    length = shape[-1]
    steps = max(1, round(SHIFT_SHARE * length))
    cells = min(2 * steps + 1, 2 * LINE_BINS + 1)
    inner = 1 / math.exp(MAX_LOG_STRETCH)
    inside = 1 - 2 * (steps + 0.5) / length
    return (
        Flow("shift", "line", cells, steps + 0.5, "steps",
             partial(_read, inside, False), min_range=max(1.5, length / 32)),
        Flow("stretch", "line", LINE_BINS, MAX_LOG_STRETCH, "factor", partial(_read, inner, True),
             min_range=1.1),
        Flow("reversal", "choice", 2, 1, "probability", _reverse),
        Flow("amplitude", "line", LINE_BINS, MAX_LOG_SCALE, "factor", _scale, min_range=1.2),
        Flow("offset", "line", LINE_BINS, MAX_OFFSET, "deviations", add, min_range=0.3),
    )  # fmt: skip


def prepared_series(x: Float[Tensor, "n c t"]) -> Float[Tensor, "n c t"]:
    """Return standardised series, smoothed so that interpolation leaves no trace."""
    x = (x - x.mean()) / x.std().clamp(min=1e-12)
    taps = torch.tensor([0.25, 0.5, 0.25], dtype=x.dtype).view(1, 1, 3)
    flat = x.flatten(0, 1).unsqueeze(1)
    for _ in range(2):
        flat = F.conv1d(F.pad(flat, (1, 1), mode="replicate"), taps)
    prepared: Tensor = flat.squeeze(1).unflatten(0, x.shape[:2])
    return prepared


def act(generator: Tensor, x: Tensor, amount: Tensor) -> Tensor:
    """Return exp(e G) applied to the first entries of each vector."""
    d = len(generator)
    maps = torch.matrix_exp(amount.view(-1, 1, 1) * generator)
    points = x.unsqueeze(1) if x.dim() == 2 else x
    moved: Tensor = torch.cat([points[..., :d] @ maps.mT, points[..., d:]], -1)
    return moved.view_as(x)


def _reflect(axis: int, x: Tensor, amount: Tensor) -> Tensor:
    moved: Tensor = x.clone()
    moved[..., axis] *= 1 - 2 * per_input(amount, x)[..., 0]
    return moved


def _scale(x: Tensor, amount: Tensor) -> Tensor:
    return x * per_input(amount, x).exp()


def _reverse(x: Tensor, amount: Tensor) -> Tensor:
    return torch.where(per_input(amount, x) > 0, x.flip(-1), x)


def _read(inner: float, is_stretch: bool, x: Tensor, amount: Tensor) -> Tensor:
    """Return the inner part of series, read at stretched or at shifted times."""
    t = x.shape[-1]
    count = max(2, int(inner * t))
    times = (torch.arange(count) - (count - 1) / 2) * 2 / t
    value = amount.view(-1, 1)
    places = times * value.exp() if is_stretch else times + 2 * value / t
    grid = torch.stack([places, torch.zeros_like(places)], -1).unsqueeze(1)
    read = F.grid_sample(x.unsqueeze(2), grid, padding_mode="border", align_corners=False)
    return F.pad(read.squeeze(2), (0, t - count))
