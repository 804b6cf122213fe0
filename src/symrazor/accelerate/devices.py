"""Choose a device, its rounding mode and its streams, and run work on threads and streams.

LAPACK eigenvalue routines, thin matrix products and small convolutions scale badly inside one call,
and an OpenMP team that waits for its next call burns CPU time. Running several calls at once, each
on one thread, is faster.

`plain_execution` switches all accelerations off: no threads, CUDA graphs or batched GPU solvers.
The results are the same up to rounding. Use it to locate the cause of a difference.

    with plain_execution():
        razor.evidence(loader)
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Job = TypeVar("Job")
Result = TypeVar("Result")

N_STREAMS = 4
"""Branches of a graph, the current stream included."""

_FIRST_BRANCH_STREAM = 2  # the side streams before it capture graphs and solve eigenproblems
_PLAIN = ContextVar("symrazor_plain", default=False)


@contextmanager
def plain_execution() -> Iterator[None]:
    """Run one operation after the other in the calling thread."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def is_plain() -> bool:
    """Return whether accelerations are switched off."""
    return _PLAIN.get()


def resolve_device(name: str) -> str:
    """Return `name`, or for "auto" the GPU if there is one and the CPU otherwise."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def move_model(model: nn.Module, name: str) -> torch.device:
    """Move the model to a device and return the device."""
    if next(model.parameters(), None) is None:
        raise ValueError("The model has no parameters.")
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"Unknown device {name!r}. Use 'auto', 'cpu' or 'cuda'.") from error
        n_cuda = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= n_cuda:
            raise ValueError(
                f"Device {name!r} is not available: this machine has {n_cuda} CUDA devices. Use "
                "device='auto'."
            )
        try:
            model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"Device {name!r} is not available: {error}") from error
    return next(model.parameters()).device


@cache
def side_stream(device: torch.device, index: int) -> torch.cuda.Stream:
    """Return a CUDA stream beside the default one, always the same for one device and index.

    Streams are reused because cuBLAS keeps a workspace (32 MB on a recent GPU) for each stream of
    each thread and never frees it.
    """
    return torch.cuda.Stream(device)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 (10-bit mantissas) in CUDA matrix products and convolutions.

    Training tolerates TF32 because its gradients are noisier than that. Curvature is computed
    without it, unless its forward pass runs in bfloat16: TF32 has more digits, so that products of
    such numbers are exact.
    """
    if not torch.cuda.is_available():
        yield
        return
    matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolutions.allow_tf32
    matmul.allow_tf32 = convolutions.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, convolutions.allow_tf32 = before


def run_in_threads(tasks: Iterable[Callable[[], T]]) -> list[T]:
    """Return the results of all tasks, in order; see `iter_in_threads`."""
    return list(iter_in_threads(tasks))


def iter_sequentially(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the results one by one, freeing each task and its memory before the next is made."""
    source = iter(tasks)
    while (task := next(source, None)) is not None:
        result = task()
        del task
        yield result
        del result


def iter_in_threads(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Run tasks on as many threads as torch may use and yield their results in order.

    `tasks` may be lazy. Only the calling thread reads it, just far enough ahead to keep the workers
    busy, and runs tasks itself in between. Whatever creates the tasks (a forward pass) therefore
    runs in the calling thread, one at a time. No result depends on timing.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield from iter_sequentially(tasks)
        return
    workers, source = _workers(threads - 1), iter(tasks)
    pending: deque[tuple[Callable[[], T], Future[T]]] = deque()
    torch.set_num_threads(1)
    try:
        while _read_ahead(source, pending, workers, 2 * threads - 1):
            if pending[0][1].done() or not _run_next(pending):
                yield pending.popleft()[1].result()
    finally:
        wait([future for _, future in pending if not future.cancel()])
        torch.set_num_threads(threads)


def _read_ahead(
    source: Iterator[Callable[[], T]],
    pending: deque[tuple[Callable[[], T], Future[T]]],
    workers: Executor,
    n_ahead: int,
) -> bool:
    """Submit tasks until `n_ahead` wait to be started; return False when none is left."""
    while sum(not (f.running() or f.done()) for _, f in pending) < n_ahead:
        task = next(source, None)
        if task is None:
            break
        pending.append((task, workers.submit(task)))
    return bool(pending)


def _run_next(pending: deque[tuple[Callable[[], T], Future[T]]]) -> bool:
    """Run the first task that no worker has started; return False if there is none."""
    for i, (task, future) in enumerate(pending):
        if not future.done() and future.cancel():
            replacement: Future[T] = Future()
            pending[i] = task, replacement
            try:
                replacement.set_result(task())
            except Exception as error:
                replacement.set_exception(error)
            return True
    return False


def run_on_streams(tasks: Sequence[Callable[[], T]], inputs: Sequence[Tensor]) -> list[T]:
    """Return the results of all tasks, which become parallel branches of a graph being captured.

    A small kernel keeps a tenth of a large GPU busy, and on one stream the next kernel waits for
    it. Branches run at the same time. Outside a capture the launches take longest, and a CPU has
    its own threads (`run_in_threads`), so the tasks then run one after the other.

    Args:
        tasks: no task writes what another task reads, and no task runs a backward pass through
            branches: that would free memory on a branch while the caller's stream still reads it.
        inputs: at least one tensor; all tensors that were made for this step and that tasks read.
            A capture must not reuse their memory, because it does not know when the last branch has
            finished with them.
    """
    if len(tasks) < 2 or not _is_capturing(inputs[0].device):
        return [task() for task in tasks]
    main = torch.cuda.current_stream(inputs[0].device)
    n_branches = min(N_STREAMS, len(tasks)) - 1
    branches = [side_stream(main.device, _FIRST_BRANCH_STREAM + i) for i in range(n_branches)]
    for stream in branches:
        stream.wait_stream(main)
        for tensor in inputs:
            tensor.record_stream(stream)
    streams = [main, *branches]
    results = []
    for number, task in enumerate(tasks):
        with torch.cuda.stream(streams[number % len(streams)]):
            results.append(task())
    for stream in branches:
        main.wait_stream(stream)
    return results


def _is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured; False while a compiler traces."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return torch.cuda.is_current_stream_capturing()


@cache
def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors instead of returning it to the kernel.

    glibc returns large blocks when they are freed, and the next tensor pays for zeroed pages again:
    10 to 20% of an estimate. It keeps blocks up to the size of the largest freed so far, 32 MB at
    most (mallopt(3), M_MMAP_THRESHOLD), so freeing one large block once is enough. Other C
    libraries are not affected.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


@cache
def _workers(count: int) -> Executor:
    """Return threads that live on: each prepares every convolution anew on its first use."""
    return ThreadPoolExecutor(count, "symrazor", torch.set_num_threads, (1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)


DEVICE_TYPES = ("cpu", "cuda")


def ambient_autocast() -> dict[str, torch.dtype]:
    """Return the precision of `torch.autocast` where it is active, by type of device."""
    active = [kind for kind in DEVICE_TYPES if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in active}


@contextmanager
def autocast(precisions: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Compute in these precisions, by type of device, and as given on all other devices."""
    with ExitStack() as stack:
        for kind in DEVICE_TYPES:
            dtype = precisions.get(kind)
            if dtype is not None:
                # Recorded CUDA graphs may not read cached weights: the cache ends with the context.
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def cpu_threads() -> int:
    """Return the number of threads that this process may keep busy."""
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0))))


def run_in_turn(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Result]]:
    """Yield the index and the result of each job; check `stopped()` before each job.

    Raises:
        KeyboardInterrupt: `stopped()` returned True.
    """
    for index, job in enumerate(jobs):
        if stopped():
            raise KeyboardInterrupt
        yield index, function(job)
