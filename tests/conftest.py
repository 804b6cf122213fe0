"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> Iterator[None]:
    """SIGINT as in a terminal, here and in the processes that tests start.

    A script's `pytest ... &` begins with SIGINT ignored, every process below inherits that, and a
    signal that is ignored stops nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
