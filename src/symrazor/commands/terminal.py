"""What the verbs share: where they print, and how."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from symrazor.files import write_atomically

JsonFile = Annotated[Path | None, tyro.conf.arg(name="json")]
"""An option `--json FILE`."""


def console(quiet: bool = False) -> Console:
    """Standard output; wide enough for our tables where it is not a terminal."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 140)


def check_folder(folder: Path) -> None:
    """Make a folder to write to, and try it: before the work, which must not be lost to a bad path.

    Raises:
        ValueError: it cannot be made, or not written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"{folder}: {error.strerror}"
        raise ValueError(f"expected a folder to write to, got {why}; do: choose another") from error


def check_file(file: Path | None) -> None:
    """The same for a file, if one is asked for."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"expected a file to write, got the folder {file}; do: name a file in it")
    check_folder(file.parent)


def write_json(file: Path | None, value: Any) -> None:
    """A value as a JSON file, if one is asked for."""
    if file is not None:
        write_atomically(file, (json.dumps(value, indent=1, default=str) + "\n").encode())
