"""Signals that ask a run to end, turned into a flag that the run looks at between two steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """While entered, SIGTERM and SIGINT set `received` instead of ending the process.

    Only in the main thread, where Python allows handlers; elsewhere signals do what they did. A
    signal that was ignored before stays ignored. A second SIGINT does not wait.

    Args:
        active: False to leave all signals alone.

    Attributes:
        received: the signal, or None.
    """

    def __init__(self, active: bool = True) -> None:
        """Install nothing yet; see the class."""
        self.active = active
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if self.active and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def leave(self) -> NoReturn:
        """End as the signal asked for.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after SIGTERM, with the exit code 143 that a shell expects.
        """
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)
