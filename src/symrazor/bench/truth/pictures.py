"""Pictures with a known answer about shifts.

Objects are the embedded 8 x 8 digits. Canvases are tori: an object that leaves on one side enters
on the other, so that circular shifts are exact symmetries of "anywhere".
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symrazor.bench.truth.networks import (
    Architecture,
    dense,
    invariant,
    invariant_along,
    positional,
)
from symrazor.bench.truth.task import Draw, Fact, Half, Sample, Shape, Task
from symrazor.data.transforms import rotated

AXES = ("x-translation", "y-translation")
"""Shifts along one axis: x is horizontal."""
SIDE = 8
"""Side of an embedded digit in pixels."""


def noisy(x: Tensor, draw: Draw, noise: float) -> Tensor:
    """Add normal noise."""
    return x + noise * draw.normal(*x.shape[1:])


def placed(x: Tensor, size: tuple[int, int], top: Tensor, left: Tensor) -> Tensor:
    """Return canvases with each object at its own place, wrapped around the borders."""
    n, c, h, w = x.shape
    canvas = x.new_zeros(n, c, *size)
    rows = (top[:, None] + torch.arange(h)) % size[0]
    columns = (left[:, None] + torch.arange(w)) % size[1]
    sample = torch.arange(n)[:, None, None]
    canvas[sample, :, rows[:, :, None], columns[:, None, :]] = x.permute(0, 2, 3, 1)
    return canvas


def anywhere(
    draw: Draw, height: float = 16, width: float = 16, noise: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Digits at uniform places on a torus: the label is drawn before the place.

    A circular shift gives another picture of the same distribution with the same label.
    """
    x, y = draw.digits()
    h, w = int(height), int(width)
    return noisy(placed(x, (h, w), draw.integers(h), draw.integers(w)), draw, noise), y


def in_cells(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits in a random cell of a 2 x 2 grid; the label is the digit.

    Shifts by a cell permute the cells. Other shifts never occur in the data and leave the label
    alone, so that a shift-invariant network loses nothing and needs no copy of a digit per cell.
    """
    x, y = draw.digits()
    cell = draw.integers(4)
    canvas = placed(x, (16, 16), SIDE * (cell // 2), SIDE * (cell % 2))
    return noisy(canvas, draw, noise), y


def quadrant(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits in a quadrant of a torus; the label is the quadrant.

    The four labels are shifts of each other, so that a shift-invariant network can only guess.
    """
    x, _ = draw.digits()
    y = draw.integers(4)
    top, left = 9 * (y // 2) + draw.integers(4), 9 * (y % 2) + draw.integers(4)
    return noisy(placed(x, (18, 18), top, left), draw, noise), y


def row(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits anywhere in the upper or lower part of a torus; the label is the part.

    A vertical shift by half the height exchanges the labels. A horizontal shift changes nothing.
    """
    x, _ = draw.digits()
    y = draw.integers(2)
    top = 9 * y + draw.integers(6)
    return noisy(placed(x, (18, 14), top, draw.integers(14)), draw, noise), y


def digit_and_column(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits 0 to 4 in the left or right part of a torus; the label is the digit and the part.

    A horizontal shift by half the width exchanges labels. A vertical shift changes nothing.
    """
    x, y = draw.digits(0, 1, 2, 3, 4)
    part = draw.integers(2)
    left = 8 * part + draw.integers(5)
    canvas = placed(x, (16, 16), draw.integers(16), left)
    return noisy(canvas, draw, noise), y + 5 * part


def weak_breaking(draw: Draw, breaking: float = 0.3, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits 0 and 1 anywhere; a share `breaking` of the labels is the half, not the digit.

    Where digit and half disagree, the probability of a label depends on the half. With a share of
    0.3, a shift-invariant network loses 0.12 nats per picture.
    """
    x, digit = draw.digits(0, 1)
    half = draw.integers(2)
    y = torch.where(draw.uniform() < breaking, half, digit)
    top = 8 * half + draw.integers(5)
    return noisy(placed(x, (16, 16), top, draw.integers(16)), draw, noise), y


def in_strip(draw: Draw, noise: float = 0.15) -> tuple[Tensor, Tensor]:
    """Digits 0 to 6 in one of three cells of a strip; the label is the digit.

    As for a grid of cells, a shift-invariant network loses nothing and needs no copy per cell.
    """
    x, y = draw.digits(0, 1, 2, 3, 4, 5, 6)
    canvas = placed(x, (10, 24), draw.integers(1) + 1, SIDE * draw.integers(3))
    return noisy(canvas, draw, noise), y


def column_with_noise(
    draw: Draw, breaking: float = 0.35, noise: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Digits 2 and 7 anywhere; a share `breaking` of the labels is the side, not the digit.

    Where digit and side disagree, the probability of a label depends on the side. A vertical shift
    changes nothing.
    """
    x, digit = draw.digits(2, 7)
    side = draw.integers(2)
    y = torch.where(draw.uniform() < breaking, side, digit)
    left = 8 * side + draw.integers(5)
    return noisy(placed(x, (15, 16), draw.integers(15), left), draw, noise), y


def textures(draw: Draw, side: float = 16, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Stationary random textures on a torus; the label is the spectrum, one of four.

    A stationary distribution does not change under shifts.
    """
    n, m, y = draw.n, int(side), draw.integers(4)
    frequency = torch.fft.fftfreq(m) * m
    fy, fx = torch.meshgrid(frequency, frequency, indexing="ij")
    # Two orientations and two scales; all spectra have the same power.
    stretched = torch.stack([fx.square() + 9 * fy.square(), 9 * fx.square() + fy.square()])
    power = torch.stack([(-stretched / 60).exp(), (-stretched / 200).exp()], 1).flatten(0, 1)
    amplitude = (power / power.mean((1, 2), keepdim=True)).sqrt()
    white = torch.fft.fft2(draw.normal(m, m))
    field = torch.fft.ifft2(white * amplitude[y]).real
    return noisy(field.reshape(n, 1, m, m), draw, noise), y


def grating_phase(draw: Draw, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Vertical gratings of one wavelength; the label is the phase, one of four quarter waves.

    A shift by a quarter wavelength (3 pixels) exchanges the labels, so that a shift-invariant
    network can only guess.
    """
    y, side = draw.integers(4), 12
    jitter = 0.15 * draw.normal()
    phase = 2 * math.pi * (torch.arange(side) / side) + (math.pi / 2 * y + jitter)[:, None]
    waves = phase.cos()[:, None, None, :].expand(-1, 1, side, side)
    return noisy(waves, draw, noise), y


def two_digits(draw: Draw, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Two digits side by side, each turned by its own angle; the label is the ordered pair.

    A shift by 8 pixels exchanges the digits and thereby the label.
    """
    x, first = draw.digits(0, 1, 2)
    z, second = draw.digits(0, 1, 2)
    angle_seeds = torch.randint(1 << 40, (2,), generator=draw.generator).tolist()
    turned = [rotated(part, 180, seed) for part, seed in zip((x, z), angle_seeds, strict=True)]
    return noisy(torch.cat(turned, 3), draw, noise), 3 * first + second


def shift_architectures(shape: Shape) -> Mapping[str, Architecture]:
    """Return networks with and without translation invariance."""
    made = {
        "invariant": (invariant, True),
        "positional": (positional, False),
        "dense": (dense, False),
    }
    return {
        name: Architecture(partial(make, shape.inputs, shape.outputs), {"translation": holds})
        for name, (make, holds) in made.items()
    }


def one_axis(shape: Shape) -> Mapping[str, Architecture]:
    """Return also networks that are invariant to shifts along one axis only."""
    along = partial(invariant_along, shape.inputs, shape.outputs)
    both = {
        name: replace(made, holds={**made.holds, **dict.fromkeys(AXES, name == "invariant")})
        for name, made in shift_architectures(shape).items()
    }
    one = {
        f"invariant along {axis[0]}": Architecture(
            partial(along, dim), {"translation": False, **{other: other == axis for other in AXES}}
        )
        for axis, dim in zip(AXES, (3, 2), strict=True)
    }
    return {**both, **one}


HOLDS, BROKEN = {"translation": True}, {"translation": False}
ALONG_X = {"translation": False, "x-translation": True, "y-translation": False}
ALONG_Y = {"translation": False, "x-translation": False, "y-translation": True}


def _image(name: str, half: Half, sample: Sample, claims: Mapping[str, Fact], **more: Any) -> Task:
    oracle = "invariant" if claims.get("translation") else "positional"
    return Task(
        name,
        half,
        "image",
        sample,
        claims,
        **{"architectures": shift_architectures, "oracle": oracle, **more},
    )


TASKS = (
    _image("digits anywhere", "develop", anywhere, HOLDS),
    _image(
        "digits anywhere, 15 x 13",
        "report",
        anywhere,
        HOLDS,
        knobs={"height": 15, "width": 13, "noise": 0.2},
    ),
    _image("digits in cells", "report", in_cells, HOLDS, n=500),
    _image("quadrant", "develop", quadrant, BROKEN, n=500),
    _image(
        "row", "report", row, ALONG_X, n=500, architectures=one_axis, oracle="invariant along x"
    ),
    _image(
        "digit and column",
        "develop",
        digit_and_column,
        ALONG_Y,
        architectures=one_axis,
        oracle="invariant along y",
        n=700,
    ),
    _image(
        "weak breaking",
        "report",
        weak_breaking,
        ALONG_X,
        architectures=one_axis,
        oracle="invariant along x",
    ),
    _image("digits in a strip", "develop", in_strip, HOLDS, n=500),
    _image(
        "column, noisy labels",
        "develop",
        column_with_noise,
        ALONG_Y,
        architectures=one_axis,
        oracle="invariant along y",
    ),
    _image("textures", "develop", textures, HOLDS, n=400),
    _image("grating phase", "report", grating_phase, BROKEN, n=500),
    _image("two digits", "develop", two_digits, BROKEN),
)
