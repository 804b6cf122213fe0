"""Ctrl-C while torch loads, by the real command."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from symrazor import startup


@pytest.mark.parametrize(
    ("argv", "original", "command"),
    [
        (["/usr/bin/symrazor", "discover"], ["python", "/usr/bin/symrazor", "discover"], True),
        (["-m", "discover"], ["python", "-m", "symrazor", "discover"], True),
        (["-m"], ["python", "-m", "pytest", "symrazor"], False),
        (["train.py"], ["python", "train.py"], False),
        ([""], ["python"], False),
    ],
)
def test_is_command(
    argv: list[str], original: list[str], command: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert startup.is_command() is command


def test_no_traceback_while_torch_is_loaded(tmp_path: Path) -> None:
    code = [sys.executable, "-m", "symrazor", "discover", "--out", str(tmp_path)]
    with subprocess.Popen(code, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(0.6)  # Python is up, torch is not
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in said
