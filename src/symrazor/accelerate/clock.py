"""Measure the time that budgets count: wall time, or the CPU time of this process.

Plans read `now`. Inside `cpu_time`, other programs on the machine change nothing about a plan, as
long as all work is done in one thread of this process. `counting` installs any other clock.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_clocks: list[Callable[[], float]] = []


def now() -> float:
    """Return the time in seconds since an arbitrary origin."""
    return _clocks[-1]() if _clocks else time.perf_counter()


def is_wall_time() -> bool:
    """Return whether `now` counts wall time; if not, work in other processes is not seen."""
    return not _clocks


@contextmanager
def counting(clock: Callable[[], float]) -> Iterator[None]:
    """Make `now` read this clock, and run torch on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.pop()
        torch.set_num_threads(threads)


def cpu_time() -> AbstractContextManager[None]:
    """Make `now` count the CPU time of this process."""
    return counting(time.process_time)
