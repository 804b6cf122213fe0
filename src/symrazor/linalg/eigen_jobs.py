"""Eigenvalues of blocks as work that is shared out: over processes, threads, and a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.linalg.factor import Factor
from symrazor.linalg.spectra import ALONE, of_symmetric, symmetric

GRAIN = 2**24
"""Work of one piece, at least, in cubes of sizes: one matrix of 256 rows, 64 of 64."""


@dataclass(frozen=True)
class Piece:
    """Eigenvalues of some matrices of one size: work for one thread or one process.

    Args:
        name: whose they are.
        shape: of the result, [k, d].
        device: where the matrices are.
        matrices: makes them, [k, d, d].
        resolution: machine epsilon of the arithmetic that made them.
    """

    name: str
    shape: tuple[int, int]
    device: torch.device
    matrices: Callable[[], Tensor]
    resolution: float

    @classmethod
    def of_factor(cls, factor: Factor, name: str, resolution: float) -> "list[Piece]":
        """All blocks of a factor: large matrices one by one, small ones some at a time."""
        step = factor.blocks if factor.size < ALONE else max(1, GRAIN // factor.size**3)
        if step >= factor.blocks:
            parts = [factor]
        else:
            parts = [factor.some(i, i + step) for i in range(0, factor.blocks, step)]
        return [
            cls(name, (part.blocks, part.size), part.device, part.smaller, resolution)
            for part in parts
        ]

    @property
    def work(self) -> float:
        """In proportion to the time that it takes."""
        return float(self.shape[0] * self.shape[1] ** 3)

    def find(self) -> Float[Tensor, "k d"]:
        """The eigenvalues, where the matrices are, which are not kept beside their copy."""
        return of_symmetric(symmetric(self.matrices(), self.name), self.name, self.resolution)

    def fetched(self) -> Callable[[], Tensor]:
        """What is left to do on the host, for any thread: matrices of a GPU are copied now."""
        if self.device.type == "cpu":
            return self.find
        matrices = symmetric(self.matrices(), self.name)
        host = torch.empty(matrices.shape, dtype=matrices.dtype, pin_memory=True)
        host.copy_(matrices)  # 30 times as fast as to memory that is not pinned
        return partial(of_symmetric, host, self.name, self.resolution)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues that a block will need, in independent pieces.

    Args:
        pieces: all of them.
        put: takes their results, in order.
    """

    pieces: list[Piece]
    put: Callable[[list[Tensor]], None]
