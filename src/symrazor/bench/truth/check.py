"""Check that tasks are well posed: architectures with another answer must predict worse."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from symrazor.bench.truth.networks import Architecture
from symrazor.bench.truth.task import Problem, Task
from symrazor.bench.truth.training import accuracy, negative_log_likelihood, train_and_predict


@dataclass(frozen=True)
class Score:
    """Test score of one fixed architecture.

    Args:
        task: name of the task.
        seed: of the problem.
        architecture: its name.
        is_oracle: whether it is the oracle.
        is_rival: whether it assumes another answer than the oracle.
        nll: mean negative log likelihood of the test labels.
        accuracy: share of right classes or of explained variance.
        seconds: training time.
    """

    task: str
    seed: int
    architecture: str
    is_oracle: bool
    is_rival: bool
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
        assumptions(task, architecture) != assumptions(task, problem.architectures[task.oracle]),
        round(float(negative_log_likelihood(prediction, problem.test_y).mean()), 4),
        round(accuracy(prediction, problem.test_y), 4),
        round(time.perf_counter() - started, 1),
    )


def assumptions(task: Task, architecture: Architecture) -> tuple[object, ...]:
    """Return what an architecture assumes about the question of a task."""
    names = task.claims or architecture.holds
    return (*(architecture.holds.get(name) for name in names), architecture.augment)


def oracle_margin(scores: Sequence[Score]) -> float:
    """Return the nats per datum by which the oracle beats the best rival."""
    (oracle,) = [score.nll for score in scores if score.is_oracle]
    return min(score.nll for score in scores if score.is_rival) - oracle
