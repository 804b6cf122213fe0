"""Let Ctrl-C end the `symrazor` command at once, without a traceback, while torch is loading.

The package imports this module before all others. It changes nothing in other programs.
"""

import signal
import sys
import threading
from itertools import pairwise
from pathlib import Path


def is_command() -> bool:
    """Return whether this process is `symrazor` or `python -m symrazor`."""
    if sys.argv[:1] == ["-m"]:  # the package is imported before its module __main__
        return ("-m", "symrazor") in pairwise(sys.orig_argv)
    return Path(*sys.argv[:1]).name in ("symrazor", "symrazor.exe")


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the command at once, as shells expect."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    has_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if in_main_thread and is_command() and has_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, which the command handles."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


exit_on_interrupt()
