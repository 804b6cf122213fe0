"""Compare CPU time and peak memory of the benchmarks between two checkouts of this repository.

    git worktree add ../before 7556f01
    python tools/compare_checkouts.py ../before . --rounds 9 --json speed.json

Each run of `symrazor bench` is measured in both checkouts in turn, in two processes on one core.
A ratio is the median over rounds of (second checkout / first); the quartiles show the noise. Runs
that only use torch, such as an SGD epoch, are controls: their ratios should be 1. With `--small`,
networks and data are smaller and slow groups are left out, which takes minutes. An interrupted
comparison of the same two commits continues from the groups in the file of `--json`.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

Runs = dict[str, Callable[[], object]]
TOLERANCE = 0.05
"""Largest acceptable increase of a median ratio."""
MIN_SECONDS = 0.5
"""CPU seconds of one measurement; shorter runs are repeated."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the runs.

    Args:
        evidence: width and number of images of the network of `symrazor bench evidence`.
        augment: width, number of images and batch size of `symrazor bench augment`.
        fit: width and number of images of `symrazor bench fit`.
        layers: comparisons of `symrazor bench layers`; None for all.
    """

    evidence: tuple[int, int] = (4, 1000)
    augment: tuple[int, int, int] = (4, 48, 12)
    fit: tuple[int, int] = (4, 2000)
    layers: tuple[str, ...] | None = None


SMALL = Sizes((4, 250), (4, 12, 6), (4, 500), ("layers", "group convolution", "collapsed"))
PARTS = ("evidence", "fit", "augment", "layers")


@dataclass(frozen=True)
class Row:
    """One run: its CPU seconds and peak memory in both checkouts, and the ratios of the seconds."""

    part: str
    run: str
    seconds: tuple[float, float]
    ratio: float
    quartiles: tuple[float, float]
    peak_mb: tuple[float, float] | None


Group = tuple[Callable[[], Runs], Callable[[str], float]]
"""Functions that return the runs of a group, and the peak memory of one of them in megabytes."""


def benchmarks(part: str, sizes: Sizes) -> dict[str, Group]:
    """Return the groups of runs of a benchmark by name."""
    from symrazor.bench import augment, evidence, fit, layers

    if part == "evidence":
        alpha, n = sizes.evidence
        runs = partial(evidence.variants, alpha, "zeros", n)
        return {part: (runs, lambda name: evidence.first_peak(alpha, "zeros", name, n, 1))}
    if part == "augment":
        alpha, n, batch = sizes.augment
        runs = partial(augment.variants, alpha, n, batch)
        return {part: (runs, lambda name: augment.first_peak(alpha, name, n, batch, 1))}
    if part == "fit":
        alpha, n = sizes.fit
        options = fit.Options(alpha=alpha, images=n, threads=1)

        def fit_runs() -> Runs:
            epoch, estimate = fit.fitting(options)
            return {"plain": fit.plain_epoch(options), "fit": epoch, "estimate": estimate}

        return {part: (fit_runs, lambda name: fit.first_peak(options, name))}

    def layer_runs(name: str) -> Runs:
        return layers.COMPARISONS[name]().runs

    def layer_peak(name: str, run: str) -> float:
        return layers.first_peak(name, run, 1)

    return {
        f"layers: {name}": (partial(layer_runs, name), partial(layer_peak, name))
        for name in sizes.layers or layers.COMPARISONS
    }


def find(group: str, sizes: Sizes) -> Group:
    """Return the functions of a group."""
    return benchmarks(group.partition(":")[0], sizes)[group]


def answer(group: str, sizes: Sizes) -> None:
    """Time the runs that the parent process asks for, one line of JSON each."""
    import torch

    torch.set_num_threads(1)
    make_runs, _ = find(group, sizes)
    runs = make_runs()
    print(json.dumps(list(runs)), flush=True)
    for line in sys.stdin:
        name, repeats = json.loads(line)
        start = time.process_time()
        for _ in range(repeats):
            runs[name]()
        print((time.process_time() - start) / repeats, flush=True)


class Checkout:
    """Start processes that import the package from one checkout."""

    def __init__(self, root: Path, small: bool) -> None:
        self.command = [sys.executable, __file__, *(["--small"] if small else [])]
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(root.resolve() / "src"),
            "OMP_NUM_THREADS": "1",
        }

    def call(self, *arguments: str) -> str:
        """Return the output of this script in a new process."""
        command = [*self.command, *arguments]
        return subprocess.run(
            command, env=self.environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    @contextmanager
    def worker(self, group: str) -> Iterator[tuple[list[str], Callable[[str, int], float]]]:
        """Start a worker; yield the names of its runs and a function that times one."""
        command = [*self.command, "--worker", group]
        with subprocess.Popen(
            command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            questions, answers = process.stdin, process.stdout

            def seconds(name: str, repeats: int) -> float:
                questions.write(json.dumps([name, repeats]) + "\n")
                questions.flush()
                return float(answers.readline())

            yield json.loads(answers.readline()), seconds
            questions.close()


def compare(group: str, checkouts: list[Checkout], rounds: int, memory: bool) -> Iterator[Row]:
    """Measure all runs of a group that both checkouts have."""
    with ExitStack() as stack:
        workers = [stack.enter_context(checkout.worker(group)) for checkout in checkouts]
        names = [name for name in workers[0][0] if name in workers[1][0]]
        measured: dict[str, list[list[float]]] = {name: [] for name in names}
        repeats: dict[str, int] = {}
        for name in names:
            for _, seconds in workers:
                seconds(name, 1)
            repeats[name] = math.ceil(MIN_SECONDS / max(workers[0][1](name, 1), 1e-6))
        for turn in range(rounds):
            for name in names:
                order = [0, 1] if turn % 2 == 0 else [1, 0]
                timed = {index: workers[index][1](name, repeats[name]) for index in order}
                measured[name].append([timed[0], timed[1]])
    for name, pairs in measured.items():
        ratios = [second / first for first, second in pairs]
        lower, _, upper = statistics.quantiles(ratios, n=4)
        first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
        peaks = [float(c.call("--peak", group, name)) for c in checkouts] if memory else None
        yield Row(
            group,
            name,
            (first, second),
            statistics.median(ratios),
            (lower, upper),
            (peaks[0], peaks[1]) if peaks else None,
        )


def markdown(row: Row) -> str:
    """Return a row as a line of a table."""
    first, second = row.seconds
    lower, upper = row.quartiles
    mark = "" if row.ratio <= 1 + TOLERANCE else " NO"
    peak = "" if row.peak_mb is None else f"{row.peak_mb[0]:.0f} -> {row.peak_mb[1]:.0f}"
    return (
        f"| {row.part} | {row.run} | {first:.4g} -> {second:.4g} | {row.ratio:.3f}{mark} | "
        f"{lower:.3f} to {upper:.3f} | {peak} |"
    )


def commit(root: Path) -> str:
    """Return the commit and date of a checkout."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%h (%cs)"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def line(row: Row) -> list[object]:
    """Return a row of the result file."""
    numbers = (*row.seconds, row.ratio, *row.quartiles)
    return [row.part, row.run, *(float(f"{value:.4g}") for value in numbers)]


def stored_lines(options: argparse.Namespace) -> list[list[object]]:
    """Return the rows of an interrupted comparison of the same commits with the same options."""
    if options.json is None or not options.json.exists():
        return []
    stored = json.loads(options.json.read_text())
    expected = document([], options)
    is_same = all(stored[key] == expected[key] for key in ("command", "notes"))
    return list(stored["rows"]) if is_same else []


def document(lines: Sequence[Sequence[object]], options: argparse.Namespace) -> dict[str, object]:
    """Return a result file for the benchmark pages."""
    flags = " ".join([f"--rounds {options.rounds}", *(["--small"] if options.small else [])])
    before, after = map(commit, options.checkouts)
    slower = sum(float(str(entries[4])) > 1 + TOLERANCE for entries in lines)
    return {
        "title": "CPU time of two checkouts",
        "question": "Is anything slower than before the source was arranged in layers?",
        "command": [f"python tools/compare_checkouts.py BEFORE AFTER {flags} --json FILE"],
        "machine": "one CPU core, one thread, beside other jobs",
        "goal": f"Ratios of at most {1 + TOLERANCE}.",
        "summary": {"slower": slower, "runs": len(lines)},
        "columns": [
            "part",
            "run",
            "before, s",
            "after, s",
            "ratio",
            "lower quartile",
            "upper quartile",
        ],
        "rows": list(lines),
        "notes": [
            f"Before: commit {before}; after: {after}.",
            "Ratios are medians over rounds of (after / before). Runs that only use torch, such as "
            "an SGD epoch, are controls.",
        ],
    }


def main() -> None:
    """Compare, print a table and write the rows to a file if one is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="smaller networks, fewer runs")
    parser.add_argument("--memory", action="store_true", help="also measure the peak memory")
    parser.add_argument("--core", type=int, help="run on this core only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", metavar="GROUP", help=argparse.SUPPRESS)
    parser.add_argument("--groups", metavar="PART", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, metavar=("GROUP", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = SMALL if options.small else Sizes()
    if options.worker:
        return answer(options.worker, sizes)
    if options.groups:
        return print(json.dumps(list(benchmarks(options.groups, sizes))))
    if options.peak:
        group, run = options.peak
        _, peak_memory = find(group, sizes)
        return print(peak_memory(run))
    if len(options.checkouts) != 2 or options.rounds < 2:
        parser.error("give two checkouts and at least 2 rounds.")
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    checkouts = [Checkout(root, options.small) for root in options.checkouts]
    print("| part | run | CPU seconds | ratio | quartiles | peak MB |")
    print("|---|---|---|---|---|---|", flush=True)
    lines = stored_lines(options)
    finished = {entries[0] for entries in lines}
    for part in options.parts:
        for group in json.loads(checkouts[0].call("--groups", part)):
            if group in finished:
                continue
            for row in compare(group, checkouts, options.rounds, options.memory):
                lines.append(line(row))
                print(markdown(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(document(lines, options), indent=1) + "\n")


if __name__ == "__main__":
    main()
