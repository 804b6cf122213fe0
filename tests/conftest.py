"""Fixtures and settings of all tests."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from command import Call, Process
from hypothesis import HealthCheck, settings
from work import Work

from symrazor.cli import app
from symrazor.training.loop import clock

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


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a GPU from tests that do not need one: the numbers that they expect are a CPU's."""
    reasons = [str(mark.kwargs.get("reason")) for mark in request.node.iter_markers("skipif")]
    if not any("CUDA device" in reason for reason in reasons):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def work_clock() -> Iterator[Callable[[], float]]:
    """Make budgets count a clock that the operations of torch advance, and return it.

    What has a time limit then does the same on every machine, at any load. On one thread: those of
    others are not counted.
    """
    with Work() as work:
        readings = itertools.count()  # each advances the clock, too: no loop waits for ever

        def now() -> float:
            return 3e-5 * work.operations + 3e-9 * work.numbers + 1e-6 * next(readings)

        with clock.counting(now):
            yield now


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that runs the command in this process, which has already imported torch."""

    def called(*arguments: str) -> Process:
        monkeypatch.setattr(sys, "argv", ["symrazor", *arguments])
        code = 0
        try:
            app.main()
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 0
        text = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, text.out, text.err)

    return called
