"""Pictures with a known answer about rotations, reflections, scales and small shifts.

Objects are the embedded 8 x 8 digits, mostly enlarged to 12 x 12 pixels.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.bench.truth.networks import (
    Architecture,
    OrbitPooled,
    Transform,
    dense,
    invariant,
    invariant_trunk,
    mirror,
    positional,
    positional_trunk,
    quarter_turn,
)
from symrazor.bench.truth.pictures import SIDE, noisy, placed
from symrazor.bench.truth.task import Draw, Half, Sample, Shape, Task
from symrazor.data.transforms import resized, rotated, scaled

TURNABLE = (0, 1, 2, 3, 4, 5, 7, 8)
"""Digits of which none turns into another one by a rotation."""
ORIENTED = (2, 3, 4, 7)
"""Digits whose orientation can be seen."""
HANDED = (2, 3, 4, 5, 7)
"""Digits that differ clearly from their mirror image."""
TURNED_SIDE = 14
"""Side of pictures that are rotated or scaled; digits fill 12 pixels."""
LARGEST_SCALE = 1.5


def shifted_sideways(draw: Draw, pixels: float = 3, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Digits shifted horizontally by up to `pixels`, in one of two rows; the label is both.

    Digit and row were drawn before the shift. A vertical shift by `pixels` exchanges the rows and
    thereby the label. The border is so wide that a copy shifted once more by as much is complete.
    """
    x, y = draw.digits(0, 1, 2, 3, 4)
    reach, side = int(pixels), SIDE + 4 * int(pixels)
    row, middle = draw.integers(2), torch.full((draw.n,), 2 * reach)
    left = middle + draw.integers(2 * reach + 1) - reach
    top = middle + reach * row - reach // 2
    return noisy(placed(x, (side, side), top, left), draw, noise), y + 5 * row


def tilted(draw: Draw, degrees: float = 40, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Digits that are upright or tilted by `degrees`; the label is the digit and whether it is.

    A rotation by `degrees` exchanges labels. Handwriting itself is slanted by a few degrees.
    """
    x, y = enlarged(draw, *ORIENTED)
    is_tilted = draw.integers(2)
    return noisy(rotated_by(x, degrees * is_tilted), draw, noise), y + 4 * is_tilted


def turned(draw: Draw, degrees: float, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Digits turned by `degrees` to both sides of one of several orientations; the label is both.

    Label and angle were drawn independently. Up to 60 degrees, a picture at the end of its range,
    turned once more by `degrees`, reaches the range of the next orientation: labels contradict a
    larger range. Beyond 60 degrees there is one orientation, and only the spread of the pictures
    is known; no digit turns into another.
    """
    count = orientations(degrees)
    classes = ORIENTED if count > 1 else TURNABLE
    x, y = enlarged(draw, *classes)
    angle, orientation = bounded_angles(draw, degrees)
    return noisy(rotated_by(x, angle), draw, noise), y + len(classes) * orientation


def orientations(degrees: float) -> int:
    """Return how many ranges of this size fit on a circle with gaps of the same size."""
    return 4 if degrees <= 30 else 2 if degrees <= 60 else 1


def bounded_angles(draw: Draw, degrees: float) -> tuple[Tensor, Tensor]:
    """Return angles around equally spaced orientations, and the orientations."""
    count = orientations(degrees)
    orientation = draw.integers(count)
    angle = 360 / count * orientation + degrees * (2 * draw.uniform() - 1)
    return angle, orientation


def rotated_by(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate every picture by its own angle; bilinear, with zeros outside."""
    angle = degrees * (math.pi / 180)
    matrix = torch.zeros(len(x), 2, 3)
    matrix[:, 0, 0] = matrix[:, 1, 1] = angle.cos()
    matrix[:, 0, 1], matrix[:, 1, 0] = -angle.sin(), angle.sin()
    grid = nn.functional.affine_grid(matrix, list(x.shape), align_corners=False)
    return nn.functional.grid_sample(x, grid, align_corners=False)


def rescaled(draw: Draw, factor: float, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Digits scaled by factors log-uniform between 1 / `factor` and `factor`.

    The label is the digit, which was drawn before the factor.
    """
    x, y = enlarged(draw)
    seed = int(torch.randint(1 << 40, (1,), generator=draw.generator))
    return noisy(scaled(x, factor, seed), draw, noise), y


def enlarged(draw: Draw, *classes: int) -> tuple[Tensor, Tensor]:
    """Return digits of 12 x 12 pixels in the middle of a picture."""
    x, y = draw.digits(*(classes or TURNABLE))
    border = (TURNED_SIDE - 12) // 2
    return torch.nn.functional.pad(resized(x, 12), (border,) * 4), y


def quarter_turned(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits turned by a random multiple of 90 degrees; the label is the digit.

    The label was drawn before the turn. Other angles do not occur.
    """
    x, y = draw.digits(*TURNABLE)
    turns = draw.integers(4)
    turned = torch.stack([quarter_turn(x, k) for k in range(4)], 1)
    return noisy(turned[torch.arange(draw.n), turns], draw, noise), y


def which_turn(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits turned by a multiple of 90 degrees, anywhere on a torus; the label is the turn.

    Quarter turns permute the four labels, so that an invariant network can only guess. Shifts
    change nothing.
    """
    x, _ = draw.digits(*HANDED)
    y = draw.integers(4)
    copies = torch.stack([quarter_turn(x, k) for k in range(4)], 1)[torch.arange(draw.n), y]
    canvas = placed(copies, (12, 12), draw.integers(12), draw.integers(12))
    return noisy(canvas, draw, noise), y


def mirrored(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits of which half are mirrored; the label is the digit.

    The label was drawn before the coin that decides about the mirror.
    """
    x, y = draw.digits(*HANDED)
    coin = draw.integers(2).bool()[:, None, None, None]
    return noisy(torch.where(coin, mirror(x), x), draw, noise), y


def mirrored_in_noise(draw: Draw, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Digits of 10 x 10 pixels in the middle of a noisy picture, half of them mirrored.

    The label is the digit, which was drawn before the coin that decides about the mirror.
    """
    x, y = draw.digits(1, *HANDED)
    x = nn.functional.pad(resized(x, 10), (1,) * 4)
    coin = draw.integers(2).bool()[:, None, None, None]
    return noisy(torch.where(coin, mirror(x), x), draw, noise), y


def handedness(draw: Draw, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Digits of which half are mirrored, anywhere on a torus; the label is whether they are.

    A reflection exchanges the labels, so that an invariant network can only guess. Shifts change
    nothing.
    """
    x, _ = draw.digits(*HANDED)
    y = draw.integers(2)
    copies = torch.where(y.bool()[:, None, None, None], mirror(x), x)
    canvas = placed(copies, (12, 12), draw.integers(12), draw.integers(12))
    return noisy(canvas, draw, noise), y


def pooled(group: str, centred: bool, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return a network that pools over quarter turns or reflections."""
    trunk = (positional_trunk if centred else invariant_trunk)(shape)
    turns = 4 if group == "p4" else 1
    elements: list[Transform] = [partial(quarter_turn, turns=k) for k in range(turns)]
    if group == "pm":
        elements.append(mirror)
    return OrbitPooled(trunk, elements, outputs)


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
    """Return a network trained with the true range of angles, and with all or none."""
    build = partial(positional, shape.inputs, shape.outputs)
    other = 0.0 if degrees > 90 else 180.0
    return {
        "true range": Architecture(build, augment=partial(_turn, degrees) if degrees else None),
        "wrong range": Architecture(build, augment=partial(_turn, other) if other else None),
        "dense": Architecture(partial(dense, shape.inputs, shape.outputs)),
    }


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


def p4_group(seed: int) -> tuple[str]:
    """Return the group of shifts and quarter turns."""
    return ("p4",)


def pm_group(seed: int) -> tuple[str]:
    """Return the group of shifts and left-right reflections."""
    return ("pm",)


def _task(name: str, half: Half, sample: Sample, **more: Any) -> Task:
    return Task(name, half, "image", sample, **{"oracle": "true range", **more})


def _rotation(half: Half, degrees: float) -> Task:
    return _task(
        f"rotation {degrees:.0f}",
        half,
        turned,
        ranges={"rotation": degrees},
        architectures=partial(augmented_by_turns, degrees),
        knobs={"degrees": degrees},
    )


TASKS = (
    _task(
        "rotation 0",
        "develop",
        tilted,
        ranges={"rotation": 0.0},
        architectures=partial(augmented_by_turns, 0.0),
        oracle="dense",
        n=500,
    ),
    _rotation("develop", 20),
    _rotation("report", 30),
    _rotation("develop", 60),
    _rotation("report", 90),
    _rotation("develop", 180),
    _task(
        "scale 1.5",
        "report",
        rescaled,
        ranges={"scale": LARGEST_SCALE},
        architectures=partial(augmented_by_scale, LARGEST_SCALE),
        knobs={"factor": LARGEST_SCALE},
    ),
    _task(
        "scale 1.3",
        "develop",
        rescaled,
        ranges={"scale": 1.3},
        architectures=partial(augmented_by_scale, 1.3),
        knobs={"factor": 1.3},
    ),
    _task(
        "shifted sideways",
        "develop",
        shifted_sideways,
        ranges={"x-translation": 3.0, "y-translation": 0.0},
        architectures=partial(augmented_by_shifts, 3),
        n=500,
    ),
    _task(
        "quarter turns",
        "develop",
        quarter_turned,
        claims={"p4": True},
        architectures=partial(point_group, "p4", True),
        oracle="pooled",
        groups=p4_group,
        n=500,
    ),
    _task(
        "which quarter turn",
        "report",
        which_turn,
        claims={"translation": True, "p4": False},
        architectures=partial(point_group, "p4", False),
        oracle="plain",
        groups=p4_group,
        n=700,
    ),
    _task(
        "mirrored",
        "report",
        mirrored,
        claims={"pm": True},
        ranges={"flip": 0.5},
        architectures=partial(point_group, "pm", True),
        oracle="pooled",
        groups=pm_group,
        n=500,
    ),
    _task(
        "mirrored, in noise",
        "develop",
        mirrored_in_noise,
        claims={"pm": True},
        ranges={"flip": 0.5},
        architectures=partial(point_group, "pm", True),
        oracle="pooled",
        groups=pm_group,
        n=500,
    ),
    _task(
        "handedness",
        "develop",
        handedness,
        claims={"translation": True, "pm": False},
        ranges={"flip": 0.0},
        architectures=partial(point_group, "pm", False),
        oracle="plain",
        groups=pm_group,
        n=700,
    ),
)
