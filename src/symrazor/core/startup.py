"""Ctrl-C while the command loads torch: it ends at once, as shells expect, without a traceback.

This comes before all other imports of the package. In a program of somebody else nothing happens.
"""

import signal
import sys
import threading
from itertools import pairwise
from pathlib import Path


def is_command() -> bool:
    """Whether this process is `symrazor` or `python -m symrazor`."""
    if sys.argv[:1] == ["-m"]:  # the package is loaded before its module __main__
        return ("-m", "symrazor") in pairwise(sys.orig_argv)
    return Path(*sys.argv[:1]).name in ("symrazor", "symrazor.exe")


def loading() -> None:
    """Let Ctrl-C end the command at once."""
    here = threading.current_thread() is threading.main_thread()
    if here and is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def loaded() -> None:
    """From now on Ctrl-C is an exception again, which the command explains."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


loading()
