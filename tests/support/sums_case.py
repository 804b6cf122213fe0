"""A small network whose curvature is summed batch by batch, for tests of schedulers."""

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Categorical
from symrazor.curvature.coverage import layers
from symrazor.curvature.cuda_replay import GraphReplayScheduler
from symrazor.curvature.estimate import Method
from symrazor.curvature.task import BatchSums, CurvatureTask, Scheduler, Total
from symrazor.data.batches import numbered_batches
from symrazor.linalg.factor import Factor

Batches = list[tuple[Tensor, Tensor]]


def small_task(method: Method) -> tuple[CurvatureTask, Batches]:
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


def sum_batches(scheduler: Scheduler, task: CurvatureTask, batches: Batches) -> BatchSums:
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


def assert_same_sums(found: BatchSums, expected: BatchSums) -> None:
    assert found.n == expected.n and found.sums.keys() == expected.sums.keys()
    torch.testing.assert_close(found.log_likelihood, expected.log_likelihood)
    for key, value in expected.sums.items():
        other = found.sums[key]
        if isinstance(value, Factor) and isinstance(other, Factor):
            torch.testing.assert_close(other.matrix, value.matrix, rtol=1e-11, atol=1e-12)
        else:
            torch.testing.assert_close(other, value, rtol=1e-11, atol=1e-12)
