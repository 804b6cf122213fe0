"""Check that tasks are well posed: the oracle architecture must predict best."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from symrazor.bench.truth.networks import Architecture
from symrazor.bench.truth.task import Problem, Task
from symrazor.bench.truth.training import accuracy, negative_log_likelihood, train_and_predict


@dataclass(frozen=True)
class Score:
    """Test score of one fixed architecture; `is_oracle` marks the known answer."""

    task: str
    seed: int
    architecture: str
    is_oracle: bool
    nll: float
    accuracy: float
    seconds: float


def architecture_scores(case: tuple[Task, int, Path | None]) -> list[Score]:
    """Train every fixed architecture on a task, a seed and official data; return test scores."""
    task, seed, data = case
    problem = task.make(seed, data)
    return [
        _score(task, problem, name, architecture)
        for name, architecture in problem.architectures.items()
    ]


def _score(task: Task, problem: Problem, name: str, architecture: Architecture) -> Score:
    assert problem.test_y is not None
    started = time.perf_counter()
    prediction = train_and_predict(architecture, problem)
    return Score(
        task.name,
        problem.seed,
        name,
        name == task.oracle,
        round(float(negative_log_likelihood(prediction, problem.test_y).mean()), 4),
        round(accuracy(prediction, problem.test_y), 4),
        round(time.perf_counter() - started, 1),
    )


def oracle_margin(scores: Sequence[Score]) -> float:
    """Return the nats per datum by which the oracle beats the best other architecture."""
    (oracle,) = [score.nll for score in scores if score.is_oracle]
    return min(score.nll for score in scores if not score.is_oracle) - oracle
