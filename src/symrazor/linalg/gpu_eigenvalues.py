"""Compute eigenvalues on GPUs and CPU threads at once.

`schedule` assigns every job to a solver before any is started, by the time that the solver should
take:

| solver | seconds for k matrices of d rows, about (H200, torch 2.11, CUDA 13) |
|---|---|
| GPU, batched | 3e-4 + 1e-7 k d up to 80 rows, 0.015 up to 256, then 1e-4 d |
| GPU, one by one | 1.05e-5 k d |
| one CPU thread, while other threads work | k (4e-6 d + 1.2e-10 d^3) |

One batched call is slow for a single matrix but hardly slower for a hundred, and the other GPU
solver can run beside it. Sizes that occur often therefore go to the batched solver; of the others,
large matrices go to the GPU and to threads, small ones to threads. The schedule depends on sizes
and on the number of threads, never on timing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symrazor.accelerate import cusolver
from symrazor.accelerate.cusolver import WORKSPACE_BYTES
from symrazor.accelerate.devices import run_in_threads, side_stream
from symrazor.core.errors import CurvatureError

if TYPE_CHECKING:
    from symrazor.linalg.eigen_jobs import EigenJob

HOST = torch.device("cpu")
MIN_ROWS_UNBATCHED = 64
"""On a CPU, matrices with at least this many rows are solved one by one to stay in the cache; on a
GPU, no smaller ones are."""
Shape = tuple[int, int]
Solver = Callable[[Tensor], Tensor]


def solve_on_gpus(jobs: Sequence["EigenJob"]) -> list[Tensor]:
    """Return the eigenvalues of every job, of which some have matrices on a GPU."""
    gpus = {job.device for job in jobs if job.device.type == "cuda"}
    has_batched_solver = all(cusolver.solver(gpu) is not None for gpu in gpus)
    plan = schedule(jobs, torch.get_num_threads(), has_batched_solver)

    def tasks() -> Iterator[Callable[[], list[Tensor]]]:
        if plan.one_by_one:
            yield partial(_solve_one_by_one, [jobs[number] for number in plan.one_by_one])
        if plan.batched:
            yield partial(_solve_groups, [[jobs[n] for n in group] for group in plan.batched])
        for number in plan.host:  # only this thread reads the generator and copies from a GPU
            yield _on_host(jobs[number])

    for gpu in gpus:
        torch.cuda.synchronize(gpu)  # other threads use other streams
    values = [value for part in run_in_threads(tasks()) for value in part]
    numbers = [*plan.one_by_one, *(n for group in plan.batched for n in group), *plan.host]
    by_number = dict(zip(numbers, values, strict=True))
    return _to_devices(jobs, [by_number[number] for number in range(len(jobs))])


def _on_host(job: "EigenJob") -> Callable[[], list[Tensor]]:
    """Return the remaining CPU work, for any thread; matrices on a GPU are copied now."""
    if job.device.type == "cpu":
        return lambda: [job.solve()]
    matrices = job.symmetric()
    host = torch.empty(matrices.shape, dtype=matrices.dtype, pin_memory=True)
    host.copy_(matrices)  # 30 times as fast as a copy to memory that is not pinned
    return lambda: [job.solve(host)]


def _solve_one_by_one(jobs: Sequence["EigenJob"]) -> list[Tensor]:
    """Solve on the GPU's second stream, so that no copy to the host waits for it."""
    with torch.cuda.stream(side_stream(jobs[0].device, 0)):
        return [job.solve().to(HOST) for job in jobs]


def _solve_groups(groups: Sequence[Sequence["EigenJob"]]) -> list[Tensor]:
    """Solve each group by one batched call on the GPU's third stream."""
    with torch.cuda.stream(side_stream(groups[0][0].device, 1)):
        return [value for group in groups for value in solve_batched(group)]


def solve_batched(jobs: Sequence["EigenJob"]) -> list[Tensor]:
    """Return the eigenvalues of jobs of one size, as `EigenJob.solve` does, on the host."""
    together = replace(
        jobs[0],
        name="one of several tensors",
        matrices=lambda: torch.cat([job.matrices() for job in jobs]),
    )
    try:
        values = together.solve(solver=cusolver.eigvalsh)
    except CurvatureError:
        return [job.solve().to(HOST) for job in jobs]  # raises an error that names the tensor
    return list(values.to(HOST).split([job.shape[0] for job in jobs]))


def _to_devices(jobs: Sequence["EigenJob"], values: Sequence[Tensor]) -> list[Tensor]:
    """Copy the values to the devices of the jobs, in one copy if there is one device."""
    devices = {job.device for job in jobs}
    if len(devices) > 1:
        return [value.to(job.device) for job, value in zip(jobs, values, strict=True)]
    flat = torch.cat([value.flatten() for value in values]).to(devices.pop())
    parts = flat.split([value.numel() for value in values])
    return [part.view(job.shape) for job, part in zip(jobs, parts, strict=True)]


@dataclass(frozen=True)
class EigenSchedule:
    """Numbers of jobs by solver; each batched group has matrices of one size and is one call."""

    batched: list[list[int]]
    one_by_one: list[int]
    host: list[int]


def schedule(jobs: Sequence["EigenJob"], threads: int, has_batched_solver: bool) -> EigenSchedule:
    """Assign sizes that occur often to the batched solver, every other job to the first free one.

    One thread keeps each GPU solver busy, the others solve themselves; a single thread does all.
    Each list of the result has the largest job first.
    """
    order = sorted(range(len(jobs)), key=lambda number: -jobs[number].work)
    groups: list[list[int]] = []
    if has_batched_solver:
        groups = _batched_groups([n for n in order if jobs[n].device.type == "cuda"], jobs)
    assigned = {number for group in groups for number in group}
    gpu_seconds, thread_seconds = 0.0, [0.0] * max(0, threads - (2 if groups else 1))
    plan = EigenSchedule(groups, [], [])
    for number in order:
        if number in assigned:
            continue
        job = jobs[number]
        on_cpu, on_gpu = seconds_on_cpu(job.shape), seconds_on_gpu(job.shape)
        first_free = min(range(len(thread_seconds)), key=thread_seconds.__getitem__, default=None)
        wait = 0.0 if first_free is None else thread_seconds[first_free] - gpu_seconds
        if job.device.type == "cuda" and on_gpu < wait + on_cpu:
            plan.one_by_one.append(number)
            gpu_seconds += on_gpu
        else:
            plan.host.append(number)
            if first_free is not None:
                thread_seconds[first_free] += on_cpu
    return plan


def _batched_groups(numbers: Sequence[int], jobs: Sequence["EigenJob"]) -> list[list[int]]:
    """Return the groups of equal size for which the batched solver is the fastest."""
    by_size: dict[tuple[object, ...], list[int]] = {}
    for number in numbers:
        job = jobs[number]
        by_size.setdefault((job.device, job.resolution, job.shape[1]), []).append(number)
    chosen = []
    for same_size in by_size.values():
        calls = _split_by_workspace(same_size, jobs)
        shapes = [(sum(jobs[n].shape[0] for n in call), jobs[call[0]].shape[1]) for call in calls]
        total = (sum(k for k, _ in shapes), shapes[0][1])
        if sum(map(seconds_batched, shapes)) < min(seconds_on_gpu(total), seconds_on_cpu(total)):
            chosen += calls
    return chosen


def _split_by_workspace(numbers: Sequence[int], jobs: Sequence["EigenJob"]) -> list[list[int]]:
    calls, used = list[list[int]](), 0
    for number in numbers:
        k, d = jobs[number].shape
        needed_bytes = k * workspace_bytes(d)
        if not calls or used + needed_bytes > WORKSPACE_BYTES:
            calls.append([])
            used = 0
        calls[-1].append(number)
        used += needed_bytes
    return calls


def workspace_bytes(d: int) -> int:
    """Return an upper estimate of the batched solver's workspace for one matrix of d rows."""
    return 2**19 + 6000 * d + 32 * d * d


def seconds_batched(shape: Shape) -> float:
    """Return the estimated time of one call of the batched GPU solver."""
    k, d = shape
    if d <= 80:
        return 3e-4 + 1e-7 * k * d
    return 0.015 if d <= 256 else 1e-4 * d


def seconds_on_gpu(shape: Shape) -> float:
    """Return the estimated time of the GPU, one by one: a few launches per row.

    Infinite for small matrices. (Up to 32 rows torch solves many in one call, but with half a
    megabyte of workspace for each.)
    """
    k, d = shape
    return k * 1.05e-5 * d if d >= MIN_ROWS_UNBATCHED else math.inf


def seconds_on_cpu(shape: Shape) -> float:
    """Return the estimated time on one CPU thread."""
    k, d = shape
    return k * (4e-6 * d + 1.2e-10 * d**3)
