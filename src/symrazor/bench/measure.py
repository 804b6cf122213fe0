"""Measure interleaved times and peak memory, and write rows to a file."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from symrazor.core.files import write_atomically

Runs = dict[str, Callable[[], object]]
"""Variant -> function to time."""


@dataclass
class Timing:
    """Median seconds over interleaved rounds."""

    cpu: float
    wall: float


def interleave(variants: Runs, rounds: int, warm: Runs | None = None) -> dict[str, Timing]:
    """Time every variant once per round, after one warm-up, and return medians.

    Args:
        variants: Functions to time.
        rounds: Number of rounds.
        warm: Functions to call, untimed, before each measurement: a short run is slower after a
            larger one, which leaves caches and memory in another state.
    """
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            if warm is not None:
                warm[name]()
            c, w = time.process_time(), time.perf_counter()
            run()
            cpu[name].append(time.process_time() - c)
            wall[name].append(time.perf_counter() - w)
    return {n: Timing(statistics.median(cpu[n]), statistics.median(wall[n])) for n in variants}


def peak_memory(run: Callable[[], object]) -> float:
    """Return the peak of resident memory that `run` adds, in MB (Linux; NaN elsewhere)."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def read(field: str) -> float:
        line = next(x for x in status.read_text().splitlines() if x.startswith(field))
        return float(line.split()[1]) / 1024

    try:
        reset.write_text("5")
        before = read("VmRSS")
        run()
        return read("VmHWM") - before
    except OSError:
        return float("nan")


def fresh_peak(module: str, *args: object) -> float:
    """Call a benchmark's `first_peak` in a new process: an old one has memory to reuse.

    Args:
        module: Module of the benchmark.
        *args: Arguments of its `first_peak`, which `repr` must represent.
    """
    code = f"from {module} import *; print(first_peak{args})"
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(process.stdout)


def write_rows(rows: Sequence[Any], file: Path | None) -> None:
    """Write dataclass rows as JSON, if a file is given."""
    if file is not None:
        text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
        write_atomically(file, text.encode())
