"""Feed damaged files to every reader, in child processes, and count what must not happen.

An input is a function of the target and its number, so that each failure can be repeated:

    python -m harness.child fuzz TARGET NUMBER 1
"""

import gc
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

from harness.outcome import Outcome, memory_disk

READ_BYTES = 32 << 20
"""The budget of a file, `SYMRAZOR_READ_BYTES`."""
SPARE_BYTES = 96 << 20
"""Address space that a read may take besides the budget: decoders, copies, fragments."""
MAX_SECONDS = 2.0
"""Of CPU time, for one input."""
HANG_SECONDS = 20.0
NAMES = ("fuzzed", "checkpoint", "the state", "the run")
"""What an error may name besides a file: the folder, or the run that is resumed."""

_PROCESS_EVENTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "pty.spawn",
)
_NETWORK_EVENTS = ("socket.connect", "socket.bind", "urllib.Request")
_WRITE_EVENTS = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
)


class Hang(BaseException):
    """Raised in a reader that does not end."""


class PrintedTracebackError(Exception):
    """Takes the place of an error, before which something printed a traceback."""


class Guard:
    """Watch what a reader does besides returning, by an audit hook."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        places = {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *sys.path}
        self.readable = tuple(os.path.realpath(place) for place in places)
        self.seen: list[tuple[str, str]] | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.seen is None:
            return
        if event in _PROCESS_EVENTS or event in _NETWORK_EVENTS or event == "pickle.find_class":
            self.seen.append(("code run", f"{event}{str(args)[:200]}"))
        elif event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(args[0]))
            writes = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            known = path.startswith(self.readable) or path == "/proc/meminfo"
            if not self._is_inside(path) and (writes or not known):
                self.seen.append(("outside", f"open {path}"))
        elif event in _WRITE_EVENTS:
            paths = [os.fspath(a) for a in args if isinstance(a, str | os.PathLike)]
            handle = -1 if event == "os.truncate" else args[-1]  # of an open folder
            place = os.readlink(f"/proc/self/fd/{handle}") if handle >= 0 else ""
            for path in paths:
                if not self._is_inside(os.path.realpath(os.path.join(place, path))):
                    self.seen.append(("outside", f"{event} {path}"))

    def _is_inside(self, path: str) -> bool:
        return path == self.folder or path.startswith(self.folder + "/")

    @contextmanager
    def watching(self) -> Iterator[list[tuple[str, str]]]:
        """Yield the list of violations."""
        self.seen = found = []
        try:
            yield found
        finally:
            self.seen = None


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit the address space to what the process has, plus the budget and some spare."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + READ_BYTES + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def classify(error: BaseException, names: set[str]) -> str | None:
    """Return the kind of failure that an exception is, or None if it is a proper error.

    Proper errors are ValueError itself, a class of symrazor, or an error of the operating system
    with its number; and the message names a file.
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MemoryError) or "allocate memory" in str(chain):
            return "over budget"
        chain = chain.__cause__
    if isinstance(error, Hang):
        return "over 2 s"
    is_ours = type(error) is ValueError or type(error).__module__.startswith("symrazor.")
    is_system = isinstance(error, OSError) and bool(error.errno) and bool(error.filename)
    is_named = any(name.lower() in str(error).lower() for name in names)
    return None if (is_ours and is_named) or is_system else "wrong exception"


class Fuzzer:
    """Feed inputs to one target and count failures."""

    def __init__(self, name: str, place: Path) -> None:
        from harness.samples import TARGETS  # after the environment is set

        self.name, self.folder = name, place / "fuzzed"
        self.folder.mkdir()
        self.guard = Guard(self.folder)
        self.target = TARGETS[name](self.folder)
        for file in self.target.damage:  # valid; also imports all that is imported late
            self.target.read(self.folder, file)
        self.files = {file: (self.folder / file).read_bytes() for file in self.target.damage}
        if self.target.sealed:
            self.files["run/run.json"] = (self.folder / "run" / "run.json").read_bytes()
        self.names = {*NAMES, *(Path(file).name for file in self.files)}
        self.outcome = Outcome()

    def feed(self, number: int) -> None:
        """Write input `number`, read it, count what happens, and restore the files."""
        from harness.stored import reseal

        rng, target = random.Random(f"{self.name} {number}"), self.target
        file = rng.choice(list(target.damage))
        (self.folder / file).write_bytes(target.damage[file](rng, self.files[file]))
        if target.spoil is not None:
            target.spoil(rng, self.folder)
        if target.sealed:
            reseal(self.folder / "run")
        started = time.process_time()
        # In the folder: `shutil.rmtree` opens names relative to open folders.
        with chdir(self.folder), limited_memory(), self.guard.watching() as violations:
            error = self._read(file)
        seconds = time.process_time() - started
        if seconds > MAX_SECONDS:
            violations.append(("over 2 s", f"{seconds:.1f} s"))
        if error is not None:
            kind = classify(error, self.names)
            if kind is not None:
                violations.append((kind, "".join(traceback.format_exception(error))))
        self.outcome.tried += 1
        for kind, text in violations:
            self.outcome.fail(kind, f"{self.name} {number} ({file}): {text}")
        for changed in self.files if target.spoil or target.sealed else [file]:
            (self.folder / changed).write_bytes(self.files[changed])

    def _read(self, file: str) -> BaseException | None:
        """Return the error of the reader."""
        try:
            signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
            with redirect_stderr(io.StringIO()) as printed:
                self.target.read(self.folder, file)
        except (Exception, Hang) as error:
            return error if "Traceback" not in printed.getvalue() else PrintedTracebackError(file)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return None


def attack(name: str, first: int, count: int) -> Outcome:
    """Feed `count` inputs to a target."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, hang)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=memory_disk()) as place:
        fuzzer = Fuzzer(name, Path(place))
        gc.collect()
        gc.freeze()  # the objects of torch: collecting them took half of the time
        for number in range(first, first + count):
            fuzzer.feed(number)
    return fuzzer.outcome


def run_module(module: str, *arguments: str) -> dict[str, Any]:
    """Run the attack of a module in a process of its own, and return its counts.

    A crash is a failure.
    """
    environment = os.environ | {"SYMRAZOR_READ_BYTES": str(READ_BYTES), "OMP_NUM_THREADS": "1"}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the others reserve address space
    command = [sys.executable, "-m", "harness.child", module, *arguments]
    folder = Path(__file__).parents[1]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    text = f"{module} {arguments}: exit {done.returncode}: {done.stderr[-2000:]}"
    return {"tried": 0, "failures": {"crash": 1}, "shown": [text], "cpu": 0.0}
