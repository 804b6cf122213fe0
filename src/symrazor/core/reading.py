"""Read files of strangers: one kind of error, and one memory budget for each file.

`@reader` marks a function that reads the file or folder in its first argument. Whatever goes wrong
in it becomes a `ValueError` that names the file. `reserve` subtracts from the budget of the
outermost reader before memory is allocated, so that the limit holds for a file and not for each of
its arrays.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

FREE_SHARE = 4
"""A file may take one part in so many of the free memory."""
DEFAULT_FREE_BYTES = 16 << 30
"""Free memory where the operating system does not report it."""
BUDGET_VARIABLE = "SYMRAZOR_READ_BYTES"
"""Environment variable that sets the budget, in bytes."""

_left: ContextVar[int | None] = ContextVar("left", default=None)
Source = TypeVar("Source")
P = ParamSpec("P")
R = TypeVar("R")


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
    """Subtract memory from the budget of the current file; ValueError if too little is left."""
    left = _left.get()
    left = budget() if left is None else left
    if n_bytes > left:
        raise ValueError(
            f"{path} needs {n_bytes / 2**30:,.2f} GiB of memory, more than the "
            f"{left / 2**30:,.2f} GiB that are left for this file (a quarter of the free memory). "
            f"Use a part of the data, or set {BUDGET_VARIABLE}."
        )
    if _left.get() is not None:
        _left.set(left - n_bytes)


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Turn all errors into a ValueError that names the path; start a memory budget if needed.

    Errors of the operating system and missing packages stay as they are.
    """
    token = _left.set(budget()) if _left.get() is None else None
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
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
