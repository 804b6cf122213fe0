"""Run all attacks and print a table of counts: `make faults`.

PYTHONPATH=src:tests/faults python -m harness --jobs 2 --json benchmarks/results/faults.json

The work is cut into parts of about a minute. The result of each part is stored at once
(`--progress`), so that a run that was stopped, or that stops itself after `--minutes`, is continued
by the same command, here or on another machine. Parts of another version of the sources are counted
again. The table sums all parts of this version, also those of calls with other options. An
unfinished run writes the file of the table as well, and says there which parts are missing.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.fuzz import run_module
from symrazor.core.version import __version__

ROOT = Path(__file__).parents[3]
TARGETS = (
    *("npy", "npz", "idx", "csv", "cifar", "images", "tensors", "sounds", "trajectories", "toml"),
    *(
        "groups",
        "events",
        "checkpoints",
        "networks",
        "discoveries",
        "fits",
        "resumes",
        "resumed_discoveries",
    ),
    *("manifests", "tars", "parquet", "hdf5", "nifti"),
)
PACKAGES = {"parquet": "pyarrow", "hdf5": "h5py", "nifti": "nibabel"}
"""Target -> the package that reads it; without the package it is skipped."""
SLOW_TARGETS = {
    **{"npz": 2, "tensors": 2, "groups": 2, "checkpoints": 2, "networks": 8, "images": 16},
    **{"discoveries": 20, "resumes": 20, "fits": 40, "resumed_discoveries": 400},
    **{"parquet": 3, "hdf5": 3, "nifti": 3},
}
"""Targets that get fewer inputs, by this factor: an input takes 1 to 400 ms."""
CASES = {
    **{"fit": 1, "fit over another run": 1, "discover vectors": 6, "discover images": 60},
    **{"discover series": 60, "discover sets": 60, "discover volumes": 60, "equations": 25},
    **{"trajectories": 25, "report": 1, "export": 1, "predict": 1, "two processes": 2},
}
"""Command -> it is killed before each so-many-th file operation."""
PARTS = {"discover vectors": 2, "fit over another run": 2}
"""Command -> parts into which its kills are divided."""
DISK_CASES = {"fit": 1, "discover vectors": 24, "report": 1, "export": 1, "predict": 1}
"""Command -> each so-many-th file operation fails."""
FUZZ_CHUNK, NUMBERS_CHUNK = 20_000, 25
"""Inputs and data sets of one child process."""
CONTINUE = 75
"""Exit code of a run that has to be continued."""
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
    """Part of the work: `harness.MODULE.attack(*arguments)` in a child process."""

    attack: str
    target: str
    module: str
    arguments: tuple[str, ...]

    @property
    def key(self) -> str:
        """Name in the file of progress."""
        return shlex.join((self.module, *self.arguments))


def absent() -> dict[str, str]:
    """Return target -> the package that it lacks."""
    return {name: package for name, package in PACKAGES.items() if find_spec(package) is None}


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return all work, divided into children."""
    work = []
    targets = [name for name in TARGETS if name not in absent()]
    weights = {name: 1 / SLOW_TARGETS.get(name, 1) for name in targets}
    for name in targets if options.inputs else ():
        count = -int(-options.inputs * weights[name] // sum(weights.values()))
        chunk = max(1, FUZZ_CHUNK // SLOW_TARGETS.get(name, 1))
        for first in range(0, count, chunk):
            numbers = str(first), str(min(chunk, count - first))
            work.append(Job("damaged files", name, "fuzz", (name, *numbers)))
    for name, every in CASES.items() if options.kills else ():
        n_parts = PARTS.get(name, 1)
        for part in range(n_parts):
            numbers = str(options.kills), str(every * options.every), str(part), str(n_parts)
            work.append(Job("kill -9", name, "kills", (name, *numbers)))
    for name, every in DISK_CASES.items() if options.disk else ():
        work.append(Job("disk", name, "disk", (name, str(every * options.every))))
    for first in range(0, options.numbers, NUMBERS_CHUNK):
        count = min(NUMBERS_CHUNK, options.numbers - first)
        work.append(Job("numbers", "discover", "numbers", (str(count), str(first))))
    if options.numbers:
        work.append(Job("numbers", "evidence", "scales", (str(10 * options.numbers),)))
    if options.estimates:
        work.append(Job("soak", "evidence", "soak", (str(options.estimates),)))
    if options.wheel:
        work.append(Job("rebuild", "wheel", "wheel", ()))
    return work


def sources() -> str:
    """Return a hash of everything that is attacked, and of the attacks."""
    digest = hashlib.sha256()
    for file in sorted([*ROOT.glob("src/**/*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def commit() -> str:
    """Return the commit that is checked out, or "unknown"."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def describe_machine() -> str:
    """Return the number of cores, and the versions of Python and torch."""
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}"


class Progress:
    """Results of finished parts, as lines of JSON in a file; None keeps them in memory."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.sources = file, sources()
        self.results: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, Job] = {}
        self.commands: list[str] = []
        lines = [] if file is None or not file.exists() else file.read_text().splitlines()
        for line in lines:
            entry = json.loads(line)
            if entry["sources"] == self.sources:
                attack, target, module, arguments = entry["job"]
                job = Job(attack, target, module, tuple(arguments))
                self._add(job, entry["result"], entry["command"])

    def _add(self, job: Job, result: dict[str, Any], command: str) -> None:
        self.jobs[job.key], self.results[job.key] = job, result
        if command not in self.commands:
            self.commands.append(command)

    def done(self) -> list[tuple[Job, dict[str, Any]]]:
        """Return all finished parts with their results."""
        return [(job, self.results[key]) for key, job in self.jobs.items()]

    def store(self, job: Job, result: dict[str, Any]) -> None:
        """Store the result of a part."""
        result = {**result, "machine": describe_machine()}
        self._add(job, result, command_line())
        if self.file is not None:
            entry = {"sources": self.sources, "command": command_line(), "result": result}
            entry |= {"job": [job.attack, job.target, job.module, job.arguments]}
            with self.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def run(work: list[Job], progress: Progress, at_a_time: int, minutes: float) -> None:
    """Run the parts that are missing; start none after this number of minutes."""
    deadline = time.monotonic() + 60 * minutes

    def start(job: Job) -> dict[str, Any] | None:
        if time.monotonic() > deadline:
            return None
        return run_module(job.module, *job.arguments)

    missing = [job for job in work if job.key not in progress.results]
    with ThreadPoolExecutor(at_a_time) as pool:
        started = {pool.submit(start, job): job for job in missing}
        for future in as_completed(started):
            job, result = started[future], future.result()
            if result is None:
                continue
            progress.store(job, result)
            text = f"{job.attack}, {job.key}: {result['tried']:,} tried, {result['cpu']:.0f} s"
            print(text, *result["shown"], sep="\n", file=sys.stderr, flush=True)


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


def command_line() -> str:
    """Return the command of this call, without the options that change no count."""
    hidden = ("--json", "--progress", "--minutes", "--jobs")
    arguments, words = [], iter(sys.argv[1:])
    for word in words:
        if word in hidden:
            next(words, None)
        else:
            arguments.append(word)
    return f'make faults ARGS="{shlex.join(arguments)}"' if arguments else "make faults"


def strides(work: list[Job]) -> str:
    """Return before which file operations each command was killed."""
    every: dict[str, set[int]] = {}
    for job in work:
        if job.module == "kills":
            every.setdefault(job.target, set()).add(int(job.arguments[2]))
    return ", ".join(
        f"{name}: each" if numbers == {1} else f"{name}: one in {min(numbers)}"
        for name, numbers in sorted(every.items())
    )


def write_json(file: Path, progress: Progress, missing: list[Job]) -> None:
    """Write the table of all finished parts as a result file of benchmarks/."""
    rows = summarise(progress.done())
    machine = "; ".join(sorted({result["machine"] for result in progress.results.values()}))
    attacks = Counter[str]()
    for row in rows[:-1]:
        attacks[row[0]] += row[2]
    lacking = ", ".join(sorted({f"{job.attack} ({job.target})" for job in missing}))
    cpu = sum(result["cpu"] for result in progress.results.values()) / 60
    result = {
        "title": "Faults: damaged files, kills, full disks, numbers at any scale",
        "question": "Does an attack cause a wrong exception, lose a run, or run code?",
        "command": progress.commands,
        "machine": machine,
        "version": __version__,
        "goal": "0 in every column but the first, 1,000,000 damaged files and 200 kills",
        "columns": ["attack", "target", "tried", *COLUMNS],
        "rows": rows,
        "summary": {
            **{"command": "; ".join(progress.commands), "machine": machine},
            **{"cpu_minutes": round(cpu), "commit": commit(), "missing": lacking or "none"},
            **{name.replace(" ", "_"): count for name, count in attacks.items()},
        },
        "notes": [
            f"{cpu:.0f} minutes of CPU time. All parts are of one version of the sources, commit "
            f"{commit()}.",
            f"Kills before file operations: {strides([*progress.jobs.values()])}.",
            *([f"Not reached: {lacking}."] if missing else []),
        ],
    }
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(prog="make faults ARGS=...", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="damaged files")
    parser.add_argument("--kills", type=int, default=2, help="kills at random times, by part")
    parser.add_argument(
        "--every", type=int, default=1, help="kill before each so-many-th operation"
    )
    parser.add_argument("--numbers", type=int, default=200, help="changed data sets")
    parser.add_argument("--estimates", type=int, default=2000, help="estimates in one process")
    parser.add_argument("--only", default="", help="attacks and targets, a regular expression")
    parser.add_argument("--no-disk", dest="disk", action="store_false", help="no write errors")
    parser.add_argument("--no-wheel", dest="wheel", action="store_false", help="no package")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="children at a time")
    parser.add_argument("--json", type=Path, help="file for the table")
    parser.add_argument("--progress", type=Path, help="file for the results of finished parts")
    parser.add_argument("--minutes", type=float, default=1e6, help="time for this call")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the attacks; return 1 if anything failed, or `CONTINUE`."""
    options = options_of(sys.argv[1:])
    progress = Progress(options.progress)
    work = [job for job in jobs(options) if re.search(options.only, f"{job.attack} {job.target}")]
    run(work, progress, options.jobs, options.minutes)
    rows = summarise(progress.done())
    show(rows)
    for name, package in absent().items():
        print(f"Not attacked: {name} files, because {package} is not installed.", file=sys.stderr)
    missing = [job for job in work if job.key not in progress.results]
    if options.json and progress.results:
        write_json(options.json, progress, missing)
    if missing:
        print(f"{len(missing)} of {len(work)} parts are missing: run it again.", file=sys.stderr)
        return CONTINUE
    return int(any(rows[-1][3:]))


if __name__ == "__main__":
    sys.exit(main())
