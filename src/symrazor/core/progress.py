"""A progress bar on standard error, if there is anybody to see it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Record = dict[str, Any]
Show = Callable[[list[Record]], None]


@contextmanager
def epoch_bar(epochs: int, wanted: bool | None = None) -> Iterator[Show]:
    """A bar with epoch, nll, evidence, test figure and time left; or silence.

    Args:
        epochs: length of the bar.
        wanted: None for "if standard error is a terminal".
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda history: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("epoch {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=epochs)

        def show(history: list[Record]) -> None:
            bar.update(task, completed=len(history), description=_describe(history))

        yield show


@contextmanager
def fraction_bar(wanted: bool | None = None) -> Iterator[Callable[[float, str], None]]:
    """A bar for work without epochs: called with the share that is done and a line; or silence.

    Args:
        wanted: None for "if standard error is a terminal".
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda share, line: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, line: bar.update(task, completed=share, description=line)


def _describe(history: list[Record]) -> str:
    """The latest figures in one line."""
    parts = [f"nll {history[-1]['nll']:.3f}"]
    measured = [record["per_datum"] for record in history if "per_datum" in record]
    if measured:
        parts.append(f"evidence/n {measured[-1]:.3f}")
    for key in ("test_accuracy", "test_mse"):
        if key in history[-1]:
            parts.append(f"{key.replace('_', ' ')} {history[-1][key]:.4f}")
    return "  ".join(parts)
