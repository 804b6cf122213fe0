"""Pictures of MNIST, Fashion-MNIST and CIFAR-10 with a known answer; they need `--data DIR`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from symrazor.bench.truth.networks import mirror
from symrazor.bench.truth.pictures import noisy, placed, shift_architectures
from symrazor.bench.truth.task import Draw, Half, Sample, Task
from symrazor.bench.truth.turned_pictures import (
    ORIENTED,
    augmented_by_turns,
    bounded_angles,
    pm_group,
    point_group,
    rotated_by,
)
from symrazor.data.transforms import resized

TURNED_SIDE, PHOTO_SIDE, OBJECT_SIDE = 20, 16, 14
"""Sides in pixels of rotated digits, of photographs, and of objects on a canvas."""
ONE_WAY = (5, 7, 9)
"""Classes of Fashion-MNIST with shoes, which all point to the left."""


def turned_mnist(draw: Draw, degrees: float) -> tuple[Tensor, Tensor]:
    """Digits of MNIST turned by `degrees` to both sides of an orientation; the label is both.

    Label and angle were drawn independently. A picture at the end of its range, turned once more by
    `degrees`, reaches the range of the other orientation: labels contradict a larger range.
    """
    x, y = draw.official("mnist", *ORIENTED)
    angle, orientation = bounded_angles(draw, degrees)
    return rotated_by(resized(x, TURNED_SIDE), angle), y + len(ORIENTED) * orientation


def clothes_anywhere(draw: Draw, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Clothes of Fashion-MNIST at uniform places of a torus; the label is the class.

    The label was drawn before the place, which a circular shift changes.
    """
    x, y = draw.official("fashion-mnist")
    side = 20
    canvas = placed(resized(x, OBJECT_SIDE), (side, side), draw.integers(side), draw.integers(side))
    return noisy(canvas, draw, noise), y


def mirrored_clothes(draw: Draw) -> tuple[Tensor, Tensor]:
    """Clothes of Fashion-MNIST of which half are mirrored; the label is the class.

    The label was drawn before the coin that decides about the mirror.
    """
    x, y = draw.official("fashion-mnist")
    # Every second pixel of a mirrored picture is not the mirror image of every second pixel.
    small = resized(x, OBJECT_SIDE)
    coin = draw.integers(2).bool()[:, None, None, None]
    return torch.where(coin, mirror(small), small), y


def shoe_direction(draw: Draw, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Shoes of Fashion-MNIST, all of which point left, half of them mirrored; the label is which.

    A reflection exchanges the labels, so that an invariant network can only guess.
    """
    x, _ = draw.official("fashion-mnist", *ONE_WAY)
    y = draw.integers(2)
    small = resized(x, OBJECT_SIDE)
    return noisy(torch.where(y.bool()[:, None, None, None], mirror(small), small), draw, noise), y


def photographs(draw: Draw) -> tuple[Tensor, Tensor]:
    """Photographs of CIFAR-10 of four classes, as they are; the label is the class.

    Which side an animal or a vehicle shows is chance: a mirrored photograph is as likely, and
    has the same label.
    """
    x, y = draw.official("cifar-10", 0, 1, 6, 8)
    return resized(x, PHOTO_SIDE), y


def _task(name: str, half: Half, sample: Sample, needs: str, **more: Any) -> Task:
    return Task(name, half, "image", sample, needs=needs, **more)


def _rotation(half: Half, degrees: float) -> Task:
    return _task(
        f"MNIST, rotation {degrees:.0f}",
        half,
        turned_mnist,
        "mnist",
        ranges={"rotation": degrees},
        architectures=partial(augmented_by_turns, degrees),
        oracle="true range",
        knobs={"degrees": degrees},
    )


TASKS = (
    _rotation("develop", 60),
    _rotation("report", 30),
    _task(
        "clothes anywhere",
        "report",
        clothes_anywhere,
        "fashion-mnist",
        claims={"translation": True},
        architectures=shift_architectures,
        oracle="invariant",
    ),
    _task(
        "mirrored clothes",
        "develop",
        mirrored_clothes,
        "fashion-mnist",
        claims={"pm": True},
        ranges={"flip": 0.5},
        architectures=partial(point_group, "pm", True),
        oracle="pooled",
        groups=pm_group,
    ),
    _task(
        "direction of shoes",
        "report",
        shoe_direction,
        "fashion-mnist",
        claims={"pm": False},
        ranges={"flip": 0.0},
        architectures=partial(point_group, "pm", True),
        oracle="plain",
        groups=pm_group,
    ),
    _task(
        "photographs",
        "develop",
        photographs,
        "cifar-10",
        ranges={"flip": 0.5},
        architectures=partial(point_group, "pm", True),
        oracle="pooled",
        n=2000,
    ),
)
