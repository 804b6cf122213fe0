"""Compare the plain execution path with threads and graph replay, on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sums_case import assert_same_sums, small_task, sum_batches

import symrazor as sr
from symrazor.accelerate.devices import is_plain, plain_execution
from symrazor.curvature.cuda_replay import GraphReplayScheduler
from symrazor.curvature.estimate import Method, choose_scheduler, collect_curvature
from symrazor.curvature.task import BatchSums, SerialScheduler, ThreadedScheduler


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("estimator", ["exact", "mc"])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_accelerated_sums_match_the_plain_ones(structure: str, estimator: str) -> None:
    method = Method(structure=structure, estimator=estimator)

    def plain() -> BatchSums:
        task, batches = small_task(method)
        with plain_execution(), _threads(1):
            scheduler = choose_scheduler(task)
            assert type(scheduler) is SerialScheduler
            return sum_batches(scheduler, task, batches)

    task, batches = small_task(method)
    scheduler = choose_scheduler(task)
    assert type(scheduler) is ThreadedScheduler
    with _threads(2):
        threaded = sum_batches(scheduler, task, batches)
    assert_same_sums(threaded, plain())
    task, batches = small_task(method)
    with _threads(1):
        assert_same_sums(sum_batches(GraphReplayScheduler(task), task, batches), plain())


def test_plain_evidence_matches_the_accelerated_one() -> None:
    task, batches = small_task(Method())
    razor = sr.Razor(task.model, "categorical", 60)
    razor.verify(batches[0][0])
    with _threads(2):
        accelerated = razor.evidence(batches)
    with plain_execution(), _threads(1):
        assert is_plain()
        plain = razor.evidence(batches)
    assert not is_plain()
    torch.testing.assert_close(plain.log_det, accelerated.log_det, rtol=1e-11, atol=0)


def test_an_empty_loader_is_an_error() -> None:
    task, _ = small_task(Method())
    with pytest.raises(ValueError, match="loader is empty"):
        collect_curvature(task, [])
