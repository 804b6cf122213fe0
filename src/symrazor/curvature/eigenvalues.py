"""Eigenvalues of all factors: by all processes, and in each by its GPU and the threads of its CPU.

A GPU's solver takes matrices one by one, and each of them waits for a few kernels per column: it is
fast for a large matrix and slow for a thousand small ones. A thread of a CPU needs a time that
grows with the cube of the size, but there are many threads. So both work: pieces are dealt out by
the time they should take, before any is begun. Which device finds what depends on sizes and on the
number of threads, and never on timing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from symrazor.distributed import share_out, sum_, together, world
from symrazor.errors import CurvatureError
from symrazor.linear_algebra.pieces import Piece
from symrazor.linear_algebra.spectra import ALONE
from symrazor.machine.device import second_stream
from symrazor.machine.parallel import in_parallel

HOST = torch.device("cpu")


def eigenvalues(pieces: Sequence[Piece]) -> list[Tensor]:
    """What all pieces of work find, each on its own device."""
    here = world()
    owners = share_out([piece.work for piece in pieces], here.size)
    mine = [number for number, owner in enumerate(owners) if owner == here.rank]
    failed: Exception | None = None
    found: dict[int, Tensor] = {}
    try:
        found = dict(zip(mine, _found([pieces[number] for number in mine]), strict=True))
    except CurvatureError as error:
        failed = error
    if failed is None and not together():
        return [found[number] for number in range(len(pieces))]
    return _told(pieces, found, failed)


def _found(pieces: Sequence[Piece]) -> list[Tensor]:
    """The eigenvalues of this process's pieces, largest first, on threads and on a GPU."""
    order = sorted(range(len(pieces)), key=lambda number: -pieces[number].work)
    threads = torch.get_num_threads()
    on_gpu = dealt_out([pieces[number] for number in order], threads)
    device = [number for number, gpu in zip(order, on_gpu, strict=True) if gpu]
    host = [number for number, gpu in zip(order, on_gpu, strict=True) if not gpu]

    def tasks() -> Iterator[Callable[[], list[Tensor]]]:
        if device:
            yield partial(_by_the_gpu, [pieces[number] for number in device])
        for number in host:  # read by this thread alone: no other one copies from a GPU
            yield partial(_listed, pieces[number].fetched())

    for place in {piece.device for piece in pieces if piece.device.type == "cuda"}:
        torch.cuda.synchronize(place)  # another thread has another stream
    values = [value for part in in_parallel(tasks()) for value in part]
    found = dict(zip(device + host, values, strict=True))
    return _at_home(pieces, [found[number] for number in range(len(pieces))])


def _listed(find: Callable[[], Tensor]) -> list[Tensor]:
    return [find()]


def dealt_out(pieces: Sequence[Piece], threads: int) -> list[bool]:
    """Which pieces a GPU takes: each in turn goes to whoever would be done with it first.

    One thread keeps the GPU busy, the others work themselves; a single one does both.

    Args:
        pieces: largest first.
        threads: of the CPU.
    """
    gpu, others, taken = 0.0, [0.0] * (threads - 1), list[bool]()
    for piece in pieces:
        if piece.device.type != "cuda":
            taken.append(False)
            continue
        there, here = seconds_on_gpu(piece), seconds_on_cpu(piece)
        first = min(range(len(others)), key=others.__getitem__, default=None)
        taken.append(there < here if first is None else gpu + there < others[first] + here)
        if taken[-1]:
            gpu += there
        elif first is not None:
            others[first] += here
    return taken


def seconds_on_gpu(piece: Piece) -> float:
    """About, on an H200 (torch 2.11): the time of launches; small matrices are not for it.

    (Up to 32 rows many are done in one go, but with half a megabyte of workspace for each.)
    """
    k, d = piece.shape
    return k * 9e-6 * d if d >= ALONE else math.inf


def seconds_on_cpu(piece: Piece) -> float:
    """About, on one thread."""
    k, d = piece.shape
    return k * (4e-6 * d + 1e-10 * d**3)


def _by_the_gpu(pieces: Sequence[Piece]) -> list[Tensor]:
    """One after the other on a second stream: no copy to the host waits for them."""
    with torch.cuda.stream(second_stream(pieces[0].device)):
        return [piece.find().to(HOST) for piece in pieces]


def _at_home(pieces: Sequence[Piece], values: Sequence[Tensor]) -> list[Tensor]:
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
    pieces: Sequence[Piece], own: dict[int, Tensor], failed: Exception | None
) -> list[Tensor]:
    """Sums of what is zero but in the process that found it; not a number after an error in one."""
    empty = 0.0 if failed is None else torch.nan
    values = [
        own[number].clone()
        if number in own
        else torch.full(piece.shape, empty, dtype=torch.float64, device=piece.device)
        for number, piece in enumerate(pieces)
    ]
    sum_(values)
    if failed is not None:
        raise failed
    for piece, value in zip(pieces, values, strict=True):
        if not bool(torch.isfinite(value).all()):
            raise CurvatureError(
                f"expected finite eigenvalues of {piece.name} from every process, got an error in "
                "another one; its message says which factor it was"
            )
    return values
