"""Write files atomically, and check that paths are writable."""

import os
import secrets
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the whole new one, never a part.

    Permissions follow the umask. The target of a symbolic link is replaced and the link kept; a
    pipe or a device such as /dev/stdout is written to.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            file.write(content)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path.parent, f".{path.name}.")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_path(folder: Path, prefix: str) -> Path:
    """Return an unused name in a folder, for `open("x")` or `mkdir`.

    `tempfile` would create files that nobody else can read; a run on a shared disk is for others,
    too.
    """
    return folder / f"{prefix}{secrets.token_hex(8)}"


def check_writable_folder(folder: Path) -> None:
    """Create a folder; raise ValueError, before a long run starts, if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"Cannot write to {folder}: {error.strerror}. Choose another folder."
        ) from error


def check_writable_file(file: Path | None) -> None:
    """Raise ValueError if a path is a folder, or its folder cannot be written to."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"{file} is a folder. Give the name of a file in it.")
    if not file.exists() or file.is_file():  # pipes and devices are not checked
        check_writable_folder(file.parent)
