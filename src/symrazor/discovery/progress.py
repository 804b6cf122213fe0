"""Show what `discover` is doing while it runs in a notebook."""

from collections.abc import Iterator
from contextlib import contextmanager

from symrazor.core.notebook import NotebookBar, in_notebook
from symrazor.discovery.question import Step, Tell


def status_of(step: Step) -> str:
    """Return the best network so far and the time that is left."""
    parts = [f"best so far: {step.best}"] if step.best else []
    if step.seconds_left is not None:
        minutes, seconds = divmod(round(step.seconds_left), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return ", ".join(parts)


@contextmanager
def shown(tell: Tell | None, progress: bool | None) -> Iterator[Tell]:
    """Yield the function that takes messages: `tell`, or one that moves a bar in a notebook.

    Args:
        tell: function of the caller; None for a bar in a notebook, and nothing elsewhere.
        progress: False for no bar.
    """
    if tell is not None or progress is False or not in_notebook():
        yield tell or (lambda text: None)
        return
    with NotebookBar() as bar:

        def move(text: str) -> None:
            if isinstance(text, Step):
                status = ", ".join(filter(None, (text.stage, status_of(text))))
                bar.update(text.done / max(1, text.total), status)
            else:
                bar.update(None, text.strip())

        yield move
