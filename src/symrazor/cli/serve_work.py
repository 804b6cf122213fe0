"""Run `symrazor serve`."""

from pathlib import Path

from rich.markup import escape

from symrazor.cli.terminal import console
from symrazor.serving import serve as serve_run


def serve(run: Path, question: str | None, port: int) -> None:
    """Serve the page of a run, and print its address."""
    terminal = console()

    def tell(address: str) -> None:
        terminal.print(escape(f"{run}: {address}  (Ctrl-C stops)"), soft_wrap=True, highlight=False)

    try:
        serve_run(run, question, port, tell)
    except KeyboardInterrupt:
        terminal.print()
