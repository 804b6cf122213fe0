"""Compare the plain execution path with threads, graph replay and processes, on a CPU."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.accelerate.devices import is_plain, plain_execution
from symrazor.core.errors import CurvatureError, DivergenceError
from symrazor.core.likelihood import Categorical
from symrazor.curvature import accumulate
from symrazor.curvature.accumulate import (
    BatchSums,
    ProcessScheduler,
    Scheduler,
    SerialScheduler,
    ThreadedScheduler,
    Total,
)
from symrazor.curvature.coverage import layers
from symrazor.curvature.cuda_replay import GraphReplayScheduler
from symrazor.curvature.estimate import choose_scheduler, collect_curvature
from symrazor.curvature.task import CurvatureTask, Method
from symrazor.data.batches import numbered_batches
from symrazor.linalg.factor import Factor

Batches = list[tuple[Tensor, Tensor]]


def _task(method: Method) -> tuple[CurvatureTask, Batches]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 5),
    ).double()
    x, y = torch.randn(60, 1, 6, 6, dtype=torch.float64), torch.arange(60) % 5
    generator = torch.Generator().manual_seed(1)
    task = CurvatureTask(model, layers(model), Categorical(), method, generator)
    return task, [(x[i : i + 13], y[i : i + 13]) for i in range(0, 60, 13)]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sum(scheduler: Scheduler, task: CurvatureTask, batches: Batches) -> BatchSums:
    total = Total(expected=60)
    numbered = numbered_batches(batches, task.pieces)
    with scheduler.sharing_errors():
        if isinstance(scheduler, GraphReplayScheduler):  # without a stream: no recording
            contributions = scheduler.contributions_on(None, numbered, total)
        else:
            contributions = scheduler.contributions(numbered, total)
        for contribution in contributions:
            total.add(contribution)
    return scheduler.reduce(total.value)


def _assert_same(found: BatchSums, expected: BatchSums) -> None:
    assert found.n == expected.n and found.sums.keys() == expected.sums.keys()
    torch.testing.assert_close(found.log_likelihood, expected.log_likelihood)
    for key, value in expected.sums.items():
        other = found.sums[key]
        if isinstance(value, Factor) and isinstance(other, Factor):
            torch.testing.assert_close(other.matrix, value.matrix, rtol=1e-11, atol=1e-12)
        else:
            torch.testing.assert_close(other, value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("estimator", ["exact", "mc"])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_accelerated_sums_match_the_plain_ones(structure: str, estimator: str) -> None:
    method = Method(structure=structure, estimator=estimator)

    def plain() -> BatchSums:
        task, batches = _task(method)
        with plain_execution(), _threads(1):
            scheduler = choose_scheduler(task)
            assert type(scheduler) is SerialScheduler
            return _sum(scheduler, task, batches)

    task, batches = _task(method)
    scheduler = choose_scheduler(task)
    assert type(scheduler) is ThreadedScheduler
    with _threads(2):
        threaded = _sum(scheduler, task, batches)
    _assert_same(threaded, plain())
    task, batches = _task(method)
    with _threads(1):
        _assert_same(_sum(GraphReplayScheduler(task), task, batches), plain())


def test_plain_evidence_matches_the_accelerated_one() -> None:
    task, batches = _task(Method())
    razor = sr.Razor(task.model, "categorical", 60)
    razor.verify(batches[0][0])
    with _threads(2):
        accelerated = razor.evidence(batches)
    with plain_execution(), _threads(1):
        assert is_plain()
        plain = razor.evidence(batches)
    assert not is_plain()
    torch.testing.assert_close(plain.log_det, accelerated.log_det, rtol=1e-11, atol=0)


def _two_processes(
    monkeypatch: pytest.MonkeyPatch, other: BatchSums | Exception
) -> Callable[[Scheduler], ProcessScheduler]:
    """Stand in for a second process with known sums, or one that failed."""
    failed = other if isinstance(other, Exception) else None
    sums = None if isinstance(other, Exception) else other
    message = {
        "error": None if failed is None else f"{type(failed).__name__}: {failed}",
        "n": 0 if sums is None else sums.n,
        "sums": [] if sums is None else accumulate._entries(sums.sums),
    }
    monkeypatch.setattr(accumulate, "all_gather_text", lambda text: [text, json.dumps(message)])

    def gather(rows: Tensor, counts: list[int]) -> list[Tensor]:
        raise AssertionError(f"rows were gathered: {rows.shape}, {counts}")

    def reduce_(tensors: list[Tensor]) -> None:
        assert sums is not None
        theirs = [sums.log_likelihood]
        for value in {id(v): v for v in sums.sums.values()}.values():
            theirs += value.outer_products.panels if isinstance(value, Factor) else [value]
        for mine, more in zip(tensors, theirs, strict=True):
            mine.add_(more)

    monkeypatch.setattr(accumulate, "all_gather", gather)
    monkeypatch.setattr(accumulate, "all_reduce_", reduce_)
    return lambda local: ProcessScheduler(local, torch.device("cpu"))


def test_sums_of_two_processes_match_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    task, batches = _task(Method(structure="diag"))
    whole = _sum(choose_scheduler(task), task, batches)
    second = _sum(choose_scheduler(task), task, batches[3:])
    process = _two_processes(monkeypatch, second)
    _assert_same(_sum(process(choose_scheduler(task)), task, batches[:3]), whole)


@pytest.mark.parametrize("kind", [DivergenceError, CurvatureError, TypeError])
def test_an_error_in_another_process_is_raised_here(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, batches = _task(Method(structure="diag"))
    process = _two_processes(monkeypatch, kind("no"))
    raised = ValueError if kind is TypeError else kind
    with pytest.raises(raised, match=f"Process 1 failed .*{kind.__name__}: no"):
        _sum(process(choose_scheduler(task)), task, batches)


def test_an_empty_loader_is_an_error() -> None:
    task, _ = _task(Method())
    with pytest.raises(ValueError, match="loader is empty"):
        collect_curvature(task, [])
