"""Store results of experiments in JSON files that several runs share, and print them as tables."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from symrazor.core.files import check_writable_file, write_atomically
from symrazor.experiments.options import OfTable

Run = dict[str, Any]
"""One training run: "row", "seed", "small", its figures or "error", and its reading."""

Document = Callable[[list[Run]], Mapping[str, Any]]
"""Function from all runs to further entries of their file."""

SCHEMA = 1
IDENTITY = {"row": str, "seed": int, "small": bool}
"""Keys that identify a run, with their types."""
VARIABLE_OPTIONS = ("seed", "device")
"""Options in which runs of the same row may differ."""
FIGURES = ("accuracy", "nll", "evidence", "free_shares", "seconds", "reading")
"""Keys of a run that did not diverge."""


def read_runs(experiment: str, file: Path) -> list[Run]:
    """Return all runs in a file; an empty list if the file does not exist.

    Raises:
        ValueError: The file holds something else.
    """
    if not file.exists():
        return []
    try:
        document = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} has no results of {experiment}: {error}") from error
    content = document.get("experiment") if isinstance(document, dict) else type(document)
    if content != experiment:
        raise ValueError(f"{file} has results of {content!r}, not of {experiment}.")
    if (schema := document.get("schema", SCHEMA)) != SCHEMA:
        raise ValueError(
            f"{file} has schema {schema}; this version reads {SCHEMA}. Use a newer version."
        )
    runs: list[Any] = document.get("runs", [])
    if not isinstance(runs, list):
        kind = type(runs).__name__
        raise ValueError(
            f"{file} is damaged: its runs are a {kind}, not a list. Choose another file."
        )
    for run in runs:
        entries = run if isinstance(run, dict) else {}
        if not all(isinstance(entries.get(key), kind) for key, kind in IDENTITY.items()):
            content = sorted(run)[:8] if isinstance(run, dict) else repr(run)[:40]
            raise ValueError(
                f"{file} is damaged: a run needs row, seed and small, but one has {content}. "
                "Choose another file."
            )
    return runs


def check_figures(runs: Sequence[Run]) -> None:
    """Check that every run has either an error or all figures of a table.

    Raises:
        ValueError: A run is incomplete; the message names it.
    """
    for run in runs:
        required = ("epochs",) if "error" in run else ("epochs", *FIGURES)
        missing = [name for name in required if name not in run]
        if missing:
            raise ValueError(
                f"The run of row {run['row']}, seed {run['seed']} lacks {', '.join(missing)}. "
                "Remove it from its file."
            )


def merged(old: Sequence[Run], new: Sequence[Run]) -> list[Run]:
    """Merge runs; a new run replaces an old one with the same row, seed and size."""
    by_key = {(run["small"], run["row"], run["seed"]): run for run in (*old, *new)}
    return [by_key[key] for key in sorted(by_key)]


def add_runs(
    experiment: str, file: Path, new: Sequence[Run], also: Document = lambda runs: {}
) -> list[Run]:
    """Merge runs into a file. The file is always complete, and several processes may write to it.

    Args:
        experiment: Name of the experiment.
        file: Created if it does not exist.
        new: Runs; each replaces an old one with the same row, seed and size.
        also: Function from all runs to further entries of the file.

    Returns:
        All runs in the file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.parent):
        runs = merged(read_runs(experiment, file), new)
        document = {"experiment": experiment, "schema": SCHEMA, "runs": runs, **also(runs)}
        write_atomically(file, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    return runs


def gather(
    experiment: str,
    file: Path | None,
    jobs: Iterable[Callable[[], Run]],
    runs: Sequence[Run] = (),
    also: Document = lambda runs: {},
) -> list[Run]:
    """Run jobs one after the other and save each result as soon as it is available.

    The file is checked before the first job: no result is lost to a path that cannot be written.

    Args:
        experiment: Name of the experiment.
        file: File for the results; None to save nothing.
        jobs: Functions that return one run each.
        runs: Earlier runs to add to the file.
        also: As in `add_runs`.

    Returns:
        All runs: new, earlier, and from the file.
    """
    check_writable_file(file)

    def add(old: Sequence[Run], new: Sequence[Run]) -> list[Run]:
        return merged(old, new if file is None else add_runs(experiment, file, new, also))

    runs = add([], runs)
    for job in jobs:
        runs = add(runs, [job()])
    return runs


def run_rows(
    experiment: str,
    options: OfTable,
    rows: Iterable[str],
    run_row: Callable[[str, int, Any], Run],
) -> list[Run]:
    """Train the requested rows for every seed; return these runs and those in the file.

    A run that diverges is saved with its error, and is not returned.

    Args:
        experiment: Name of the experiment.
        options: Options of the experiment.
        rows: All rows.
        run_row: Function from row, seed and options to the figures of a run.

    Raises:
        ValueError: A pattern matches no row.
    """

    def run_one(row: str, seed: int) -> Run:
        identity: Run = {"row": row, "seed": seed, "small": options.small}
        try:
            return identity | run_row(row, seed, options)
        except FloatingPointError as error:
            return identity | {"error": str(error)}

    chosen = options.choose(rows)
    jobs = [partial(run_one, row, seed) for seed in options.seed for row in chosen]
    runs = gather(experiment, options.json, jobs)
    return [run for run in runs if run["small"] == options.small and "error" not in run]


def write_json(file: Path | None, document: Any) -> None:
    """Write a document as JSON, unless the file is None."""
    if file is not None:
        write_atomically(file, (json.dumps(document, indent=1) + "\n").encode())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder while writing, if the system supports it."""
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


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows of cells as a markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)])


def markdown(runs: Sequence[Run], paper: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table: mean and standard deviation over seeds, and the paper's figures.

    Args:
        runs: Runs of one size. A row whose runs were trained with different settings says so.
        paper: Row -> its figures "accuracy" (per cent), "nll", "evidence" (-log evidence / N), in
            the order of the table.
    """
    head = ["row", "accuracy %", "paper", "NLL", "paper", "-log ev/N", "paper"]
    head += ["free share by layer %", "epochs", "seconds", "seeds"]
    rows = []
    for row, figures in paper.items():
        row_runs = [run for run in runs if run["row"] == row]
        finished = [run for run in row_runs if "error" not in run]
        if not row_runs:
            continue
        cells = [row]
        for key, digits in (("accuracy", 2), ("nll", 3), ("evidence", 3)):
            values = [run[key] for run in finished]
            cells.append(_spread(values, digits) if values else "diverged")
            cells.append(f"{figures[key]:.{digits}f}" if key in figures else "")
        cells.append(_shares([run["free_shares"] for run in finished]))
        cells.append(_spread([run["epochs"] for run in row_runs], 0))
        cells.append(_spread([run["seconds"] for run in finished], 0) if finished else "")
        diverged = len(row_runs) - len(finished)
        failed = f", {diverged} diverged" if diverged else ""
        settings = len(_settings(row_runs))
        mixed = f", of {settings} settings" if settings > 1 else ""
        cells.append(f"{len(row_runs)}{failed}{mixed}")
        rows.append(cells)
    return table(head, rows)


def _spread(values: Sequence[float], digits: int) -> str:
    """Format the mean, with the standard deviation if there are several values."""
    text = f"{mean(values):.{digits}f}"
    return text if len(set(values)) < 2 else f"{text} ± {stdev(values):.{digits}f}"


def _settings(runs: Sequence[Run]) -> list[tuple[Any, Run, Run]]:
    """Return the different settings that runs were trained with, ignoring seeds and devices.

    The options of the evidence are in the reading, which a diverged run does not have. Two runs
    differ only in options that both have.
    """
    settings_seen: list[tuple[Any, Run, Run]] = []
    for run in sorted(runs, key=lambda run: "reading" not in run):
        setting = _setting(run)
        learned = setting[2]
        variants = (seen for seen in settings_seen if seen[:2] == setting[:2])
        if not any(all(of[k] == learned[k] for k in of.keys() & learned) for *_, of in variants):
            settings_seen.append(setting)
    return settings_seen


def _setting(run: Run) -> tuple[Any, Run, Run]:
    """Return the width of the network, the training options and the options of the evidence."""
    training, learned = run.get("config", {}), run.get("reading", {}).get("config", {})
    plain = json.loads(json.dumps([training, learned]))  # as it is read from a file
    training, learned = (
        {k: v for k, v in part.items() if k not in VARIABLE_OPTIONS} for part in plain
    )
    return run.get("alpha"), training, learned


def _shares(shares: Sequence[Sequence[float]]) -> str:
    """Format the share of free paths by layer: mean over runs, with the range."""
    cells = []
    for layer in zip(*shares, strict=True):
        low, high = (f"{100 * bound(layer):.0f}" for bound in (min, max))
        cells.append(f"{100 * mean(layer):.0f}" + (f" ({low}-{high})" if low != high else ""))
    return " / ".join(cells)
