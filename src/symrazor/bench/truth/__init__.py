"""Run `discover` and other methods on tasks with a known answer.

    from symrazor.bench import truth

    rows = truth.run(truth.METHODS, truth.tasks("develop"), seeds=(0, 1))

May import: the product; the product never imports this package.
"""

from symrazor.bench.truth.methods import METHODS, Method
from symrazor.bench.truth.networks import Architecture
from symrazor.bench.truth.registry import tasks
from symrazor.bench.truth.runner import run
from symrazor.bench.truth.scores import Row, per_task, reliability, summarise
from symrazor.bench.truth.task import Answer, Claim, Draw, Normal, Problem, Range, Shape, Task

__all__ = [
    "METHODS",
    "Answer",
    "Architecture",
    "Claim",
    "Draw",
    "Method",
    "Normal",
    "Problem",
    "Range",
    "Row",
    "Shape",
    "Task",
    "per_task",
    "reliability",
    "run",
    "summarise",
    "tasks",
]
