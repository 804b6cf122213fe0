"""Compare `discover` on real data with what people do today, for the pages in docs/gallery.

    python benchmarks/gallery.py DIR --json benchmarks/results/gallery.json

DIR has the files of gallery_data.py. Each method uses one thread, and its time is CPU time of its
process. The file is written after every result, so that an interrupted measurement keeps its part;
`--continue` adds the results that it lacks, and writes the file anew.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gallery_data import DATA
from gallery_methods import METHODS, Problem, Result
from symrazor.core.likelihood import calibration_error
from symrazor.core.version import __version__

COLUMNS = [
    *("data", "n", "seed", "method", "accuracy %", "NLL", "ECE", "CPU minutes", "choices"),
    *("network", "verdict", "claims"),
]
Job = tuple[str, int, int, tuple[str, ...]]
"""Data set, number of training samples, seed, and methods that share a network."""


def load(folder: Path, name: str, n: int, seed: int, seconds: float) -> Problem:
    """Return the problem of a data set, with a part of the training data of every class."""
    data = DATA[name]
    with np.load(folder / f"{name}.npz") as file:
        x, x_test = (torch.from_numpy(file[key]) for key in ("x", "x_test"))
        y, y_test = (torch.from_numpy(file[key]).long() for key in ("y", "y_test"))
        classes = len(file["names"])
    part = stratified(y, seed)[:n]
    return Problem(
        (x[part], y[part]), (x_test, y_test), classes, data.kind, data.groups, seconds, seed
    )


def stratified(y: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a random order in which every part has about the same shares of the classes."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    position = torch.empty(len(y))
    for label in y.unique():
        own = order[y[order] == label]
        position[own] = (torch.arange(len(own)) + 0.5) / len(own)
    return position.argsort(stable=True)


def measure(folder: Path, job: Job, seconds: float) -> list[list[Any]]:
    """Run methods one after the other and return their rows."""
    torch.set_num_threads(1)
    name, n, seed, methods = job
    problem = load(folder, name, n, seed, seconds)
    rows, minutes = [], dict[str, float]()
    for method in methods:
        started = time.process_time()
        result = METHODS[method].run(problem)
        minutes[method] = (time.process_time() - started) / 60
        minutes[method] += minutes.get(METHODS[method].after, 0.0)
        row = _row(problem.test[1], method, result, minutes[method])
        rows.append([name, n, seed, *row])
    return rows


def _row(y: torch.Tensor, method: str, result: Result, minutes: float) -> list[Any]:
    """Return method, scores, choices and answer, in the order of the columns."""
    f = result.log_probabilities.double()
    claims = "; ".join(
        f"{claim}: {'undecided' if holds is None else 'yes' if holds else 'no'} ({probability:.3f})"
        for claim, holds, probability in result.claims
    )
    scores = [
        round(100 * float((f.argmax(1) == y).double().mean()), 1),
        round(float(F.nll_loss(f, y)), 3),
        round(float(calibration_error(f.exp(), y)), 3),
        round(minutes, 2),
    ]
    choices = len(METHODS[method].choices)
    return [method, *scores, choices, result.network, result.verdict, claims]


def jobs(arguments: argparse.Namespace, known: set[Any]) -> list[Job]:
    """Return what is to be measured, the largest size of every data set first."""
    found = []
    for seed in arguments.seeds:
        for size in arguments.sizes:
            for name in arguments.data:
                for n in DATA[name].sizes[::-1][size : size + 1]:
                    methods = [
                        method
                        for method in arguments.methods
                        if (name, n, seed, method) not in known
                        and DATA[name].kind in METHODS[method].kinds
                    ]
                    followers = {method for method in methods if METHODS[method].after}
                    for method in methods:
                        if METHODS[method].after not in methods:
                            after = [m for m in followers if METHODS[m].after == method]
                            found.append((name, n, seed, (method, *after)))
    return found


def describe(folder: Path, name: str) -> dict[str, Any]:
    """Return what the page of a data set says about it."""
    data = DATA[name]
    with np.load(folder / f"{name}.npz") as file:
        shape, n_test, classes = file["x"].shape[1:], len(file["y_test"]), len(file["names"])
    described = {"title": data.title, "question": data.question, "source": data.source}
    return {**described, "n_test": n_test, "shape": shape, "classes": classes}


def document(rows: list[list[Any]], machine: str, folder: Path) -> dict[str, Any]:
    """Return the content of the result file."""
    order = [*DATA]
    methods = [*METHODS]
    rows = sorted(rows, key=lambda row: (order.index(row[0]), *row[1:3], methods.index(row[3])))
    return {
        "title": "Gallery of real data",
        "question": "Does the delivered network predict better than what people do today?",
        "command": [
            "python benchmarks/gallery_data.py PACKAGES OFFICIAL DIR",
            "python benchmarks/gallery.py DIR --json FILE",
        ],
        "machine": machine,
        "version": f"symrazor {__version__}, torch {torch.__version__}",
        "data": {name: describe(folder, name) for name in DATA},
        "columns": COLUMNS,
        "rows": rows,
        "notes": [
            "Test data that no method has seen. The methods that train networks have the same CPU "
            "time; CPU minutes are those that were used, imports excluded.",
            "choices: what a person has to decide before a method can start.",
        ],
    }


def write(rows: list[list[Any]], arguments: argparse.Namespace) -> None:
    """Write the result file."""
    text = json.dumps(document(rows, arguments.machine, arguments.folder), indent=1) + "\n"
    arguments.json.write_text(text, encoding="utf-8")


def main() -> None:
    """Run all jobs in worker processes, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", nargs="+", choices=tuple(DATA), default=tuple(DATA))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sizes", type=int, nargs="+", choices=range(3), default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU seconds of each method")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, help="stop after so many seconds")
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores, one thread per method")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--continue", dest="resume", action="store_true")
    arguments = parser.parse_args()
    rows: list[list[Any]] = []
    if arguments.resume and arguments.json.exists():
        rows = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
        write(rows, arguments)
    known = {tuple(row[:4]) for row in rows}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, context) as pool:
        tasks = {
            pool.submit(measure, arguments.folder, job, arguments.seconds): job
            for job in jobs(arguments, known)
        }
        try:
            for task in as_completed(tasks, arguments.limit):
                if task.exception() is not None:
                    print(tasks[task], repr(task.exception()), file=sys.stderr, flush=True)
                    continue
                rows += task.result()
                print(*task.result(), sep="\n", flush=True)
                write(rows, arguments)
        except OutOfTime:
            unfinished = [job for task, job in tasks.items() if not task.done()]
            print(f"out of time: {unfinished}", file=sys.stderr, flush=True)
            for process in multiprocessing.active_children():
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
