"""What holds for all tests."""

import signal
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes says what else the machine is doing; a test that hangs is stopped by
# pytest's timeout.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


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


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For what has minutes: those that this process works, whatever else the machine does.

    On one thread: of several, those that wait for one without a core count as working.
    """
    for clock in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, time.process_time)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
