"""Show what a long command is doing: a bar in a terminal, one line per stage elsewhere."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from symrazor.core.text import printable
from symrazor.discovery.question import Step


class Display:
    """Print the progress messages of `discover`.

    Args:
        console: where to print. In a terminal, a bar shows the current stage, the best network so
            far and the remaining time; elsewhere each stage is one line.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stage = ""
        self.bar: Progress | None = None

    def tell(self, text: str) -> None:
        """Print a message, or show a step."""
        if not isinstance(text, Step):
            self.stop()
            self._print(text)
            return
        if text.stage != self.stage:
            self.stop()
            self.stage = text.stage
            if not self.console.is_terminal:
                self._print(f"  {text.stage}")
        if self.console.is_terminal and not self.console.quiet:
            self._move(text)

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.stage = None, ""

    def _move(self, step: Step) -> None:
        if self.bar is None:
            columns = (TextColumn("  {task.description}"), BarColumn(20), MofNCompleteColumn())
            status = TextColumn("{task.fields[status]}")
            self.bar = Progress(
                *columns, TimeElapsedColumn(), status, console=self.console, transient=True
            )
            self.bar.add_task("", total=None, status="")
            self.bar.start()
        self.bar.update(
            self.bar.task_ids[0],
            description=escape(printable(step.stage)),
            completed=step.done,
            total=step.total,
            status=escape(printable(step.status)),
        )

    def _print(self, text: str) -> None:
        self.console.print(escape(printable(text)), soft_wrap=True, highlight=False)

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
