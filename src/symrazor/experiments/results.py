"""Results of experiments in a file that many runs share, and as a markdown table."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from symrazor.core.files import write_atomically

Run = dict[str, Any]
"""One training run: "row", "seed", "small", its figures or "error", and its whole reading."""

SCHEMA = 1
OWN = ("seed", "device")
"""Options that every run of a row may have as it likes."""
FIGURES = ("accuracy", "nll", "evidence", "free_shares", "seconds", "reading")
"""What there is of a run of a table that did not diverge."""


def read_runs(experiment: str, file: Path) -> list[Run]:
    """All runs in a file; none if there is no file yet.

    Raises:
        ValueError: a file that is something else.
    """
    if not file.exists():
        return []
    try:
        document = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"expected results of {experiment}, got {file}: {error}") from error
    if not isinstance(document, dict) or document.get("experiment") != experiment:
        found = document.get("experiment") if isinstance(document, dict) else type(document)
        raise ValueError(f"expected results of {experiment} in {file}, got those of {found!r}")
    if (schema := document.get("schema", SCHEMA)) != SCHEMA:
        raise ValueError(
            f"expected schema {SCHEMA} in {file}, got {schema}; do: use a newer version"
        )
    runs: list[Any] = document.get("runs", [])
    if not isinstance(runs, list):
        kind = type(runs).__name__
        raise ValueError(f"expected a list of runs in {file}, got {kind}; do: choose another file")
    for run in runs:
        if not isinstance(run, dict) or not _is_named(run):
            found = sorted(run)[:8] if isinstance(run, dict) else repr(run)[:40]
            raise ValueError(
                f"expected runs with a row, a seed and a size in {file}, got one with "
                f"{found}; do: choose another file"
            )
    return runs


def _is_named(run: Run) -> bool:
    """Whether a run has what runs are told apart by."""
    kinds = {"row": str, "seed": int, "small": bool}
    return all(isinstance(run.get(key), kind) for key, kind in kinds.items())


def check_figures(runs: Sequence[Run]) -> None:
    """Refuse runs that a table has no use for: not diverged, and yet without all figures.

    Raises:
        ValueError: names the first.
    """
    for run in runs:
        needed = ("epochs",) if "error" in run else ("epochs", *FIGURES)
        missing = [name for name in needed if name not in run]
        if missing:
            raise ValueError(
                f"expected a whole run of row {run['row']}, seed {run['seed']}, got one without "
                f"{', '.join(missing)}; do: remove it from its file"
            )


def merged(old: Sequence[Run], new: Sequence[Run]) -> list[Run]:
    """Old and new runs, a new one in place of an old one with the same row, seed and size."""
    by_key = {(run["small"], run["row"], run["seed"]): run for run in (*old, *new)}
    return [by_key[key] for key in sorted(by_key)]


def add_runs(
    experiment: str,
    file: Path,
    new: Sequence[Run],
    also: Callable[[list[Run]], Mapping[str, Any]] = lambda runs: {},
) -> list[Run]:
    """Merge runs into a file, which is there whole at any time; several processes may do so.

    Args:
        experiment: its name.
        file: made if it is not there.
        new: runs, each in place of an old one with the same row, seed and size.
        also: all runs -> what else is in the file, made anew.

    Returns:
        What is in the file now.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with _alone(file.parent):
        runs = merged(read_runs(experiment, file), new)
        document = {"experiment": experiment, "schema": SCHEMA, "runs": runs, **also(runs)}
        write_atomically(file, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    return runs


def gather(experiment: str, file: Path | None, jobs: Iterable[Callable[[], Run]]) -> list[Run]:
    """Run jobs one after the other; each result is in the file, if any, as soon as it is there.

    Returns:
        These runs, and those that were in the file.
    """
    runs: list[Run] = [] if file is None else read_runs(experiment, file)
    for job in jobs:
        new = job()
        runs = merged(runs, [new])
        if file is not None:
            runs = merged(runs, add_runs(experiment, file, [new]))
    return runs


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for other processes that write to the folder, where the system can."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def markdown(runs: Sequence[Run], paper: Mapping[str, Mapping[str, float]]) -> str:
    """One line per row, mean and standard deviation over seeds, the paper's figure beside ours.

    Args:
        runs: of one size; rows appear in the order of `paper`. A row whose runs were not all
            trained in one way says so.
        paper: row -> its figures "accuracy" (in per cent), "nll", "evidence" (-log evidence / N).
    """
    head = ["row", "accuracy %", "paper", "NLL", "paper", "-log ev/N", "paper"]
    head += ["free share by layer %", "epochs", "seconds", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row, figures in paper.items():
        of_row = [run for run in runs if run["row"] == row]
        done = [run for run in of_row if "error" not in run]
        if not of_row:
            continue
        cells = [row]
        for key, digits in (("accuracy", 2), ("nll", 3), ("evidence", 3)):
            cells.append(_spread([run[key] for run in done], digits) if done else "diverged")
            cells.append(f"{figures[key]:.{digits}f}" if key in figures else "")
        cells.append(_shares([run["free_shares"] for run in done]))
        cells.append(_spread([run["epochs"] for run in of_row], 0))
        cells.append(_spread([run["seconds"] for run in done], 0) if done else "")
        failed = f", {len(of_row) - len(done)} diverged" if len(done) < len(of_row) else ""
        settings = len(_settings(of_row))
        mixed = f", of {settings} settings" if settings > 1 else ""
        cells.append(f"{len(of_row)}{failed}{mixed}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    """The mean, and for several values their standard deviation."""
    text = f"{mean(values):.{digits}f}"
    return text if len(set(values)) < 2 else f"{text} ± {stdev(values):.{digits}f}"


def _settings(runs: Sequence[Run]) -> list[tuple[Any, Run, Run]]:
    """The ways in which runs were trained, but for their seeds and devices.

    The options of the evidence are in the reading, which a run that diverged does not have; what
    only one of two runs knows of does not set them apart.
    """
    ways: list[tuple[Any, Run, Run]] = []
    for run in sorted(runs, key=lambda run: "reading" not in run):
        way = _setting(run)
        learned = way[2]
        same = (known for known in ways if known[:2] == way[:2])
        if not any(all(of[k] == learned[k] for k in of.keys() & learned) for *_, of in same):
            ways.append(way)
    return ways


def _setting(run: Run) -> tuple[Any, Run, Run]:
    """The width of a network, how it was trained, how its evidence was measured."""
    told, learned = run.get("config", {}), run.get("reading", {}).get("config", {})
    plain = json.loads(json.dumps([told, learned]))  # as it is read from a file
    told, learned = ({k: v for k, v in part.items() if k not in OWN} for part in plain)
    return run.get("alpha"), told, learned


def _shares(shares: Sequence[Sequence[float]]) -> str:
    """Per cent in free paths, layer by layer: the mean over runs, their range if they differ."""
    cells = []
    for layer in zip(*shares, strict=True):
        least, most = (f"{100 * bound(layer):.0f}" for bound in (min, max))
        cells.append(f"{100 * mean(layer):.0f}" + (f" ({least}-{most})" if least != most else ""))
    return " / ".join(cells)
