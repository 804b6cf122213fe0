"""Run a training: steps, evaluations, progress, events, checkpoints and interruption.

Every training of the library is a `Task`, which supplies `step` and `evaluate`, run by a `Loop`:

    while not task.finished():
        for batch in task.batches():  # one round, for example an epoch
            task.step(batch)
        task.evaluate()               # appends a record to task.history

Between steps, the loop saves checkpoints that are due and stops on SIGINT or SIGTERM. After every
round it updates the progress bar, in a terminal or below the cell of a notebook, and calls the
callbacks.

Budgets of time read `clock`.
"""

import html
import importlib
import logging
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, Self

import torch

from symrazor.accelerate.processes import any_process, is_distributed, world
from symrazor.core.errors import CurvatureError

log = logging.getLogger("symrazor")

Record = dict[str, Any]
"""Figures of one round."""
Callback = Callable[[Record], object]
RECOVERABLE = (FloatingPointError, CurvatureError)
"""Errors that training can recover from."""
STOP_CHECK_INTERVAL = 8
"""Steps between agreements of several processes on whether to stop."""
MIN_BAR_SECONDS = 0.1
"""Seconds between two updates of the bar in a notebook."""
_BAR = (
    '<div style="font-family:system-ui,sans-serif;display:flex;gap:.8em;align-items:center">'
    "<progress {value}></progress><span>{text}</span></div>"
)


class Clock:
    """The time that budgets count: wall time, or the CPU time of this process.

    Inside `cpu_time`, other programs on the machine change nothing about a plan, as long as all
    work is done in one thread of this process. `counting` installs any other clock.
    """

    def __init__(self) -> None:
        self._clocks: list[Callable[[], float]] = []

    def now(self) -> float:
        """Return the time in seconds since an arbitrary origin."""
        return self._clocks[-1]() if self._clocks else time.perf_counter()

    def is_wall_time(self) -> bool:
        """Return whether `now` counts wall time; if not, work in other processes is not seen."""
        return not self._clocks

    @contextmanager
    def counting(self, read: Callable[[], float]) -> Iterator[None]:
        """Make `now` read this clock, and run torch on one thread."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._clocks.append(read)
        try:
            yield
        finally:
            self._clocks.pop()
            torch.set_num_threads(threads)

    def cpu_time(self) -> AbstractContextManager[None]:
        """Make `now` count the CPU time of this process."""
        return self.counting(time.process_time)


clock = Clock()


class Task(ABC):
    """A training in rounds: several steps, then an evaluation.

    Attributes:
        history: one record per round.
        seconds: training time, including the time before an interruption.
    """

    def __init__(self) -> None:
        self.history: list[Record] = []
        self.seconds = 0.0
        self._clock_origin = clock.now()

    @abstractmethod
    def finished(self) -> bool:
        """Return whether the training is complete."""

    @abstractmethod
    def batches(self) -> Iterable[Any]:
        """Yield the batches of the current round that are not done yet."""

    @abstractmethod
    def step(self, batch: Any) -> None:
        """Update the model with one batch."""

    @abstractmethod
    def evaluate(self) -> None:
        """Close the round: append its record to `history`."""

    def recover(self) -> bool:
        """Return to a state from which training can continue after a `RECOVERABLE` error."""
        return False

    def n_confirmed(self) -> int:
        """Return how many records are final; callbacks receive only these."""
        return len(self.history)

    def position(self) -> str:
        """Describe how far the training is, for the message about an interruption."""
        return f"round {len(self.history)}"

    def start_clock(self) -> None:
        """Continue counting from `seconds`."""
        self._clock_origin = clock.now() - self.seconds

    def update_clock(self) -> float:
        """Update and return `seconds`."""
        self.seconds = clock.now() - self._clock_origin
        return self.seconds


def check_callbacks(callbacks: object) -> None:
    """Raise ValueError unless callbacks are a sequence of functions."""
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ValueError(
            f"callbacks must be a list of functions, got {callbacks!r}. Use callbacks=[function]."
        )


class Saver(Protocol):
    """Writes the checkpoints of a task."""

    @property
    def directory(self) -> Path:
        """Directory to resume from."""

    def due(self, round_ended: bool) -> bool:
        """Return whether a checkpoint should be written now."""

    def save(self) -> None:
        """Write a checkpoint of the task."""


@dataclass
class Loop:
    """Run a task until it is finished.

    Args:
        task: the training.
        callbacks: each is called with a copy of every confirmed record. An exception in a callback
            is logged and does not end the run.
        saver: writes checkpoints. With a saver, SIGINT and SIGTERM end the run after a checkpoint.
        n_rounds: length of the progress bar.
        show_progress: whether to show the bar; None: if standard error is a terminal.
    """

    task: Task
    callbacks: Sequence[Callback] = ()
    saver: Saver | None = None
    n_rounds: int = 0
    show_progress: bool | None = False
    n_steps: int = field(default=0, init=False)

    def run(self) -> list[Record]:
        """Run the remaining rounds and return the history.

        SIGINT and SIGTERM raise KeyboardInterrupt and SystemExit, after a checkpoint if there is a
        saver. A divergence from which the task cannot recover raises its error.
        """
        task = self.task
        n_published = task.n_confirmed()
        task.start_clock()
        with (
            Interruption(self.saver is not None) as interruption,
            epoch_bar(self.n_rounds, self.show_progress) as show,
        ):
            while not task.finished():
                try:
                    self._train_round(interruption)
                    task.evaluate()
                except RECOVERABLE:
                    if not task.recover():
                        raise
                show(task.history)
                self._publish(n_published)
                n_published = task.n_confirmed()
                self._save_or_stop(interruption, round_ended=True)
        # A signal may have arrived after the last check.
        self._save_or_stop(interruption, round_ended=False)
        return task.history

    def _train_round(self, interruption: "Interruption") -> None:
        for batch in self.task.batches():
            self.task.step(batch)
            self.task.update_clock()
            self.n_steps += 1
            # An agreement costs a message, so several processes check less often.
            if not is_distributed() or self.n_steps % STOP_CHECK_INTERVAL == 0:
                self._save_or_stop(interruption, round_ended=False)

    def _publish(self, n_published: int) -> None:
        for record in self.task.history[n_published : self.task.n_confirmed()]:
            for callback in self.callbacks:
                try:
                    callback(dict(record))
                except Exception:
                    if getattr(callback, "required", False):
                        raise
                    log.exception("A callback raised an exception; training continues.")

    def _save_or_stop(self, interruption: "Interruption", round_ended: bool) -> None:
        if self.saver is None:
            return
        stop = any_process(interruption.received is not None)
        if stop or self.saver.due(round_ended):
            try:
                self.saver.save()
            except OSError as error:  # a full disk costs the checkpoint, not the run
                log.error("Could not write a checkpoint at %s: %s", self.task.position(), error)
        if not stop:
            return
        if world().is_main:
            received = interruption.received
            log.warning(
                "Stopped by %s after %s. Continue with resume=%r.",
                "another process" if received is None else received.name,
                self.task.position(),
                str(self.saver.directory),
            )
        interruption.leave()


class Interruption:
    """Turn SIGTERM and SIGINT into a flag, `received`, while the context is active.

    Python allows signal handlers in the main thread only; in other threads signals keep their
    effect. A signal that was ignored before stays ignored. A second SIGINT takes effect at once.
    """

    def __init__(self, active: bool = True) -> None:
        self.active = active
        self.received: signal.Signals | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if self.active and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def leave(self) -> NoReturn:
        """End the run as the received signal would; after SIGTERM with exit code 143."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


def in_notebook() -> bool:
    """Return whether the program runs in the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookBar:
    """A progress bar below the running cell; use it as a context manager."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def update(self, fraction: float | None, text: str) -> None:
        """Show the completed fraction (None if it is unknown) and a text."""
        now = time.monotonic()
        if now - self._shown_at < MIN_BAR_SECONDS and fraction != 1:
            return
        self._shown_at = now
        value = "" if fraction is None else f'max="1" value="{fraction:.4f}"'
        self._display(_BAR.format(value=value, text=html.escape(text)))

    def _display(self, text: str) -> None:
        ipython: Any = importlib.import_module("IPython.display")
        if self._handle is None:
            self._handle = ipython.display(ipython.HTML(text), display_id=True)
        else:
            self._handle.update(ipython.HTML(text))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._display("")


@contextmanager
def epoch_bar(epochs: int, enabled: bool | None = None) -> Iterator[Callable[[list[Record]], None]]:
    """Show a bar with epoch and figures; yield a function to call with the history of each epoch.

    Without a value of `enabled`, bars are shown only if standard error is a terminal.
    """
    with _bar(epochs, enabled, "epoch {task.completed}/{task.total}") as update:
        yield lambda history: update(len(history), lambda: _describe(history))


@contextmanager
def fraction_bar(enabled: bool | None = None) -> Iterator[Callable[[float, str], None]]:
    """Show a bar for other work; yield a function of the completed fraction and a description."""
    with _bar(1.0, enabled) as update:
        yield lambda fraction, text: update(fraction, lambda: text)


@contextmanager
def _bar(
    total: float, enabled: bool | None, label: str | None = None
) -> Iterator[Callable[[float, Callable[[], str]], None]]:
    if enabled is not False and in_notebook():
        with NotebookBar() as notebook_bar:
            yield lambda completed, describe: notebook_bar.update(completed / total, describe())
        return
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield lambda completed, describe: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    labels = [] if label is None else [TextColumn(label)]
    columns = (*labels, BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda completed, describe: bar.update(
            task, completed=completed, description=describe()
        )


def _describe(history: list[Record]) -> str:
    """Return the latest figures in one line."""
    parts = [f"nll {history[-1]['nll']:.3f}"]
    measured = [record["per_datum"] for record in history if "per_datum" in record]
    if measured:
        parts.append(f"evidence/n {measured[-1]:.3f}")
    for key in ("test_accuracy", "test_mse"):
        if key in history[-1]:
            parts.append(f"{key.replace('_', ' ')} {history[-1][key]:.4f}")
    return "  ".join(parts)
