"""Check how eigenvalue jobs are assigned to GPU solvers and CPU threads, and batched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symrazor.accelerate.cusolver import WORKSPACE_BYTES
from symrazor.core.errors import CurvatureError
from symrazor.linalg.eigen_jobs import EigenJob
from symrazor.linalg.factor import Factor
from symrazor.linalg.gpu_eigenvalues import (
    EigenSchedule,
    schedule,
    seconds_batched,
    seconds_on_cpu,
    seconds_on_gpu,
    solve_batched,
    workspace_bytes,
)

EPS = torch.finfo(torch.float64).eps
CUDA, CPU = torch.device("cuda"), torch.device("cpu")

Sizes = list[tuple[int, int]]
SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 2000)), min_size=1, max_size=40)


def _job(k: int, d: int, device: torch.device = CUDA) -> EigenJob:
    return EigenJob("w", (k, d), device, lambda: torch.eye(d).expand(k, d, d), EPS)


def _shape(group: list[int], jobs: list[EigenJob]) -> tuple[int, int]:
    (d,) = {jobs[number].shape[1] for number in group}
    return sum(jobs[number].shape[0] for number in group), d


def _busy(
    plan: EigenSchedule, jobs: list[EigenJob], threads: int
) -> tuple[float, float, list[float]]:
    """Return the seconds of the two GPU solvers and of each thread."""
    many = sum(seconds_batched(_shape(group, jobs)) for group in plan.batched)
    single = sum(seconds_on_gpu(jobs[number].shape) for number in plan.one_by_one)
    others = [0.0] * max(1, threads - (2 if plan.batched else 1))
    for number in plan.host:
        others[others.index(min(others))] += seconds_on_cpu(jobs[number].shape)
    return many, single, others


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, threads=st.integers(1, 32), many=st.booleans())
def test_every_job_is_assigned_once(sizes: Sizes, threads: int, many: bool) -> None:
    jobs = [_job(k, d, CUDA if number % 5 else CPU) for number, (k, d) in enumerate(sizes)]
    plan = schedule(jobs, threads, many)
    assert plan == schedule(jobs, threads, many)
    together = [number for group in plan.batched for number in group]
    assert sorted([*together, *plan.one_by_one, *plan.host]) == list(range(len(jobs)))
    assert set(range(0, len(jobs), 5)) <= set(plan.host)
    assert many or not together
    for group in plan.batched:
        k, d = _shape(group, jobs)
        assert len(group) == 1 or k * workspace_bytes(d) <= WORKSPACE_BYTES


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, threads=st.integers(1, 32), many=st.booleans())
def test_the_schedule_is_no_slower_than_the_gpu_alone(
    sizes: Sizes, threads: int, many: bool
) -> None:
    jobs = [_job(k, d) for k, d in sizes]
    plan = schedule(jobs, threads, many)
    together, single, others = _busy(plan, jobs, threads)
    alone = threads <= (2 if plan.batched else 1)
    last = max(together, single + others[0] if alone else max(single, *others))
    assert last <= sum(seconds_on_gpu(job.shape) for job in jobs) * (1 + 1e-9)


def test_sizes_that_occur_often_are_batched() -> None:
    """Only many small matrices of one size are batched."""
    jobs = [_job(1, 1024)] * 23 + [_job(4, 160)] * 20 + [_job(2, 180)] + [_job(32, 80)] * 5
    plan = schedule(jobs, 16, True)
    shapes = [_shape(group, jobs) for group in plan.batched]
    assert shapes == [(56, 160), (24, 160), (96, 80), (64, 80)]
    assert {jobs[number].shape[1] for number in plan.host} == {1024, 180}
    assert {jobs[number].shape[1] for number in plan.one_by_one} == {1024}
    together, single, others = _busy(plan, jobs, 16)
    assert max(together, single, *others) < 0.14  # the GPU alone: 0.25 s, 16 threads alone: 0.27 s


def test_without_a_batched_solver_threads_take_small_matrices() -> None:
    jobs = [_job(1, 4000)] * 2 + [_job(32, 80)] * 10
    assert schedule(jobs, 16, False) == EigenSchedule([], [0, 1], list(range(2, 12)))
    assert schedule(jobs[:2], 1, False) == EigenSchedule([], [0, 1], [])


def test_calls_are_split_by_workspace() -> None:
    each = WORKSPACE_BYTES // workspace_bytes(256)
    jobs = [_job(1, 256)] * (2 * each + 1)
    calls = schedule(jobs, 16, True).batched
    assert [len(call) for call in calls] == [each, each, 1]


def test_jobs_of_different_precision_are_not_batched_together() -> None:
    other = EigenJob("w", (30, 70), CUDA, lambda: torch.empty(0), 1e-7)
    assert schedule([_job(30, 70), other, _job(30, 70)], 4, True).batched == [[0, 2], [1]]


@pytest.mark.parametrize("threads", [2, 5])
def test_equal_matrices_are_distributed_by_speed(threads: int) -> None:
    jobs = [_job(1, 256)] * 60
    gpu, cpu = seconds_on_gpu((1, 256)), seconds_on_cpu((1, 256))
    there = len(schedule(jobs, threads, False).one_by_one)
    best = 60 / (1 / gpu + (threads - 1) / cpu)  # if matrices could be cut
    assert there * gpu <= best + max(gpu, cpu)
    assert -(-(60 - there) // (threads - 1)) * cpu <= best + max(gpu, cpu)


@pytest.mark.parametrize(
    ("d", "measured"),
    [(40, 0.77), (64, 0.97), (80, 1.12), (160, 2.02), (256, 3.5), (360, 5.6), (1024, 33.2)],
)
def test_the_workspace_estimate_is_not_too_small(d: int, measured: float) -> None:
    """The measured values are megabytes per matrix on an H200 with CUDA 13."""
    assert measured * 2**20 <= workspace_bytes(d) <= 1.25 * measured * 2**20


def _factor(k: int, d: int, scale: float) -> Factor:
    rows = torch.randn(2 * d, k, d, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    return Factor.of_rows(scale * rows)


@pytest.mark.parametrize("d", [9, 70])
def test_batched_matrices_are_solved_independently(d: int) -> None:
    """Rounding noise of one matrix does not affect one that is a million times smaller."""
    factors = [_factor(2, d, 1.0), _factor(3, d, 1e-6)]
    jobs = [job for f in factors for job in EigenJob.of_factor(f, "w", 1e-7)]
    eigenvalues = solve_batched(jobs)
    for job, value in zip(jobs, eigenvalues, strict=True):
        assert value.shape == job.shape
        torch.testing.assert_close(value, job.solve(), rtol=1e-12, atol=0)
        assert torch.count_nonzero(value) == value.numel()


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_a_batched_error_names_the_tensor(bad: float) -> None:
    def spoiled() -> Tensor:
        matrix = torch.eye(5, dtype=torch.float64).repeat(2, 1, 1)
        matrix[1, 3, 3] = bad
        return matrix

    jobs = [_job(4, 5, CPU), EigenJob("culprit", (2, 5), CPU, spoiled, EPS)]
    with pytest.raises(CurvatureError, match="culprit"):
        solve_batched(jobs)
