"""Eigenvalues of all factors: by all processes, and in each by its GPU and the threads of its CPU.

Both work at once. Pieces are dealt out before any is begun, by the time that they should take
(deal.py).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from symrazor.accelerate import cusolver
from symrazor.accelerate.device import second_stream, third_stream
from symrazor.accelerate.processes import share_out, sum_, together, world
from symrazor.accelerate.threads import in_parallel
from symrazor.core.errors import CurvatureError
from symrazor.curvature.eigen_schedule import dealt_out
from symrazor.linalg.eigen_jobs import Piece
from symrazor.linalg.spectra import of_symmetric, symmetric

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
    gpus = {piece.device for piece in pieces if piece.device.type == "cuda"}
    many = all(cusolver.solver(gpu) is not None for gpu in gpus)
    deal = dealt_out(pieces, torch.get_num_threads(), many)

    def tasks() -> Iterator[Callable[[], list[Tensor]]]:
        if deal.one_by_one:
            yield partial(_one_by_one, [pieces[number] for number in deal.one_by_one])
        if deal.together:
            yield partial(_all_groups, [[pieces[n] for n in group] for group in deal.together])
        for number in deal.host:  # read by this thread alone: no other one copies from a GPU
            yield partial(_listed, pieces[number].fetched())

    for gpu in gpus:
        torch.cuda.synchronize(gpu)  # another thread has another stream
    values = [value for part in in_parallel(tasks()) for value in part]
    numbers = [*deal.one_by_one, *(n for group in deal.together for n in group), *deal.host]
    found = dict(zip(numbers, values, strict=True))
    return _at_home(pieces, [found[number] for number in range(len(pieces))])


def _listed(find: Callable[[], Tensor]) -> list[Tensor]:
    return [find()]


def _one_by_one(pieces: Sequence[Piece]) -> list[Tensor]:
    """By the GPU on a second stream: no copy to the host waits for them."""
    with torch.cuda.stream(second_stream(pieces[0].device)):
        return [piece.find().to(HOST) for piece in pieces]


def _all_groups(groups: Sequence[Sequence[Piece]]) -> list[Tensor]:
    """By the GPU's solver for many, beside all else, a call for each group."""
    with torch.cuda.stream(third_stream(groups[0][0].device)):
        return [value for group in groups for value in found_together(group)]


def found_together(pieces: Sequence[Piece]) -> list[Tensor]:
    """The eigenvalues of pieces of one size, as `Piece.find` finds them, on the host."""
    resolution = pieces[0].resolution
    try:
        matrices = torch.cat([piece.matrices() for piece in pieces])
        matrices = symmetric(matrices, "one of several factors")
        found = of_symmetric(matrices, "one of them", resolution, cusolver.eigvalsh)
    except CurvatureError:
        return [piece.find().to(HOST) for piece in pieces]  # this will say which it is
    return list(found.to(HOST).split([piece.shape[0] for piece in pieces]))


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
