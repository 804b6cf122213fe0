"""Independent pieces of a recorded step, side by side: branches of its CUDA graph.

A small kernel keeps a tenth of a large GPU busy, and on one stream the next waits for it. Pieces
that do not need each other are recorded on several streams: the graph then has branches, which run
at once. Outside of a recording the launches are what takes long, and a CPU has threads of its own
for this (parallel.py): there, pieces are done one after the other.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

LANES = 4
"""Streams, the current one among them."""


def side_by_side(tasks: Sequence[Callable[[], T]], read: Sequence[Tensor]) -> list[T]:
    """Results of all tasks, in order.

    Args:
        tasks: none of them writes what another one reads, or goes back through lanes itself: a
            backward pass leaves memory to a lane that the caller's stream may still be reading.
        read: at least one tensor, all that were made for this step and that tasks read. Their
            memory is not used again in a recording, because it is not known when the last lane is
            done with them.
    """
    if len(tasks) < 2 or not _recorded(read[0].device):
        return [task() for task in tasks]
    main = torch.cuda.current_stream(read[0].device)
    lanes = [main, *(_lane(main.device, number) for number in range(1, min(LANES, len(tasks))))]
    for lane in lanes[1:]:
        lane.wait_stream(main)
        for tensor in read:
            tensor.record_stream(lane)
    results = []
    for number, task in enumerate(tasks):
        with torch.cuda.stream(lanes[number % len(lanes)]):
            results.append(task())
    for lane in lanes[1:]:
        main.wait_stream(lane)
    return results


def _recorded(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded; what a compiler traces is its own affair."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return torch.cuda.is_current_stream_capturing()


@cache
def _lane(device: torch.device, number: int) -> torch.cuda.Stream:
    """Always the same, as in device.py."""
    return torch.cuda.Stream(device)
