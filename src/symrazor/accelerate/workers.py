"""Run independent jobs in worker processes, one CPU thread each.

Small networks leave most of a second thread idle, so several trainings side by side are faster than
one training on all threads. A worker is a Python interpreter that imports this package, not the
main script of the user: scripts need no `if __name__ == "__main__"` guard. It has the module search
path of this process. Jobs and results are pickled and sent through pipes; no file is involved.

    with Workers(count=2, shared=data) as workers:
        for index, result in workers.run(train, jobs):
            ...

`train(shared, job)` must be a function of an imported module.
"""

import io
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from types import TracebackType
from typing import Any, BinaryIO

import torch

from symrazor.accelerate.devices import Job, Result, run_in_turn

POLL_SECONDS = 0.2
"""Interval at which the main process checks whether it should stop."""
STOP_SECONDS = 30.0
"""Time that workers get to write a checkpoint before they are killed."""
_HEADER = struct.Struct(">Q")
_COMMAND = "from symrazor.accelerate.workers import serve; serve()"


class WorkerError(ChildProcessError):
    """A worker process ended unexpectedly."""


class Workers:
    """A pool of worker processes.

    With one worker, or if the jobs cannot be pickled, jobs run in the calling process.

    Args:
        count: number of processes; 1 for none.
        shared: first argument of every job, sent once to each process.
    """

    def __init__(self, count: int, shared: Any) -> None:
        self.shared = shared
        self.processes: list[subprocess.Popen[bytes]] = []
        message = _dump(shared) if count > 1 else None
        if message is not None:
            self.processes = [_start() for _ in range(count)]
        self._message = message
        self._initialised: set[int] = set()

    @property
    def count(self) -> int:
        """Number of jobs that run at the same time."""
        return max(1, len(self.processes))

    def run(
        self,
        function: Callable[[Any, Job], Result],
        jobs: Sequence[Job],
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of each job, in the order in which they end.

        Args:
            function: called with the shared object and a job.
            jobs: the jobs; the first are started first.
            stopped: polled while jobs run; True stops the workers and raises KeyboardInterrupt.

        Raises:
            WorkerError: a worker process ended unexpectedly.
            Exception: what a job raised.
        """
        messages = [_dump((function, job)) for job in jobs] if self.processes else []
        if not self.processes or None in messages:
            yield from run_in_turn(partial(function, self.shared), jobs, stopped)
            return
        waiting: Queue[int] = Queue()
        done: Queue[tuple[int, Any, BaseException | None]] = Queue()
        for index in range(len(jobs)):
            waiting.put(index)
        for process in self.processes[: len(jobs)]:
            arguments = (process, messages, waiting, done)
            threading.Thread(target=self._send_jobs, args=arguments, daemon=True).start()
        remaining = len(jobs)
        try:
            while remaining:
                if stopped():
                    raise KeyboardInterrupt
                with suppress(Empty):
                    index, result, error = done.get(timeout=POLL_SECONDS)
                    if error is not None:
                        raise error
                    remaining -= 1
                    yield index, result
        except BaseException:
            self.close(STOP_SECONDS)
            raise

    def _send_jobs(
        self,
        process: "subprocess.Popen[bytes]",
        messages: list[bytes],
        waiting: "Queue[int]",
        done: "Queue[tuple[int, Any, BaseException | None]]",
    ) -> None:
        """Send jobs to one process until none is waiting."""
        assert process.stdin is not None and process.stdout is not None
        index = -1
        try:
            if process.pid not in self._initialised:
                self._initialised.add(process.pid)
                _send(process.stdin, self._message or b"")
            while True:
                index = waiting.get_nowait()
                _send(process.stdin, messages[index])
                result, error = pickle.loads(_receive(process.stdout))
                done.put((index, result, error))
        except Empty:
            return
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            code = process.wait()
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            message = (
                f"A worker process ended unexpectedly ({reason}), possibly for lack of memory. Set "
                "OMP_NUM_THREADS=1 to train in one process."
            )
            failure = WorkerError(message)
            failure.__cause__ = error
            done.put((index, None, failure))

    def close(self, seconds: float = 0.0) -> None:
        """Stop the processes; after `seconds`, kill those that still run."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
        self.processes = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(0.0 if error is None else STOP_SECONDS)


def _start() -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(part) for part in sys.path),
    }
    # In a session of its own, Ctrl-C reaches only the main process, which then stops the workers.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def _dump(value: object) -> bytes | None:
    """Return the pickle of a value; None if a worker could not load it."""
    try:
        message = pickle.dumps(value)
    except Exception:
        return None
    return None if b"__main__" in message else message


def _send(stream: BinaryIO | Any, message: bytes) -> None:
    stream.write(_HEADER.pack(len(message)))
    stream.write(message)
    stream.flush()


def _receive(stream: BinaryIO | Any) -> bytes:
    (size,) = _HEADER.unpack(_read(stream, _HEADER.size))
    return _read(stream, size)


def _read(stream: BinaryIO | Any, size: int) -> bytes:
    data: bytes = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """Run jobs from standard input until it ends; the main function of a worker process."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a job prints must not mix with the replies
    _exit_with_parent()
    torch.set_num_threads(1)
    with suppress(EOFError):
        shared = pickle.loads(_receive(requests))
        while True:
            function, job = pickle.loads(_receive(requests))
            _send(replies, _reply(function, shared, job))


def _reply(function: Callable[[Any, Any], Any], shared: Any, job: Any) -> bytes:
    try:
        return pickle.dumps((function(shared, job), None))
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception with arguments of its own
            error = RuntimeError(f"{type(error).__name__}: {error}")
        buffer = io.BytesIO()
        pickle.dump((None, error), buffer)
        return buffer.getvalue()


def _exit_with_parent() -> None:
    """Exit soon after the main process has ended, so that no worker writes to its files."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
