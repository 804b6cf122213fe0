"""Move one sample by hand: shifts, turns, scales, reversals and permutations.

| kind | moves |
|---|---|
| image, volume | shift along both axes of the picture, turn, scale, mirror |
| series | shift in time, reverse, scale of the values |
| set | turn in the plane of the first two features, other orders of the points |
| vector | other values of the columns, cyclic shift and other orders of the columns |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from symrazor.groups.lie import sample_grid

RANDOM_ORDERS = 20
MAX_COLUMNS = 16
"""Columns of vectors whose values can be changed by hand."""
COLUMN = "column "
DEVIATION = "standard deviations"


@dataclass(frozen=True)
class Control:
    """A control of the page: a slider, or a switch if its values are 0 and 1.

    Args:
        name: the move.
        label: text beside the control.
        low: smallest value.
        high: largest value.
        step: difference of neighbouring values.
        start: value that moves nothing.
        unit: unit of the values.
    """

    name: str
    label: str
    low: float
    high: float
    step: float
    start: float = 0.0
    unit: str = ""

    def values(self, count: int) -> list[float]:
        """Return at most `count` values, from the smallest to the largest, with `start`."""
        steps = round((self.high - self.low) / self.step)
        stride = -(-steps // max(1, count - 1))
        values = {self.low + self.step * k for k in range(0, steps + 1, stride)}
        return sorted({*values, self.high, self.start})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def controls(kind: str, shape: Sequence[int], columns: Sequence[str] = ()) -> list[Control]:
    """Return the controls for samples of a kind and shape; named columns are not exchanged."""
    if kind in ("image", "volume"):
        height, width = shape[-2:]
        moves = [
            _shift("right", "Shift to the right", width, "pixels"),
            _shift("down", "Shift down", height, "pixels"),
            Control("scale", "Scale", 0.5, 2.0, 0.05, 1.0, "times"),
            Control("mirror", "Mirror", 0, 1, 1),
        ]
        moves.insert(2, Control("turn", "Turn", -180, 180, 5, unit="degrees"))
        return moves
    if kind == "series":
        return [
            _shift("right", "Shift in time", shape[-1], "steps"),
            Control("size", "Scale of the values", 0.5, 2.0, 0.05, 1.0, "times"),
            Control("mirror", "Reverse time", 0, 1, 1),
        ]
    order = Control("order", "Another order", 0, RANDOM_ORDERS, 1, unit="th order")
    if kind == "set":
        turn = [Control("turn", "Turn", -180, 180, 5, unit="degrees")] if shape[-1] > 1 else []
        return [order, *turn]
    names = columns or [f"{COLUMN}{k}" for k in range(1, shape[-1] + 1)]
    values = [
        Control(f"{COLUMN}{k}", name, -3, 3, 0.1, unit=DEVIATION)
        for k, name in enumerate(names[:MAX_COLUMNS])
    ]
    if columns:
        return values
    return [*values, _shift("right", "Cyclic shift of the columns", shape[-1], "columns"), order]


def _shift(name: str, label: str, size: int, unit: str) -> Control:
    half = size // 2
    return Control(name, label, -half, half, max(1, size // 64), unit=unit)


def moved(x: Tensor, kind: str, move: Mapping[str, float], scale: Tensor) -> Tensor:
    """Return a sample moved by the values of its controls; shifts go around the border.

    Args:
        x: the sample.
        kind: its kind.
        move: control -> value.
        scale: standard deviation of each column of vectors.
    """
    get = move.get
    if kind == "vector":
        steps = [get(f"{COLUMN}{k}", 0.0) for k in range(len(x))]
        x = (x.double() + torch.tensor(steps, dtype=torch.float64) * scale).to(x.dtype)
    if get("mirror", 0):
        x = x.flip(-1)
    if kind in ("image", "volume"):
        x = _turned(x, get("turn", 0), get("scale", 1))
        return x.roll((round(get("down", 0)), round(get("right", 0))), (-2, -1))
    if kind == "series":
        return x.roll(round(get("right", 0)), -1) * get("size", 1)
    dim = 0 if kind == "set" else -1
    if kind == "set" and get("turn", 0):
        angle = math.radians(get("turn", 0))
        a, b = x[:, 0].clone(), x[:, 1].clone()
        turned = [
            a * math.cos(angle) - b * math.sin(angle),
            a * math.sin(angle) + b * math.cos(angle),
        ]
        x = torch.cat([torch.stack(turned, 1), x[:, 2:]], 1)
    order = round(get("order", 0))
    if order:
        generator = torch.Generator().manual_seed(order)
        x = x.index_select(dim, torch.randperm(x.shape[dim], generator=generator))
    return x.roll(round(get("right", 0)), dim) if kind == "vector" else x


def _turned(x: Tensor, degrees: float, scale: float) -> Tensor:
    """Return an image turned anticlockwise and scaled about its centre; outside is the border."""
    if x.shape[-1] == x.shape[-2] and degrees % 90 == 0:
        x, degrees = torch.rot90(x, round(degrees / 90) % 4, (-2, -1)), 0.0
    if degrees == 0 and scale == 1:
        return x
    cos, sin = (f(math.radians(degrees)) / scale for f in (math.cos, math.sin))
    maps = torch.tensor([[[[cos, -sin, 0], [sin, cos, 0]]]], dtype=torch.float64)
    images = x.reshape(1, -1, *x.shape[-2:]).double()
    return sample_grid(images, maps, "border").reshape(x.shape).to(x.dtype)
