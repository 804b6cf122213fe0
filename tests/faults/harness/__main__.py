"""Run all attacks and print a table of counts: `make faults`.

PYTHONPATH=src:tests/faults python -m harness --jobs 2 --json benchmarks/results/faults.json
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.fuzz import run_child, run_module
from symrazor.core.version import __version__

TARGETS = (
    *("npy", "npz", "idx", "csv", "cifar", "images", "trajectories", "toml", "groups", "events"),
    *("checkpoints", "networks", "discoveries", "fits", "resumes", "manifests", "tars"),
)
SLOW_TARGETS = {"networks": 10, "discoveries": 10, "fits": 20, "resumes": 40, "images": 4}
"""Targets that get fewer inputs, by this factor."""
CASES = (
    *("fit", "fit over another run", "discover vectors", "discover images", "discover series"),
    *("discover sets", "discover volumes", "trajectories", "report", "export", "two processes"),
)
DISK_CASES = ("fit", "discover vectors", "report", "export")
CHUNK = 20_000
"""Inputs of one child process."""
COLUMNS = {
    "wrong exceptions": ("wrong exception", "crash"),
    "lost or mixed runs": ("lost run", "mixed run", "half-written", "temporary left"),
    "code executions": ("code run", "outside"),
    "over budget": ("over budget", "over 2 s"),
    "other": ("wrong verdict", "different wheels"),
}
"""Column of the table -> the failures that it counts."""


@dataclass(frozen=True)
class Job:
    """Part of the work; `run` returns what was tried, failures, and their descriptions."""

    attack: str
    target: str
    run: Callable[[], dict[str, Any]]


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return all work, divided into children."""
    work = []
    weights = {name: 1 / SLOW_TARGETS.get(name, 1) for name in TARGETS}
    for name in TARGETS if options.inputs else ():
        count = round(options.inputs * weights[name] / sum(weights.values()))
        for first in range(0, count, CHUNK):
            size = min(CHUNK, count - first)
            work.append(
                Job("damaged files", name, lambda n=name, f=first, s=size: run_child(n, f, s))
            )
    for name in CASES if options.kills else ():
        arguments = [name, str(options.kills), str(options.every)]
        work.append(Job("kill -9", name, lambda a=arguments: run_module("kills", *a)))
    for name in DISK_CASES if options.disk else ():
        arguments = [name, str(options.every)]
        work.append(Job("disk", name, lambda a=arguments: run_module("disk", *a)))
    if options.numbers:
        count = str(options.numbers)
        work.append(Job("numbers", "discover", lambda: run_module("numbers", count)))
    if options.estimates:
        count_estimates = str(options.estimates)
        work.append(Job("soak", "evidence", lambda: run_module("soak", count_estimates)))
    if options.wheel:
        work.append(Job("rebuild", "wheel", lambda: run_module("wheel")))
    return work


def summarise(results: list[tuple[Job, dict[str, Any]]]) -> list[list[Any]]:
    """Return a row for each attack and target, and a last one for their sums."""
    tried: Counter[tuple[str, str]] = Counter()
    failures: dict[tuple[str, str], Counter[str]] = {}
    for job, result in results:
        key = job.attack, job.target
        tried[key] += result["tried"]
        failures.setdefault(key, Counter()).update(result["failures"])
    rows = [
        [
            *key,
            tried[key],
            *(sum(failures[key][kind] for kind in kinds) for kinds in COLUMNS.values()),
        ]
        for key in sorted(tried)
    ]
    sums = [sum(row[column] for row in rows) for column in range(2, len(COLUMNS) + 3)]
    return [*rows, ["all", "", *sums]]


def show(rows: list[list[Any]]) -> None:
    """Print the table."""
    header = ["attack", "target", "tried", *COLUMNS]
    cells = [header, *([f"{c:,}" if isinstance(c, int) else c for c in row] for row in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(header))]
    for row in cells:
        text = [
            c.ljust(w) if k < 2 else c.rjust(w)
            for k, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(text).rstrip())


def write_json(file: Path, rows: list[list[Any]], jobs_at_a_time: int, minutes: float) -> None:
    """Write the table as a result file of benchmarks/."""
    arguments = shlex.join(a for a in sys.argv[1:] if a != "--json" and not a.endswith(".json"))
    command = f'make faults ARGS="{arguments}"' if arguments else "make faults"
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    result = {
        "title": "Faults: damaged files, kills, full disks, numbers at any scale",
        "question": "Does an attack cause a wrong exception, lose a run, or run code?",
        "command": [command],
        "machine": machine,
        "version": __version__,
        "goal": "0 in every column but the first",
        "columns": ["attack", "target", "tried", *COLUMNS],
        "rows": rows,
        "summary": {"command": command, "machine": machine},
        "notes": [f"{minutes:.0f} minutes, {jobs_at_a_time} attacks at a time."],
    }
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(prog="make faults ARGS=...", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="damaged files")
    parser.add_argument("--kills", type=int, default=5, help="kills at random times, by command")
    parser.add_argument(
        "--every", type=int, default=1, help="kill before each so-many-th operation"
    )
    parser.add_argument("--numbers", type=int, default=300, help="changed data sets")
    parser.add_argument("--estimates", type=int, default=2000, help="estimates in one process")
    parser.add_argument("--no-disk", dest="disk", action="store_false", help="no write errors")
    parser.add_argument("--no-wheel", dest="wheel", action="store_false", help="no package")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="children at a time")
    parser.add_argument("--json", type=Path, help="file for the table")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the attacks; return 1 if anything failed."""
    options = options_of(sys.argv[1:])
    started = time.monotonic()
    results: list[tuple[Job, dict[str, Any]]] = []
    rows: list[list[Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        started_jobs = {pool.submit(job.run): job for job in jobs(options)}
        for future in as_completed(started_jobs):
            job, result = started_jobs[future], future.result()
            results.append((job, result))
            print(f"{job.attack}, {job.target}: {result['tried']:,} tried", file=sys.stderr)
            for text in result["shown"]:
                print(text, file=sys.stderr)
            rows = summarise(results)
            if options.json:  # after each attack: a run of hours may be stopped
                write_json(options.json, rows, options.jobs, (time.monotonic() - started) / 60)
    show(rows)
    return int(any(rows[-1][3:]))


if __name__ == "__main__":
    sys.exit(main())
