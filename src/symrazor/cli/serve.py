"""Define `symrazor serve`; `symrazor.serving` does the work."""

from typing import Annotated

import tyro

from symrazor.cli.run_folder import RunFolder
from symrazor.cli.terminal import OptionalName, load

Port = Annotated[int, tyro.conf.arg(metavar="PORT", help_behavior_hint="(default: a free port)")]


def serve(run: RunFolder, question: OptionalName = None, port: Port = 0) -> None:
    """Try the network of a run in a browser: drop files, or move examples by hand.

    The page is served to this machine only (127.0.0.1), until Ctrl-C.

    Args:
        run: run folder.
        question: name of the question, if the run has several.
        port: port to listen on.
    """
    load("serve_work").serve(run, question, port)
