"""Pictures with a known answer.

Objects are the embedded 8 x 8 digits. Canvases are tori: an object that leaves on one side enters
on the other, so that circular shifts are exact symmetries of "anywhere".
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.bench.truth.networks import (
    WIDTH,
    Architecture,
    OrbitPooled,
    Transform,
    dense,
    invariant,
    invariant_along,
    mirror,
    positional,
    quarter_turn,
)
from symrazor.bench.truth.task import Draw, Fact, Half, Sample, Shape, Task
from symrazor.data.transforms import resized, rotated, scaled

SIDE = 8
"""Side of an embedded digit in pixels."""
TURNABLE = (0, 1, 2, 3, 4, 5, 7, 8)
"""Digits of which none turns into another one by a rotation."""
HANDED = (2, 3, 4, 5, 7)
"""Digits that differ clearly from their mirror image."""
TURNED_SIDE = 14
"""Side of pictures that are rotated or scaled; digits fill 12 pixels."""
LARGEST_SCALE = 1.5


def _noisy(x: Tensor, draw: Draw, noise: float) -> Tensor:
    return x + noise * draw.normal(*x.shape[1:])


def _placed(x: Tensor, size: tuple[int, int], top: Tensor, left: Tensor) -> Tensor:
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
    return _noisy(_placed(x, (h, w), draw.integers(h), draw.integers(w)), draw, noise), y


def in_cells(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits in a random cell of a 2 x 2 grid; the label is the digit.

    Shifts by a cell permute the cells. Other shifts never occur in the data and leave the label
    alone, so that a shift-invariant network loses nothing and needs no copy of a digit per cell.
    """
    x, y = draw.digits()
    cell = draw.integers(4)
    canvas = _placed(x, (16, 16), SIDE * (cell // 2), SIDE * (cell % 2))
    return _noisy(canvas, draw, noise), y


def quadrant(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits in a quadrant of a torus; the label is the quadrant.

    The four labels are shifts of each other, so that a shift-invariant network can only guess.
    """
    x, _ = draw.digits()
    y = draw.integers(4)
    top, left = 9 * (y // 2) + draw.integers(4), 9 * (y % 2) + draw.integers(4)
    return _noisy(_placed(x, (18, 18), top, left), draw, noise), y


def row(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits anywhere in the upper or lower part of a torus; the label is the part.

    A vertical shift by half the height exchanges the labels. A horizontal shift changes nothing.
    """
    x, _ = draw.digits()
    y = draw.integers(2)
    top = 9 * y + draw.integers(6)
    return _noisy(_placed(x, (18, 14), top, draw.integers(14)), draw, noise), y


def digit_and_column(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits 0 to 4 in the left or right part of a torus; the label is the digit and the part.

    A horizontal shift by half the width exchanges labels. A vertical shift changes nothing.
    """
    x, y = draw.digits(0, 1, 2, 3, 4)
    part = draw.integers(2)
    left = 8 * part + draw.integers(5)
    canvas = _placed(x, (16, 16), draw.integers(16), left)
    return _noisy(canvas, draw, noise), y + 5 * part


def weak_breaking(draw: Draw, breaking: float = 0.3, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits 0 and 1 anywhere; a share `breaking` of the labels is the half, not the digit.

    Where digit and half disagree, the probability of a label depends on the half. With a share of
    0.3, a shift-invariant network loses 0.12 nats per picture.
    """
    x, digit = draw.digits(0, 1)
    half = draw.integers(2)
    y = torch.where(draw.uniform() < breaking, half, digit)
    top = 8 * half + draw.integers(5)
    return _noisy(_placed(x, (16, 16), top, draw.integers(16)), draw, noise), y


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
    return _noisy(field.reshape(n, 1, m, m), draw, noise), y


def grating_phase(draw: Draw, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Vertical gratings of one wavelength; the label is the phase, one of four quarter waves.

    A shift by a quarter wavelength (3 pixels) exchanges the labels, so that a shift-invariant
    network can only guess.
    """
    y, side = draw.integers(4), 12
    jitter = 0.15 * draw.normal()
    phase = 2 * math.pi * (torch.arange(side) / side) + (math.pi / 2 * y + jitter)[:, None]
    waves = phase.cos()[:, None, None, :].expand(-1, 1, side, side)
    return _noisy(waves, draw, noise), y


def two_digits(draw: Draw, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Two digits side by side, each turned by its own angle; the label is the ordered pair.

    A shift by 8 pixels exchanges the digits and thereby the label.
    """
    x, first = draw.digits(0, 1, 2)
    z, second = draw.digits(0, 1, 2)
    angle_seeds = torch.randint(1 << 40, (2,), generator=draw.generator).tolist()
    turned = [rotated(part, 180, seed) for part, seed in zip((x, z), angle_seeds, strict=True)]
    return _noisy(torch.cat(turned, 3), draw, noise), 3 * first + second


def turned(draw: Draw, degrees: float, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Digits turned by angles uniform up to `degrees` to both sides; the label is the digit.

    The label was drawn before the angle. No digit turns into another: 6 and 9 are left out.
    """
    x, y = _enlarged(draw)
    seed = int(torch.randint(1 << 40, (1,), generator=draw.generator))
    return _noisy(rotated(x, degrees, seed), draw, noise), y


def rescaled(draw: Draw, factor: float, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Digits scaled by factors log-uniform between 1 / `factor` and `factor`.

    The label is the digit, which was drawn before the factor.
    """
    x, y = _enlarged(draw)
    seed = int(torch.randint(1 << 40, (1,), generator=draw.generator))
    return _noisy(scaled(x, factor, seed), draw, noise), y


def shifted_sideways(draw: Draw, pixels: float = 3, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Digits shifted horizontally by up to `pixels` from the middle; the label is the digit.

    The label was drawn before the shift. There are no vertical shifts. The border is so wide that
    a copy shifted once more by as much is still complete.
    """
    x, y = draw.digits()
    reach, side = int(pixels), SIDE + 4 * int(pixels)
    middle = torch.full((draw.n,), 2 * reach)
    left = middle + draw.integers(2 * reach + 1) - reach
    return _noisy(_placed(x, (side, side), middle, left), draw, noise), y


def _enlarged(draw: Draw) -> tuple[Tensor, Tensor]:
    """Return digits of 12 x 12 pixels in the middle of a picture."""
    x, y = draw.digits(*TURNABLE)
    border = (TURNED_SIDE - 12) // 2
    return torch.nn.functional.pad(resized(x, 12), (border,) * 4), y


def quarter_turned(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits turned by a random multiple of 90 degrees; the label is the digit.

    The label was drawn before the turn. Other angles do not occur.
    """
    x, y = draw.digits(*TURNABLE)
    turns = draw.integers(4)
    turned = torch.stack([quarter_turn(x, k) for k in range(4)], 1)
    return _noisy(turned[torch.arange(draw.n), turns], draw, noise), y


def which_turn(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits turned by a multiple of 90 degrees, anywhere on a torus; the label is the turn.

    Quarter turns permute the four labels, so that an invariant network can only guess. Shifts
    change nothing.
    """
    x, _ = draw.digits(*HANDED)
    y = draw.integers(4)
    copies = torch.stack([quarter_turn(x, k) for k in range(4)], 1)[torch.arange(draw.n), y]
    canvas = _placed(copies, (12, 12), draw.integers(12), draw.integers(12))
    return _noisy(canvas, draw, noise), y


def mirrored(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits of which half are mirrored; the label is the digit.

    The label was drawn before the coin that decides about the mirror.
    """
    x, y = draw.digits(*HANDED)
    coin = draw.integers(2).bool()[:, None, None, None]
    return _noisy(torch.where(coin, mirror(x), x), draw, noise), y


def handedness(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits of which half are mirrored, anywhere on a torus; the label is whether they are.

    A reflection exchanges the labels, so that an invariant network can only guess. Shifts change
    nothing.
    """
    x, _ = draw.digits(*HANDED)
    y = draw.integers(2)
    copies = torch.where(y.bool()[:, None, None, None], mirror(x), x)
    canvas = _placed(copies, (12, 12), draw.integers(12), draw.integers(12))
    return _noisy(canvas, draw, noise), y


def shifted_pictures(shape: Shape) -> Mapping[str, Architecture]:
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
    broken = {"translation": False}
    along = partial(invariant_along, shape.inputs, shape.outputs)
    return {
        **shifted_pictures(shape),
        "invariant along x": Architecture(partial(along, 3), broken),
        "invariant along y": Architecture(partial(along, 2), broken),
    }


def pooled(group: str, centred: bool, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return a network that pools over quarter turns or reflections."""
    features = (positional if centred else invariant)(shape, WIDTH)
    turns = 4 if group == "p4" else 1
    elements: list[Transform] = [partial(quarter_turn, turns=k) for k in range(turns)]
    if group == "pm":
        elements.append(mirror)
    return OrbitPooled(features, elements, outputs)


def point_group(group: str, centred: bool, shape: Shape) -> Mapping[str, Architecture]:
    """Return networks with and without invariance under a point group, and translations."""
    claims = {"translation": False} if centred else {"translation": True}
    plain = positional if centred else invariant
    build = partial(pooled, group, centred, shape.inputs, shape.outputs)
    return {
        "pooled": Architecture(build, {**claims, group: True}),
        "plain": Architecture(
            partial(plain, shape.inputs, shape.outputs), {**claims, group: False}
        ),
        "dense": Architecture(
            partial(dense, shape.inputs, shape.outputs), {"translation": False, group: False}
        ),
    }


def _turn(degrees: float, x: Tensor, generator: torch.Generator) -> Tensor:
    return rotated(x, degrees, int(torch.randint(1 << 40, (1,), generator=generator)))


def _zoom(factor: float, x: Tensor, generator: torch.Generator) -> Tensor:
    return scaled(x, factor, int(torch.randint(1 << 40, (1,), generator=generator)))


def augmented_by_turns(degrees: float, shape: Shape) -> Mapping[str, Architecture]:
    """Return one network trained with the true range of angles, without, and with all angles."""
    build = partial(positional, shape.inputs, shape.outputs)
    other = 0.0 if degrees > 90 else 180.0
    networks = {
        "true range": Architecture(build, augment=partial(_turn, degrees) if degrees else None),
        "wrong range": Architecture(build, augment=partial(_turn, other) if other else None),
        "dense": Architecture(partial(dense, shape.inputs, shape.outputs)),
    }
    return networks


def augmented_by_scale(factor: float, shape: Shape) -> Mapping[str, Architecture]:
    """Return one network trained with the true range of factors, and without."""
    build = partial(positional, shape.inputs, shape.outputs)
    return {
        "true range": Architecture(build, augment=partial(_zoom, factor)),
        "wrong range": Architecture(build),
        "dense": Architecture(partial(dense, shape.inputs, shape.outputs)),
    }


def _slide(pixels: int, x: Tensor, generator: torch.Generator) -> Tensor:
    shifts = torch.randint(-pixels, pixels + 1, (len(x),), generator=generator)
    columns = (torch.arange(x.shape[3]) - shifts[:, None]) % x.shape[3]
    return x.gather(3, columns[:, None, None].expand_as(x))


def augmented_by_shifts(pixels: int, shape: Shape) -> Mapping[str, Architecture]:
    """Return one network trained with the true range of shifts, and without."""
    build = partial(positional, shape.inputs, shape.outputs)
    return {
        "true range": Architecture(build, augment=partial(_slide, pixels)),
        "wrong range": Architecture(build),
        "dense": Architecture(partial(dense, shape.inputs, shape.outputs)),
    }


def _p4(seed: int) -> tuple[str]:
    return ("p4",)


def _pm(seed: int) -> tuple[str]:
    return ("pm",)


HOLDS, BROKEN = {"translation": True}, {"translation": False}


def _image(name: str, half: Half, sample: Sample, claims: Mapping[str, Fact], **more: Any) -> Task:
    oracle = "invariant" if claims.get("translation") else "positional"
    return Task(
        name,
        half,
        "image",
        sample,
        claims,
        **{"architectures": shifted_pictures, "oracle": oracle, **more},
    )


def _rotation(half: Half, degrees: float) -> Task:
    return Task(
        f"rotation {degrees:.0f}",
        half,
        "image",
        turned,
        {},
        {"rotation": degrees},
        partial(augmented_by_turns, degrees),
        "true range",
        knobs={"degrees": degrees},
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
    _image("row", "report", row, BROKEN, n=500, architectures=one_axis, oracle="invariant along x"),
    _image(
        "digit and column",
        "develop",
        digit_and_column,
        BROKEN,
        architectures=one_axis,
        oracle="invariant along y",
    ),
    _image(
        "weak breaking",
        "report",
        weak_breaking,
        BROKEN,
        architectures=one_axis,
        oracle="invariant along x",
    ),
    _image("textures", "develop", textures, HOLDS, n=400),
    _image("grating phase", "report", grating_phase, BROKEN, n=500),
    _image("two digits", "develop", two_digits, BROKEN),
    _rotation("develop", 0),
    _rotation("report", 30),
    _rotation("develop", 60),
    _rotation("report", 90),
    _rotation("develop", 180),
    Task(
        "scale 1.5",
        "report",
        "image",
        rescaled,
        {},
        {"scale": LARGEST_SCALE},
        partial(augmented_by_scale, LARGEST_SCALE),
        "true range",
        knobs={"factor": LARGEST_SCALE},
    ),
    Task(
        "shifted sideways",
        "report",
        "image",
        shifted_sideways,
        {},
        {"x-translation": 3.0, "y-translation": 0.0},
        partial(augmented_by_shifts, 3),
        "true range",
        n=500,
    ),
    _image(
        "quarter turns",
        "develop",
        quarter_turned,
        {"p4": True},
        n=500,
        groups=_p4,
        architectures=partial(point_group, "p4", True),
        oracle="pooled",
    ),
    _image(
        "which quarter turn",
        "report",
        which_turn,
        {**HOLDS, "p4": False},
        groups=_p4,
        architectures=partial(point_group, "p4", False),
        oracle="plain",
    ),
    _image(
        "mirrored",
        "report",
        mirrored,
        {"pm": True},
        ranges={"flip": 0.5},
        n=500,
        groups=_pm,
        architectures=partial(point_group, "pm", True),
        oracle="pooled",
    ),
    _image(
        "handedness",
        "develop",
        handedness,
        {**HOLDS, "pm": False},
        ranges={"flip": 0.0},
        groups=_pm,
        architectures=partial(point_group, "pm", False),
        oracle="plain",
    ),
)
