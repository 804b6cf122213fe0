"""Write files atomically, read JSON within limits, and check that paths are writable."""

import json
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 1 << 28
MAX_JSON_DEPTH = 100
_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the whole new one, never a part.

    Permissions follow the umask. The target of a symbolic link is replaced and the link kept; a
    pipe or a device such as /dev/stdout is written to.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            file.write(content)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path.parent, path.name)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        remove(temporary)
        raise named(error, path) from error
    except BaseException:
        remove(temporary)
        raise


def named(error: OSError, path: Path) -> OSError:
    """Return an error of the operating system that names the file; a full disk names none."""
    return type(error)(error.errno, error.strerror or str(error), str(path))


def temporary_path(folder: Path, name: str) -> Path:
    """Return an unused, hidden name in a folder, for `open("x")` or `mkdir`; see `is_temporary`.

    `tempfile` would create files that nobody else can read; a run on a shared disk is for others,
    too.
    """
    return folder / f".{name}.{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Return whether a name was made by `temporary_path`."""
    return _TEMPORARY.fullmatch(name) is not None


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file or directory to disk; Windows cannot open a directory, and skips it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def parse_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the content of a JSON file; ValueError if it is too large, too deep or not JSON."""
    if file.stat().st_size > max_bytes:
        raise ValueError(f"{file} is larger than {max_bytes:,} bytes.")
    try:
        value = json.loads(file.read_bytes())
        _check_depth(value)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{file} is damaged: {problem}.") from error
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            part
            for whole in level
            if isinstance(whole, dict | list)
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep")


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
