"""Ctrl-C while torch loads, by the real command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from symrazor.core import startup


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


HOOK = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
"""


@pytest.mark.parametrize("name", ["torch", "torch.nn", "symrazor.cli.app"])
def test_no_traceback_while_torch_is_loaded(name: str, tmp_path: Path) -> None:
    """The signal comes as a module is looked for: at the start of torch, in it, and after it."""
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(name=name))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code = [sys.executable, "-m", "symrazor", "discover", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(code, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""
