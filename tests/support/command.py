"""Run the command `symrazor` in a new process; the fixture `call` runs it in this one."""

import subprocess
import sys
from collections.abc import Callable

Process = subprocess.CompletedProcess[str]
Call = Callable[..., Process]


def run_command(*arguments: str) -> Process:
    command = [sys.executable, "-m", "symrazor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
