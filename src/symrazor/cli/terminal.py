"""What the verbs share: where they print, and how."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from symrazor.core.files import write_atomically

JsonFile = Annotated[Path | None, tyro.conf.arg(name="json")]
"""An option `--json FILE`."""


def console(quiet: bool = False) -> Console:
    """Standard output; wide enough for our tables where it is not a terminal."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 140)


def write_json(file: Path | None, value: Any) -> None:
    """A value as a JSON file, if one is asked for."""
    if file is not None:
        write_atomically(file, (json.dumps(value, indent=1, default=str) + "\n").encode())
