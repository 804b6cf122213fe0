"""Eigenvalues of blocks as work that is shared out: over processes, threads, and a GPU."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.accelerate import cusolver
from symrazor.accelerate.cusolver import WORKSPACE_BYTES
from symrazor.accelerate.devices import run_in_threads, side_stream
from symrazor.accelerate.processes import all_reduce_, assign_owners, is_distributed, world
from symrazor.core.errors import CurvatureError
from symrazor.linalg.factor import Factor
from symrazor.linalg.spectra import ALONE, of_symmetric, symmetric

GRAIN = 2**24
"""Work of one piece, at least, in cubes of sizes: one matrix of 256 rows, 64 of 64."""


@dataclass(frozen=True)
class EigenJob:
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
    def of_factor(cls, factor: Factor, name: str, resolution: float) -> "list[EigenJob]":
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

    pieces: list[EigenJob]
    put: Callable[[list[Tensor]], None]


Shape = tuple[int, int]


@dataclass(frozen=True)
class EigenSchedule:
    """Numbers of pieces of work, by who does them.

    Args:
        together: by the GPU; each group is of one size, and one call of its solver for many.
        one_by_one: by the GPU.
        host: by threads of the CPU.
    """

    together: list[list[int]]
    one_by_one: list[int]
    host: list[int]


def schedule(pieces: Sequence[EigenJob], threads: int, many: bool) -> EigenSchedule:
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
    deal = EigenSchedule(groups, [], [])
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


def _groups(numbers: Sequence[int], pieces: Sequence[EigenJob]) -> list[list[int]]:
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


def _calls(numbers: Sequence[int], pieces: Sequence[EigenJob]) -> list[list[int]]:
    """Cut where the workspace of a call would be too large."""
    calls, used = list[list[int]](), 0
    for number in numbers:
        k, d = pieces[number].shape
        needed = k * workspace(d)
        if not calls or used + needed > WORKSPACE_BYTES:
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


HOST = torch.device("cpu")


def solve(pieces: Sequence[EigenJob]) -> list[Tensor]:
    """What all pieces of work find, each on its own device."""
    here = world()
    owners = assign_owners([piece.work for piece in pieces], here.size)
    mine = [number for number, owner in enumerate(owners) if owner == here.rank]
    failed: Exception | None = None
    found: dict[int, Tensor] = {}
    try:
        found = dict(zip(mine, _found([pieces[number] for number in mine]), strict=True))
    except CurvatureError as error:
        failed = error
    if failed is None and not is_distributed():
        return [found[number] for number in range(len(pieces))]
    return _told(pieces, found, failed)


def _found(pieces: Sequence[EigenJob]) -> list[Tensor]:
    """The eigenvalues of this process's pieces, largest first, on threads and on a GPU."""
    gpus = {piece.device for piece in pieces if piece.device.type == "cuda"}
    many = all(cusolver.solver(gpu) is not None for gpu in gpus)
    deal = schedule(pieces, torch.get_num_threads(), many)

    def tasks() -> Iterator[Callable[[], list[Tensor]]]:
        if deal.one_by_one:
            yield partial(_one_by_one, [pieces[number] for number in deal.one_by_one])
        if deal.together:
            yield partial(_all_groups, [[pieces[n] for n in group] for group in deal.together])
        for number in deal.host:  # read by this thread alone: no other one copies from a GPU
            yield partial(_listed, pieces[number].fetched())

    for gpu in gpus:
        torch.cuda.synchronize(gpu)  # another thread has another stream
    values = [value for part in run_in_threads(tasks()) for value in part]
    numbers = [*deal.one_by_one, *(n for group in deal.together for n in group), *deal.host]
    found = dict(zip(numbers, values, strict=True))
    return _at_home(pieces, [found[number] for number in range(len(pieces))])


def _listed(find: Callable[[], Tensor]) -> list[Tensor]:
    return [find()]


def _one_by_one(pieces: Sequence[EigenJob]) -> list[Tensor]:
    """By the GPU on a second stream: no copy to the host waits for them."""
    with torch.cuda.stream(side_stream(pieces[0].device, 0)):
        return [piece.find().to(HOST) for piece in pieces]


def _all_groups(groups: Sequence[Sequence[EigenJob]]) -> list[Tensor]:
    """By the GPU's solver for many, beside all else, a call for each group."""
    with torch.cuda.stream(side_stream(groups[0][0].device, 1)):
        return [value for group in groups for value in solve_batched(group)]


def solve_batched(pieces: Sequence[EigenJob]) -> list[Tensor]:
    """The eigenvalues of pieces of one size, as `EigenJob.find` finds them, on the host."""
    resolution = pieces[0].resolution
    try:
        matrices = torch.cat([piece.matrices() for piece in pieces])
        matrices = symmetric(matrices, "one of several factors")
        found = of_symmetric(matrices, "one of them", resolution, cusolver.eigvalsh)
    except CurvatureError:
        return [piece.find().to(HOST) for piece in pieces]  # this will say which it is
    return list(found.to(HOST).split([piece.shape[0] for piece in pieces]))


def _at_home(pieces: Sequence[EigenJob], values: Sequence[Tensor]) -> list[Tensor]:
    """The values on the devices of the pieces, in one copy."""
    homes = {piece.device for piece in pieces}
    if homes <= {HOST}:
        return list(values)
    if len(homes) > 1:
        return [value.to(piece.device) for piece, value in zip(pieces, values, strict=True)]
    joined = torch.cat([value.flatten() for value in values]).to(homes.pop())
    parts = joined.split([value.numel() for value in values])
    return [part.view(piece.shape) for piece, part in zip(pieces, parts, strict=True)]


def _told(
    pieces: Sequence[EigenJob], own: dict[int, Tensor], failed: Exception | None
) -> list[Tensor]:
    """Sums of what is zero but in the process that found it; not a number after an error in one."""
    empty = 0.0 if failed is None else torch.nan
    values = [
        own[number].clone()
        if number in own
        else torch.full(piece.shape, empty, dtype=torch.float64, device=piece.device)
        for number, piece in enumerate(pieces)
    ]
    all_reduce_(values)
    if failed is not None:
        raise failed
    for piece, value in zip(pieces, values, strict=True):
        if not bool(torch.isfinite(value).all()):
            raise CurvatureError(
                f"expected finite eigenvalues of {piece.name} from every process, got an error in "
                "another one; its message says which factor it was"
            )
    return values
