"""The embedded digits in one of the four quadrants of a canvas, asked twice.

For the digit, where position does not matter, and for digit and quadrant, where it does. The images
are the same.
"""

from collections.abc import Sequence
from typing import Literal

from symrazor.data import Tensors, digits, on_canvas
from symrazor.discovery import grids as maps
from symrazor.discovery.structures import Family
from symrazor.discovery.user_groups import Offered
from symrazor.training.options import FitConfig

CANVAS = 16
SHAPE = (1, CANVAS, CANVAS)
Task = Literal["digit", "quadrant"]
QUESTIONS: dict[Task, str] = {
    "digit": "Which digit is it?",
    "quadrant": "Which digit is it, and in which quadrant?",
}
CLASSES: dict[Task, int] = {"digit": 10, "quadrant": 40}
DEFAULTS = FitConfig(epochs=50, batch_size=64, lr=1e-2).change(estimator="mc")


def canvas(task: Task, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Training and test digits on a canvas; the test digits are other people's, elsewhere."""
    train = on_canvas(*digits("train"), size=CANVAS, seed=seed, task=task)
    test = on_canvas(*digits("test"), size=CANVAS, seed=seed + 1, task=task)
    return train, test


def family(task: Task, groups: Sequence[Offered] | None = None) -> Family:
    """The networks that are compared; with groups to relax instead of translations alone."""
    return maps.family(SHAPE, CLASSES[task], groups=groups)


def names(task: Task) -> tuple[str, ...]:
    """Of the classes."""
    if task == "digit":
        return tuple(map(str, range(10)))
    corners = ("top left", "top right", "bottom left", "bottom right")
    return tuple(f"{digit} {corner}" for corner in corners for digit in range(10))
