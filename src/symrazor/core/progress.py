"""Show a progress bar on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Record = dict[str, Any]


@contextmanager
def epoch_bar(epochs: int, enabled: bool | None = None) -> Iterator[Callable[[list[Record]], None]]:
    """Show a bar with epoch, nll, evidence, test score and remaining time.

    Args:
        epochs: number of epochs.
        enabled: None to show it only if standard error is a terminal.

    Yields:
        A function to call with the history after each epoch.
    """
    with _bar(epochs, enabled, "epoch {task.completed}/{task.total}") as update:
        yield lambda history: update(len(history), lambda: _describe(history))


@contextmanager
def fraction_bar(enabled: bool | None = None) -> Iterator[Callable[[float, str], None]]:
    """Show a bar for work without epochs.

    Args:
        enabled: None to show it only if standard error is a terminal.

    Yields:
        A function to call with the completed fraction and a description.
    """
    with _bar(1.0, enabled) as update:
        yield lambda fraction, text: update(fraction, lambda: text)


@contextmanager
def _bar(
    total: float, enabled: bool | None, label: str | None = None
) -> Iterator[Callable[[float, Callable[[], str]], None]]:
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield lambda completed, describe: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    labels = [] if label is None else [TextColumn(label)]
    columns = (*labels, BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda completed, describe: bar.update(
            task, completed=completed, description=describe()
        )


def _describe(history: list[Record]) -> str:
    """Return the latest figures in one line."""
    parts = [f"nll {history[-1]['nll']:.3f}"]
    measured = [record["per_datum"] for record in history if "per_datum" in record]
    if measured:
        parts.append(f"evidence/n {measured[-1]:.3f}")
    for key in ("test_accuracy", "test_mse"):
        if key in history[-1]:
            parts.append(f"{key.replace('_', ' ')} {history[-1][key]:.4f}")
    return "  ".join(parts)
