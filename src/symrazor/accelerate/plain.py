"""Switch all accelerations off: no threads, no CUDA graphs, no batched GPU solvers.

    with plain_execution():
        razor.evidence(loader)

The results are the same up to rounding. Use it to locate the cause of a difference.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PLAIN = ContextVar("symrazor_plain", default=False)


@contextmanager
def plain_execution() -> Iterator[None]:
    """Run one operation after the other in the calling thread."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def is_plain() -> bool:
    """Return whether accelerations are switched off."""
    return _PLAIN.get()
