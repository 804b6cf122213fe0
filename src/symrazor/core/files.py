"""Files that are there whole or not at all, and places that can be written to."""

import os
import secrets
import tempfile
from pathlib import Path


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
    name = unfinished(path.parent, f".{path.name}.")
    try:
        with name.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def unfinished(folder: Path, prefix: str) -> Path:
    """A hidden name in a folder that nothing has yet.

    For `open("x")` and `mkdir`, which leave permissions to the umask; `tempfile` makes things that
    nobody else can read, and a run on a shared disk is there for others.
    """
    return folder / f"{prefix}{secrets.token_hex(8)}"


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
    if not file.exists() or file.is_file():  # else a pipe or a device
        check_folder(file.parent)
