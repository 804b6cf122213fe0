"""Show progress in a notebook: one bar below the cell, which goes away at the end."""

import html
import importlib
import sys
import time
from types import TracebackType
from typing import Any, Self

MIN_SECONDS = 0.1
"""Time between two updates of a bar."""
_BAR = (
    '<div style="font-family:system-ui,sans-serif;display:flex;gap:.8em;align-items:center">'
    "<progress {value}></progress><span>{text}</span></div>"
)


def in_notebook() -> bool:
    """Return whether the program runs in the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookBar:
    """A progress bar below the running cell; use it as a context manager."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def update(self, fraction: float | None, text: str) -> None:
        """Show the completed fraction (None if it is unknown) and a text."""
        now = time.monotonic()
        if now - self._shown_at < MIN_SECONDS and fraction != 1:
            return
        self._shown_at = now
        value = "" if fraction is None else f'max="1" value="{fraction:.4f}"'
        self._display(_BAR.format(value=value, text=html.escape(text)))

    def _display(self, text: str) -> None:
        ipython: Any = importlib.import_module("IPython.display")
        if self._handle is None:
            self._handle = ipython.display(ipython.HTML(text), display_id=True)
        else:
            self._handle.update(ipython.HTML(text))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._display("")
