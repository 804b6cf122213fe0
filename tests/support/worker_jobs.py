"""Jobs for worker processes, which import them by name."""

import os
import time
from typing import Any


def multiply(shared: Any, job: Any) -> tuple[Any, int]:
    """Return the product and the process that computed it."""
    return shared * job, os.getpid()


def end_process(shared: Any, job: int) -> None:
    """End the process by a signal."""
    os.kill(os.getpid(), job)
    time.sleep(60)


def wait_for_parent_signal(shared: Any, job: float) -> None:
    """Wait; the parent ends the process meanwhile."""
    time.sleep(job)
