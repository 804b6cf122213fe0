"""Write files atomically, lock folders, and read files that may be damaged or too large.

`@reader` marks a function that reads the file or folder in its first argument. Any error in it
becomes a `ValueError` that names the file. `reserve` subtracts from the memory budget of the
outermost reader before memory is allocated: the limit holds for a whole file, not for each of its
arrays.
"""

import errno
import functools
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

from symrazor.core.errors import OtherRunError

try:
    import fcntl
except ModuleNotFoundError:  # Windows: folders are not locked
    fcntl = None  # type: ignore[assignment]

MAX_JSON_BYTES = 1 << 28
MAX_JSON_DEPTH = 100
JSON_EXPANSION = 48
"""Largest memory of a JSON file and its values in Python, in units of the size of the file. Nested
lists `[[[]]]` take 44."""
FREE_SHARE = 4
"""The budget of a file is the free memory divided by this number."""
DEFAULT_FREE_BYTES = 16 << 30
"""Free memory where the operating system does not report it."""
BUDGET_VARIABLE = "SYMRAZOR_READ_BYTES"
"""Environment variable that sets the budget, in bytes."""

LOCK = ".lock"
"""Name of the file that locks a folder. The operating system releases the lock when the process
that holds it ends, however it ends."""
_left: ContextVar[int | None] = ContextVar("left", default=None)
_held: set[Path] = set()
"""Folders that this process has locked."""
_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}")
Source = TypeVar("Source")
P = ParamSpec("P")
R = TypeVar("R")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the whole new one, never a part.

    Permissions follow the umask. The target of a symbolic link is replaced and the link kept; a
    pipe or a device such as /dev/stdout is written to.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        try:
            with path.open("wb") as file:
                file.write(content)
        except OSError as error:
            raise named(error, path) from error
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path.parent, path.name)
    try:
        _remove_abandoned(path)
        with temporary.open("xb") as file:
            _lock(file)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:  # still locked; Windows cannot rename an open file
                os.replace(temporary, path)
        if fcntl is None:
            os.replace(temporary, path)
        flush(path.parent)
    except BaseException as error:
        with suppress(OSError):  # a read-only disk
            remove(temporary)
        if isinstance(error, OSError):
            raise named(error, path) from error
        raise


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of a path that killed processes left behind: those without a lock."""
    names = [name for name in os.listdir(path.parent) if name.startswith(f".{path.name}.")]
    for temporary in (path.parent / name for name in names if is_temporary(name)):
        with suppress(OSError):
            if temporary.is_file() and not temporary.is_symlink():
                with temporary.open("rb") as file:
                    if _lock(file):
                        temporary.unlink()


def _lock(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed; return whether that is possible."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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
    reserve(JSON_EXPANSION * file.stat().st_size, file)
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


def check_writable_folder(folder: Path, file: Path | None = None) -> None:
    """Create a folder; raise ValueError, before a long run starts, if it cannot be written to.

    With a file, the error names the file in place of the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"Cannot write to {file or folder}: {error.strerror}. Choose another folder."
        ) from error


def check_writable_file(file: Path | None) -> None:
    """Raise ValueError if a path is a folder, or its folder cannot be written to."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"{file} is a folder. Give the name of a file in it.")
    if not file.exists() or file.is_file():  # pipes and devices are not checked
        check_writable_folder(file.parent, file)


def free_bytes() -> int:
    """Return the memory that can be allocated without swapping."""
    try:
        with open("/proc/meminfo", "rb") as file:
            lines = (line.split() for line in file)
            return next(int(line[1]) * 1024 for line in lines if line[0] == b"MemAvailable:")
    except (OSError, StopIteration, ValueError):
        return DEFAULT_FREE_BYTES


def budget() -> int:
    """Return the memory that one file may take, in bytes."""
    text = os.environ.get(BUDGET_VARIABLE)
    if text is None:
        return free_bytes() // FREE_SHARE
    if not text.isdecimal():
        raise ValueError(f"{BUDGET_VARIABLE} must be a number of bytes, got {text!r}.")
    return int(text)


def reserve(n_bytes: int, path: object) -> None:
    """Subtract memory from the budget of the current file; ValueError if too little is left.

    This has no effect outside of a reader: data in memory have no budget.
    """
    left = _left.get()
    if left is None:
        return
    if n_bytes > left:
        raise ValueError(
            f"{path} needs {n_bytes / 2**30:,.2f} GiB of memory, more than the "
            f"{left / 2**30:,.2f} GiB that are left for this file (a quarter of the free memory). "
            f"Use a part of the data, or set {BUDGET_VARIABLE}."
        )
    _left.set(left - n_bytes)


def is_system_error(error: Exception) -> bool:
    """Return whether the operating system could not open or use a file that the error names.

    Damaged files cause other errors of the system, such as a seek to a negative position.
    """
    return isinstance(error, OSError) and bool(error.errno) and error.filename is not None


def refuse_pipe(path: Path) -> None:
    """Raise ValueError for a pipe, a socket or a device: reading it may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is a pipe or a device, not a file. Remove it, or copy it.")


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Turn all errors into a ValueError that names the path; start a memory budget if needed.

    Errors of the operating system that name a file, missing packages and `OtherRunError` stay as
    they are.
    """
    token = _left.set(budget()) if _left.get() is None else None
    try:
        if isinstance(path, Path | str):
            refuse_pipe(Path(path))
        yield
    except (ModuleNotFoundError, OtherRunError):
        raise
    except Exception as error:
        if is_system_error(error):
            raise
        is_ours = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
        if is_ours and Path(str(path)).name in str(error):
            raise
        raise ValueError(f"Cannot read {path}: {_describe(error)}.") from error
    finally:
        if token is not None:
            _left.reset(token)


def reader(
    function: Callable[Concatenate[Source, P], R],
) -> Callable[Concatenate[Source, P], R]:
    """Run a function that reads a file within `reading`; the file is its first argument."""

    @functools.wraps(function)
    def read(path: Source, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with reading(path):
            return function(path, *args, **kwargs)

    return read


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    text = str(error).strip().rstrip(".").splitlines()[:1]
    message = text[0][:300] if text else "damaged"
    return message if isinstance(error, ValueError) else f"{type(error).__name__}: {message}"


def is_locked_here(folder: Path) -> bool:
    """Return whether this process holds the lock of a folder."""
    return folder.resolve() in _held


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; ValueError that names the process which has it."""
    path, key = folder / LOCK, folder.resolve()
    handle = _acquire(path)
    _held.add(key)
    try:
        text = json.dumps({"host": socket.gethostname(), "process": os.getpid()})
        try:
            os.truncate(handle, 0)
            os.pwrite(handle, text.encode(), 0)
        except OSError as error:
            raise named(error, path) from error
        yield
    finally:
        _held.discard(key)
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _acquire(path: Path) -> int:
    """Return the handle of a locked file that still has its name."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link. Remove it.")
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ValueError(
                f"Cannot write to {path.parent}: {error.strerror}. Use another --out."
            ) from error
        if fcntl is None:
            return handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                holder = json.loads(os.read(handle, 1000))
                name = f"process {int(holder['process'])} on {str(holder['host'])[:80]}"
            except (ValueError, KeyError, TypeError):  # the holder has not written its name yet
                name = "another process"
            os.close(handle)
            raise ValueError(
                f"{path.parent} is in use: {name} is writing to it. Wait until it ends, or use "
                "another --out."
            ) from None
        except OSError:  # a file system without locks
            return handle
        if os.fstat(handle).st_nlink > 1:  # a hard link; the content of a lock is overwritten
            os.close(handle)
            raise ValueError(f"{path} is a link. Remove it.")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # its last holder removed the file in the meantime
