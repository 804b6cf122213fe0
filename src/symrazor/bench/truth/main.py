"""Run the benchmark with options, and print its tables."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from symrazor.bench.truth.check import Score, architecture_scores, oracle_margin
from symrazor.bench.truth.methods import METHODS, Method, MethodName, run_discover
from symrazor.bench.truth.registry import tasks
from symrazor.bench.truth.result import agreement_notes, write_result
from symrazor.bench.truth.runner import Time, append_rows, map_in_processes, read_rows, run
from symrazor.bench.truth.scores import Agreement, Row, agreement, per_task, reliability
from symrazor.bench.truth.task import Task

SMALL_TASKS = ("digits in cells", "which half", "ring of points", "linear classes")
SMALL_MINUTES = 0.4
Show = Callable[[str, Sequence[Any]], object]
"""Prints a title and a table of dataclass rows."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Args:
        half: half of the tasks; "develop" may be used to adjust a method, "report" must not.
        methods: names of methods.
        tasks: names of tasks; all of the half by default.
        seeds: seeds of data and methods.
        minutes: time of `discover` for each task.
        jobs: number of processes with one thread each.
        small: run few tasks of both halves with little time.
        data: folder with official data sets.
        json: append rows to this file, one JSON object per line.
        resume: skip runs whose rows the file has.
        stop_after: minutes after which no further task is started.
        read: only summarise the file of rows.
        check: compare the fixed architectures of each task instead.
        device: device of `discover`: "cpu", "cuda" or "auto".
        time: what `minutes` counts: CPU time of one thread, or wall time. The first does not
            depend on other programs.
        compare: file of rows of another run, to count claims with the same answer.
        compared_run: description of that run, for the result file.
        result: write the tables to this file, for the benchmark pages.
        machine: description of the machine, for the result file.
        command: the command that measured the rows, for the result file.
    """

    half: Literal["develop", "report", "all"] = "develop"
    methods: tuple[MethodName, ...] = ("discover",)
    tasks: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    minutes: float = 2.0
    jobs: int = 1
    small: bool = False
    data: Path | None = None
    json: Path | None = None
    resume: bool = False
    stop_after: float = math.inf
    read: bool = False
    check: bool = False
    device: str = "cpu"
    time: Time = "cpu"
    compare: Path | None = None
    compared_run: str = ""
    result: Path | None = None
    machine: str = ""
    command: str = ""


def main(options: Options, show: Show | None = None) -> list[Row]:
    """Run the benchmark, print its tables, and return its rows."""
    show = show or print_table
    if options.check:
        show("Fixed architectures on the test sets", _checked(options))
        return []
    if options.read:
        if options.json is None:
            raise ValueError("There is no file to read. Use --json FILE.")
        rows = read_rows(options.json)
    else:
        rows = run(
            _methods(options),
            chosen_tasks(options),
            options.seeds,
            jobs=options.jobs,
            data=options.data,
            file=options.json,
            resume=options.resume,
            stop_after=options.stop_after,
            time=options.time,
            tell=partial(print, file=sys.stderr, flush=True),
        )
    if rows:
        show("Tasks", per_task(rows))
        show("Calibration of stated claims", reliability(rows))
    same: list[Agreement] = []
    if options.compare is not None:
        same = agreement(rows, read_rows(options.compare))
        show("Agreement of stated claims", same)
    if options.result is not None:
        notes = agreement_notes(same, options.compared_run)
        write_result(rows, options.result, options.command, options.machine, notes)
    return rows


def chosen_tasks(options: Options) -> list[Task]:
    """Return the tasks of the options; ValueError for an unknown name."""
    every = tasks(None, needs=True)
    names = options.tasks or (SMALL_TASKS if options.small else ())
    unknown = sorted(set(names) - {task.name for task in every})
    if unknown:
        known = ", ".join(task.name for task in every)
        raise ValueError(f"Unknown task {unknown[0]!r}. Tasks: {known}.")
    if names:
        return [task for task in every if task.name in names]
    return [task for task in every if options.half in ("all", task.half)]


def _methods(options: Options) -> dict[str, Method]:
    minutes = SMALL_MINUTES if options.small else options.minutes
    methods = {name: METHODS[name] for name in options.methods}
    return {
        name: partial(method, minutes=minutes, device=options.device)
        if method is run_discover
        else method
        for name, method in methods.items()
    }


def _checked(options: Options) -> list[Score]:
    """Return the scores of the fixed architectures, and append them to the file of rows."""
    usable = [t for t in chosen_tasks(options) if t.oracle and (options.data or not t.needs)]
    pairs = [(task, seed, options.data) for seed in options.seeds for task in usable]
    scores: list[Score] = []
    for finished in map_in_processes(architecture_scores, pairs, options.jobs, options.stop_after):
        scores += finished
        if options.json is not None:
            append_rows(finished, options.json)
        margin = f"oracle margin {oracle_margin(finished):.3f} nats per datum"
        print(f"{finished[0].task}, seed {finished[0].seed}: {margin}", file=sys.stderr, flush=True)
    return scores


def print_table(title: str, rows: Sequence[Any]) -> None:
    """Print a table as plain text."""
    if not rows:
        return
    cells = [[_cell(value) for value in asdict(row).values()] for row in rows]
    lines = [list(asdict(rows[0])), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
