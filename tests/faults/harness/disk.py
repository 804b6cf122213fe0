"""Failing file operations, a full disk, folders that cannot be written, two writers."""

import errno
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.contents import contents
from harness.kills import CASES, Attack, Operations, run_forked, wait
from harness.outcome import Outcome

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
FILE_SIZES = (0, 100, 1_000, 4_000, 10_000, 40_000)
"""Largest size of a file, in bytes, as on a disk with so much room."""
NOBODY = 65_534


def attack(name: str, every: int = 1) -> Outcome:
    """Let every operation of a case fail, then limit file sizes; then take the right to write."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        attempts = Attack(CASES[name], Path(place) / "disk")
        for number in range(1, attempts.n_operations + 1, every):
            code = ERRORS[number % len(ERRORS)]
            _attempt(attempts, f"{name}, operation {number}: {os.strerror(code)}", number, code)
        for size in FILE_SIZES:
            _attempt(attempts, f"{name}, files of {size} bytes", prepare=_limit(size))
        if os.getuid() == 0:
            _attempt(attempts, f"{name}, no permission", prepare=lambda: os.setuid(NOBODY))
        _two_writers(attempts)
    return attempts.outcome


def _attempt(
    attempts: Attack,
    label: str,
    number: int = 0,
    code: int = 0,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Run a case with a fault; it must end with one line or survive, and succeed without it."""

    def fail(path: str) -> None:
        raise OSError(code, os.strerror(code), path)

    folder = attempts.copy()
    attempts.outcome.tried += 1
    operations = Operations(folder, number, fail)
    status = wait(run_forked(folder, attempts.case.command, operations, prepare))
    text = attempts.output()
    last = text.splitlines()[-1] if text else ""
    is_one_line = last.startswith("symrazor: ") and text.count("symrazor: ") == 1
    if "Traceback" in text or status not in (0, 2) or (status == 2 and not is_one_line):
        attempts.outcome.fail("wrong exception", f"{label}: {status} {text}")
    elif status == 2 and attempts.case.out not in last:
        attempts.outcome.fail("wrong exception", f"{label}: names no file: {text}")
    try:
        contents(folder)
    except Exception as error:
        attempts.outcome.fail("half-written", f"{label}: {error!r}")
    attempts.finish(folder, label, attempts.new_report if status == 0 else None)


def _limit(size: int) -> Callable[[], None]:
    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return prepare


def _two_writers(attempts: Attack) -> None:
    """Start the same command twice: one writes, the other one refuses."""
    folder = attempts.copy()
    attempts.outcome.tried += 1
    pids = [run_forked(folder, attempts.case.command, rank=rank) for rank in range(2)]
    codes = sorted(wait(pid) for pid in pids)
    texts = [attempts.output(rank) for rank in range(2)]
    refusals = ("is in use", "already has a finished run", "already has an unfinished run")
    is_refused = any(word in text for word in refusals for text in texts)
    if codes[0] != 0 or any("Traceback" in text for text in texts):
        attempts.outcome.fail("wrong exception", f"two writers: {codes} {texts}")
    elif codes[1] != 0 and not is_refused:
        attempts.outcome.fail("wrong exception", f"two writers: {codes} {texts}")
    else:
        attempts.finish(folder, "two writers", attempts.new_report)
