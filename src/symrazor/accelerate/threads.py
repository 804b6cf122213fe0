"""Independent pieces of CPU work side by side, each on one thread.

LAPACK eigenvalue routines, thin matrix products and small convolutions scale badly inside one call,
and an OpenMP team that waits for its next call burns CPU time. So it is better to run several calls
at once, each on one thread.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def in_parallel(tasks: Iterable[Callable[[], T]]) -> list[T]:
    """Results of all tasks, in order; see `as_finished`."""
    return list(as_finished(tasks))


def in_turn(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results one by one; a task and its memory are let go before the next task is made."""
    source = iter(tasks)
    while (task := next(source, None)) is not None:
        found = task()
        del task
        yield found
        del found


def as_finished(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Run tasks on as many threads as torch may use; results come in the order of the tasks.

    `tasks` may be lazy: only the calling thread reads it, as far ahead as keeps the helpers busy,
    and works on tasks itself in between. So whatever makes the tasks (a forward pass) runs in the
    caller's thread, one at a time, while the helpers work. No result depends on timing.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield from in_turn(tasks)
        return
    helpers, source = _helpers(threads - 1), iter(tasks)
    pending: deque[tuple[Callable[[], T], Future[T]]] = deque()
    torch.set_num_threads(1)
    try:
        while _read_ahead(source, pending, helpers, 2 * threads - 1):
            if pending[0][1].done() or not _work(pending):
                yield pending.popleft()[1].result()
    finally:
        wait([future for _, future in pending if not future.cancel()])
        torch.set_num_threads(threads)


def _read_ahead(
    source: Iterator[Callable[[], T]],
    pending: deque[tuple[Callable[[], T], Future[T]]],
    helpers: Executor,
    ahead: int,
) -> bool:
    """Hand out tasks until `ahead` are not begun yet; False when nothing is left to do."""
    while sum(not (f.running() or f.done()) for _, f in pending) < ahead:
        task = next(source, None)
        if task is None:
            break
        pending.append((task, helpers.submit(task)))
    return bool(pending)


def _work(pending: deque[tuple[Callable[[], T], Future[T]]]) -> bool:
    """Take the first task that no helper has begun, and do it; False if there is none."""
    for i, (task, future) in enumerate(pending):
        if not future.done() and future.cancel():
            own: Future[T] = Future()
            pending[i] = task, own
            try:
                own.set_result(task())
            except Exception as error:
                own.set_exception(error)
            return True
    return False


@cache
def keep_pages() -> None:
    """Let the C library keep the memory of freed tensors, instead of fetching it anew each time.

    glibc returns large blocks to the kernel when they are freed, and the next tensor pays for
    zeroed pages again: 10 to 20% of an estimate. It keeps blocks up to the largest it has seen
    freed, 32 MB at most (mallopt(3), M_MMAP_THRESHOLD): show it one. Without effect elsewhere.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


@cache
def _helpers(count: int) -> Executor:
    """Threads that stay, because each prepares every convolution anew the first time it sees it."""
    return ThreadPoolExecutor(count, "symrazor", torch.set_num_threads, (1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)
