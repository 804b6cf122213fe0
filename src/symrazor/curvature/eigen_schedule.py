"""Who finds which eigenvalues: a GPU, many matrices at once or one by one, or threads of a CPU.

| who | seconds for k matrices of d rows, about (H200, torch 2.11, CUDA 13) |
|---|---|
| the GPU, many in one call | 3e-4 + 1e-7 k d up to 80 rows, 0.015 up to 256, then 1e-4 d |
| the GPU, one by one | 1.05e-5 k d |
| one thread of its CPU, while others work | k (4e-6 d + 1.2e-10 d^3) |

A single call of the GPU's solver for many is slow for one matrix, but hardly slower for a hundred,
and leaves room for the other solver to work beside it. What comes in large numbers is for it.
Of the rest, large matrices are for the GPU and for threads, small ones for threads. Who finds what
depends on sizes and on the number of threads, and never on timing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from symrazor.accelerate.cusolver import WORKSPACE
from symrazor.linalg.eigen_jobs import Piece
from symrazor.linalg.spectra import ALONE

Shape = tuple[int, int]


@dataclass(frozen=True)
class Deal:
    """Numbers of pieces of work, by who does them.

    Args:
        together: by the GPU; each group is of one size, and one call of its solver for many.
        one_by_one: by the GPU.
        host: by threads of the CPU.
    """

    together: list[list[int]]
    one_by_one: list[int]
    host: list[int]


def dealt_out(pieces: Sequence[Piece], threads: int, many: bool) -> Deal:
    """What comes in large numbers first; then each piece goes to whoever is done with it first.

    A thread keeps each solver of the GPU busy, the others work themselves; a single one does all.

    Args:
        pieces: in any order; each list of the result has the largest first.
        threads: of the CPU.
        many: whether the GPU has a solver for many at once.
    """
    order = sorted(range(len(pieces)), key=lambda number: -pieces[number].work)
    groups = _groups([n for n in order if pieces[n].device.type == "cuda"], pieces) if many else []
    taken = {number for group in groups for number in group}
    gpu, others = 0.0, [0.0] * max(0, threads - (2 if groups else 1))
    deal = Deal(groups, [], [])
    for number in order:
        if number in taken:
            continue
        piece = pieces[number]
        here, there = seconds_on_cpu(piece.shape), seconds_on_gpu(piece.shape)
        first = min(range(len(others)), key=others.__getitem__, default=None)
        wait = 0.0 if first is None else others[first] - gpu
        if piece.device.type == "cuda" and there < wait + here:
            deal.one_by_one.append(number)
            gpu += there
        else:
            deal.host.append(number)
            if first is not None:
                others[first] += here
    return deal


def _groups(numbers: Sequence[int], pieces: Sequence[Piece]) -> list[list[int]]:
    """Pieces that a GPU's solver for many should take, by calls; of one size, as it comes."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number in numbers:
        piece = pieces[number]
        alike.setdefault((piece.device, piece.resolution, piece.shape[1]), []).append(number)
    chosen = []
    for same in alike.values():
        calls = _calls(same, pieces)
        shapes = [
            (sum(pieces[n].shape[0] for n in call), pieces[call[0]].shape[1]) for call in calls
        ]
        whole = (sum(k for k, _ in shapes), shapes[0][1])
        if sum(map(seconds_together, shapes)) < min(seconds_on_gpu(whole), seconds_on_cpu(whole)):
            chosen += calls
    return chosen


def _calls(numbers: Sequence[int], pieces: Sequence[Piece]) -> list[list[int]]:
    """Cut where the workspace of a call would be too large."""
    calls, used = list[list[int]](), 0
    for number in numbers:
        k, d = pieces[number].shape
        needed = k * workspace(d)
        if not calls or used + needed > WORKSPACE:
            calls.append([])
            used = 0
        calls[-1].append(number)
        used += needed
    return calls


def workspace(d: int) -> int:
    """Bytes that the solver for many takes for a matrix of d rows, about, and rather too many."""
    return 2**19 + 6000 * d + 32 * d * d


def seconds_together(shape: Shape) -> float:
    """Of one call of the GPU's solver for many."""
    k, d = shape
    if d <= 80:
        return 3e-4 + 1e-7 * k * d
    return 0.015 if d <= 256 else 1e-4 * d


def seconds_on_gpu(shape: Shape) -> float:
    """One by one: the time of launches, a few for each row; small matrices are not for it.

    (Up to 32 rows torch takes many in one go, but with half a megabyte of workspace for each.)
    """
    k, d = shape
    return k * 1.05e-5 * d if d >= ALONE else math.inf


def seconds_on_cpu(shape: Shape) -> float:
    """On one thread."""
    k, d = shape
    return k * (4e-6 * d + 1.2e-10 * d**3)
