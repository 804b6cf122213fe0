"""Compare the sums of two processes with those of one; the second is simulated."""

import json
from collections.abc import Callable

import pytest
import torch
from sums_case import assert_same_sums, small_task, sum_batches
from torch import Tensor

from symrazor.core.errors import CurvatureError, DivergenceError
from symrazor.curvature import process_sums
from symrazor.curvature.estimate import Method, choose_scheduler
from symrazor.curvature.process_sums import ProcessScheduler
from symrazor.curvature.task import BatchSums, Scheduler
from symrazor.linalg.factor import Factor


def _two_processes(
    monkeypatch: pytest.MonkeyPatch, other: BatchSums | Exception
) -> Callable[[Scheduler], ProcessScheduler]:
    """Stand in for a second process with known sums, or one that failed."""
    failed = other if isinstance(other, Exception) else None
    sums = None if isinstance(other, Exception) else other
    message = {
        "error": None if failed is None else f"{type(failed).__name__}: {failed}",
        "n": 0 if sums is None else sums.n,
        "sums": [] if sums is None else process_sums._entries(sums.sums),
    }
    monkeypatch.setattr(process_sums, "all_gather_text", lambda text: [text, json.dumps(message)])

    def gather(rows: Tensor, counts: list[int]) -> list[Tensor]:
        raise AssertionError(f"rows were gathered: {rows.shape}, {counts}")

    def reduce_(tensors: list[Tensor]) -> None:
        assert sums is not None
        theirs = [sums.log_likelihood]
        for value in {id(v): v for v in sums.sums.values()}.values():
            theirs += value.outer_products.panels if isinstance(value, Factor) else [value]
        for mine, more in zip(tensors, theirs, strict=True):
            mine.add_(more)

    monkeypatch.setattr(process_sums, "all_gather", gather)
    monkeypatch.setattr(process_sums, "all_reduce_", reduce_)
    return lambda local: ProcessScheduler(local, torch.device("cpu"))


def test_sums_of_two_processes_match_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    task, batches = small_task(Method(structure="diag"))
    whole = sum_batches(choose_scheduler(task), task, batches)
    second = sum_batches(choose_scheduler(task), task, batches[3:])
    process = _two_processes(monkeypatch, second)
    assert_same_sums(sum_batches(process(choose_scheduler(task)), task, batches[:3]), whole)


@pytest.mark.parametrize("kind", [DivergenceError, CurvatureError, TypeError])
def test_an_error_in_another_process_is_raised_here(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, batches = small_task(Method(structure="diag"))
    process = _two_processes(monkeypatch, kind("no"))
    raised = ValueError if kind is TypeError else kind
    with pytest.raises(raised, match=f"Process 1 failed .*{kind.__name__}: no"):
        sum_batches(process(choose_scheduler(task)), task, batches)
