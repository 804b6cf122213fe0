"""Files that are there whole or not at all, and places that can be written to."""

import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, readable by whom the umask lets.

    A link stays and what it points to is replaced; a pipe or a device, as /dev/stdout, is written
    to.

    Raises:
        OSError: the folder cannot be written to.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            file.write(content)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    name = temporary_path(path.parent, f".{path.name}.")
    try:
        with name.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def temporary_path(folder: Path, prefix: str) -> Path:
    """A hidden name in a folder that nothing has yet.

    For `open("x")` and `mkdir`, which leave permissions to the umask; `tempfile` makes things that
    nobody else can read, and a run on a shared disk is there for others.
    """
    return folder / f"{prefix}{secrets.token_hex(8)}"


def check_writable_folder(folder: Path) -> None:
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


def check_writable_file(file: Path | None) -> None:
    """The same for a file, if one is asked for."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"expected a file to write, got the folder {file}; do: name a file in it")
    if not file.exists() or file.is_file():  # else a pipe or a device
        check_writable_folder(file.parent)


def json_ready(value: Any) -> Any:
    """What JSON has a word for: other things by their number or their name."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_ready(part) for part in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return json_ready(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else str(value)
