"""Run methods on tasks and seeds, in several processes, and append rows to a file as they come."""

import json
import math
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Literal, TypeVar

import torch

from symrazor.bench.truth.check import Score
from symrazor.bench.truth.methods import Method
from symrazor.bench.truth.scores import Row, score
from symrazor.bench.truth.task import OFFICIAL, Answer, Problem, Task
from symrazor.bench.truth.training import negative_log_likelihood, train_and_predict
from symrazor.core.files import write_atomically
from symrazor.training.loop import clock

Tell = Callable[[str], object]
Time = Literal["cpu", "wall"]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Job:
    """All methods on one task and seed."""

    methods: Mapping[str, Method]
    task: Task
    seed: int
    data: Path | None = None
    time: Time = "cpu"


def run(
    methods: Mapping[str, Method] | Method,
    tasks: Sequence[Task],
    seeds: Sequence[int] = (0,),
    *,
    jobs: int = 1,
    data: Path | None = None,
    file: Path | None = None,
    resume: bool = False,
    stop_after: float = math.inf,
    time: Time = "cpu",
    tell: Tell = lambda text: None,
) -> list[Row]:
    """Return the rows of all methods, tasks and seeds.

    Args:
        methods: name -> method, or one method, which is then called by the name of its function.
        tasks: tasks to run. A task that needs official data is left out without `data`.
        seeds: seeds of data and methods.
        jobs: number of processes with one thread each. Methods and tasks must be picklable then:
            functions of an importable module, not of the script that runs.
        data: folder with official data sets.
        file: JSON lines are appended to this file, so that a stopped run keeps its rows.
        resume: skip runs whose rows the file has; these rows are returned as well.
        stop_after: minutes after which no further task is started.
        time: what limits and run times count: the CPU time of one thread, which does not depend on
            other programs, or wall time.
        tell: called with progress messages.
    """
    named = methods if isinstance(methods, Mapping) else {_name(methods): methods}
    missing = {task.needs for task in tasks if task.needs and not _has_official(task.needs, data)}
    for task in tasks:
        if task.needs in missing:
            tell(f"{task.name} left out: it needs {task.needs} in the folder of --data.")
    usable = [task for task in tasks if task.needs not in missing]
    rows = _complete_rows(file, tasks) if resume and file is not None and file.exists() else []
    done = {(row.method, row.task, row.seed) for row in rows}
    pending = []
    for seed, task in product(seeds, usable):
        left = {name: m for name, m in named.items() if (name, task.name, seed) not in done}
        if left:
            pending.append(Job(left, task, seed, data, time))
    # A stopped run has all tasks for its first seeds. With several processes, pictures come first:
    # they take longest, and none of them should be left for the end.
    if jobs > 1:
        pending.sort(key=lambda job: job.task.kind != "image")
    finished_jobs = map_in_processes(run_job, pending, jobs, stop_after)
    for number, finished in enumerate(finished_jobs, 1):
        rows += finished
        if file is not None:
            append_rows(finished, file)
        for row in finished:
            known = f"answer {row.answer}, stated {row.stated}"
            tell(
                f"{number}/{len(pending)} {row.task}, seed {row.seed}, {row.method}: {row.claim} "
                f"{row.status} ({known}), {row.seconds:.0f} s {row.message}"
            )
    return rows


def _has_official(name: str, data: Path | None) -> bool:
    """Return whether a folder has the files of an official data set."""
    try:
        return data is not None and len(OFFICIAL[name](data, "test")[0]) > 0
    except FileNotFoundError:
        return False


def _complete_rows(file: Path, tasks: Sequence[Task]) -> list[Row]:
    """Return the rows of complete runs, and remove those of a run that was stopped in between."""
    rows = read_rows(file)
    expected = {task.name: len(task.claims) + len(task.ranges) for task in tasks}
    counts = Counter((row.method, row.task, row.seed) for row in rows)
    complete = [
        row for row in rows if counts[row.method, row.task, row.seed] >= expected.get(row.task, 1)
    ]
    write_atomically(file, _as_lines(complete).encode())
    return complete


def _as_lines(rows: Sequence[Row | Score]) -> str:
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; a last line that was cut off is left out."""
    lines = file.read_text(encoding="utf-8").split("\n")
    return [Row(**json.loads(line)) for line in lines[:-1]]


def append_rows(rows: Sequence[Row | Score], file: Path) -> None:
    """Append rows to a file as JSON lines."""
    with file.open("a", encoding="utf-8") as out:
        out.write(_as_lines(rows))


def _name(method: Method) -> str:
    function = method.func if isinstance(method, partial) else method
    return str(getattr(function, "__name__", type(function).__name__))


def map_in_processes(
    function: Callable[[T], R], arguments: Sequence[T], jobs: int, stop_after: float = math.inf
) -> Iterator[R]:
    """Yield the results in the order in which they come, from processes with one thread each.

    Args:
        function: a function of a module.
        arguments: one for each call.
        jobs: number of processes; 1 calls the function in this process.
        stop_after: minutes after which no further call is started.
    """
    end = monotonic() + 60 * stop_after
    if jobs == 1:
        for argument in arguments:
            if monotonic() > end:
                return
            yield function(argument)
        return
    left = deque(arguments)
    with ProcessPoolExecutor(jobs, get_context("spawn"), _use_one_thread) as pool:
        running: set[Future[R]] = set()
        while running or left:
            while left and len(running) < jobs and monotonic() < end:
                running.add(pool.submit(function, left.popleft()))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


def _use_one_thread() -> None:
    """Prepare a process: processes with a pool of threads each would compete for the cores."""
    torch.set_num_threads(1)


def run_job(job: Job) -> list[Row]:
    """Return the rows of one task and seed."""
    with clock.cpu_time() if job.time == "cpu" else nullcontext():
        return _run_job(job)


def _run_job(job: Job) -> list[Row]:
    problem = job.task.make(job.seed, job.data)
    oracle_nll = None
    if job.task.oracle and problem.test_y is not None:
        prediction = train_and_predict(problem.architectures[job.task.oracle], problem)
        oracle_nll = float(negative_log_likelihood(prediction, problem.test_y).mean())
    rows: list[Row] = []
    for name, method in job.methods.items():
        started = clock.now()
        answer, message = _answer(method, problem)
        seconds = clock.now() - started
        rows += score(name, job.task, problem, answer, seconds, oracle_nll, message)
    return rows


def _answer(method: Method, problem: Problem) -> tuple[Answer, str]:
    """Return the answer and an error message; the answer of a method that fails is empty."""
    try:
        return method(problem), ""
    except Exception as error:  # a failing method must not stop the benchmark
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return Answer(), f"{type(error).__name__}: {error} ({place})"
