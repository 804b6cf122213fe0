"""Eigenvalues dealt out to a GPU and to the threads of a CPU, by the time that they should take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symrazor.accelerate.cusolver import WORKSPACE_BYTES
from symrazor.core.errors import CurvatureError
from symrazor.linalg.eigen_jobs import (
    EigenJob,
    EigenSchedule,
    schedule,
    seconds_on_cpu,
    seconds_on_gpu,
    seconds_together,
    solve_batched,
    workspace,
)
from symrazor.linalg.factor import Factor

EPS = torch.finfo(torch.float64).eps
CUDA, CPU = torch.device("cuda"), torch.device("cpu")

Sizes = list[tuple[int, int]]
SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 2000)), min_size=1, max_size=40)


def _piece(k: int, d: int, device: torch.device = CUDA) -> EigenJob:
    return EigenJob("w", (k, d), device, lambda: torch.eye(d).expand(k, d, d), EPS)


def _shape(group: list[int], pieces: list[EigenJob]) -> tuple[int, int]:
    (d,) = {pieces[number].shape[1] for number in group}
    return sum(pieces[number].shape[0] for number in group), d


def _busy(
    deal: EigenSchedule, pieces: list[EigenJob], threads: int
) -> tuple[float, float, list[float]]:
    """Seconds of the two solvers of a GPU, and of the threads beside them."""
    many = sum(seconds_together(_shape(group, pieces)) for group in deal.together)
    single = sum(seconds_on_gpu(pieces[number].shape) for number in deal.one_by_one)
    others = [0.0] * max(1, threads - (2 if deal.together else 1))
    for number in deal.host:
        others[others.index(min(others))] += seconds_on_cpu(pieces[number].shape)
    return many, single, others


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, threads=st.integers(1, 32), many=st.booleans())
def test_everything_is_dealt_out_once(sizes: Sizes, threads: int, many: bool) -> None:
    pieces = [_piece(k, d, CUDA if number % 5 else CPU) for number, (k, d) in enumerate(sizes)]
    deal = schedule(pieces, threads, many)
    assert deal == schedule(pieces, threads, many)
    together = [number for group in deal.together for number in group]
    assert sorted([*together, *deal.one_by_one, *deal.host]) == list(range(len(pieces)))
    assert set(range(0, len(pieces), 5)) <= set(deal.host)
    assert many or not together
    for group in deal.together:
        k, d = _shape(group, pieces)
        assert len(group) == 1 or k * workspace(d) <= WORKSPACE_BYTES


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, threads=st.integers(1, 32), many=st.booleans())
def test_all_is_done_no_later_than_by_the_gpu_alone(sizes: Sizes, threads: int, many: bool) -> None:
    pieces = [_piece(k, d) for k, d in sizes]
    deal = schedule(pieces, threads, many)
    together, single, others = _busy(deal, pieces, threads)
    alone = threads <= (2 if deal.together else 1)
    last = max(together, single + others[0] if alone else max(single, *others))
    assert last <= sum(seconds_on_gpu(piece.shape) for piece in pieces) * (1 + 1e-9)


def test_what_comes_in_large_numbers_is_found_together() -> None:
    """Small matrices of one size from many layers in few calls; not a few, not large ones."""
    pieces = (
        [_piece(1, 1024)] * 23 + [_piece(4, 160)] * 20 + [_piece(2, 180)] + [_piece(32, 80)] * 5
    )
    deal = schedule(pieces, 16, True)
    shapes = [_shape(group, pieces) for group in deal.together]
    assert shapes == [(56, 160), (24, 160), (96, 80), (64, 80)]
    assert {pieces[number].shape[1] for number in deal.host} == {1024, 180}
    assert {pieces[number].shape[1] for number in deal.one_by_one} == {1024}
    together, single, others = _busy(deal, pieces, 16)
    assert max(together, single, *others) < 0.14  # the GPU alone: 0.25 s, 16 threads alone: 0.27 s


def test_without_a_solver_for_many_threads_take_small_matrices() -> None:
    pieces = [_piece(1, 4000)] * 2 + [_piece(32, 80)] * 10
    assert schedule(pieces, 16, False) == EigenSchedule([], [0, 1], list(range(2, 12)))
    assert schedule(pieces[:2], 1, False) == EigenSchedule([], [0, 1], [])


def test_calls_are_cut_at_the_workspace() -> None:
    each = WORKSPACE_BYTES // workspace(256)
    pieces = [_piece(1, 256)] * (2 * each + 1)
    calls = schedule(pieces, 16, True).together
    assert [len(call) for call in calls] == [each, each, 1]


def test_pieces_of_other_arithmetic_are_not_joined() -> None:
    other = EigenJob("w", (30, 70), CUDA, lambda: torch.empty(0), 1e-7)
    assert schedule([_piece(30, 70), other, _piece(30, 70)], 4, True).together == [[0, 2], [1]]


@pytest.mark.parametrize("threads", [2, 5])
def test_equal_matrices_are_shared_out_by_speed(threads: int) -> None:
    pieces = [_piece(1, 256)] * 60
    gpu, cpu = seconds_on_gpu((1, 256)), seconds_on_cpu((1, 256))
    there = len(schedule(pieces, threads, False).one_by_one)
    best = 60 / (1 / gpu + (threads - 1) / cpu)  # if matrices could be cut
    assert there * gpu <= best + max(gpu, cpu)
    assert -(-(60 - there) // (threads - 1)) * cpu <= best + max(gpu, cpu)


@pytest.mark.parametrize(
    ("d", "measured"),
    [(40, 0.77), (64, 0.97), (80, 1.12), (160, 2.02), (256, 3.5), (360, 5.6), (1024, 33.2)],
)
def test_the_workspace_is_not_underrated(d: int, measured: float) -> None:
    """Megabytes for a matrix, on an H200 with CUDA 13."""
    assert measured * 2**20 <= workspace(d) <= 1.25 * measured * 2**20


def _factor(k: int, d: int, scale: float) -> Factor:
    rows = torch.randn(2 * d, k, d, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    return Factor.of_rows(scale * rows)


@pytest.mark.parametrize("d", [9, 70])
def test_together_each_matrix_is_treated_as_if_alone(d: int) -> None:
    """The noise of one does not touch another that is a million times smaller."""
    factors = [_factor(2, d, 1.0), _factor(3, d, 1e-6)]
    pieces = [piece for f in factors for piece in EigenJob.of_factor(f, "w", 1e-7)]
    found = solve_batched(pieces)
    for piece, value in zip(pieces, found, strict=True):
        assert value.shape == piece.shape
        torch.testing.assert_close(value, piece.find(), rtol=1e-12, atol=0)
        assert torch.count_nonzero(value) == value.numel()


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_together_an_error_names_its_piece(bad: float) -> None:
    def spoiled() -> Tensor:
        matrix = torch.eye(5, dtype=torch.float64).repeat(2, 1, 1)
        matrix[1, 3, 3] = bad
        return matrix

    pieces = [_piece(4, 5, CPU), EigenJob("culprit", (2, 5), CPU, spoiled, EPS)]
    with pytest.raises(CurvatureError, match="culprit"):
        solve_batched(pieces)
