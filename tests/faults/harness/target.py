"""What is attacked: a function that reads files, and the ways to damage them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.mutation import Mutate

RUN_FILE = """
[data]
name = "digits"
limit = 40

[model]
width = 2
groups = ["translation"]

[fit]
epochs = 1
every = 1
burn_in = 0
batch_size = 20

[razor]
estimator = "mc"
"""


@dataclass(frozen=True)
class Target:
    """A reader under attack.

    Args:
        name: name in the table.
        read: reads the files in a folder, of which one was changed.
        damage: file in the folder -> function that changes its content.
        sealed: whether a changed file is given its new sum in `run.json`, as a stranger would.
        spoil: called with the folder after a file was changed.
    """

    name: str
    read: Callable[[Path, str], object]
    damage: dict[str, Mutate]
    sealed: bool = False
    spoil: Callable[[random.Random, Path], None] | None = None


def normal(*shape: int) -> np.ndarray:
    """Return normal numbers, equal in every call."""
    return np.random.default_rng(0).standard_normal(shape)
