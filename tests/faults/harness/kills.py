"""Kill the command before each file operation and at random times, run it again, compare files.

Each attempt runs in a forked child of a process that has run the command once: importing torch and
filling its caches takes longer than a small training. The child counts its file operations by an
audit hook and sends itself SIGKILL before the k-th one.
"""

import fcntl
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.contents import contents, without_times
from harness.outcome import Outcome, memory_disk
from harness.samples import TABLES
from harness.target import RUN_FILE
from symrazor.cli import app
from symrazor.core.files import is_temporary

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")
MAX_SECONDS = 600.0
"""A child that takes longer has hung."""
PIPE_BYTES = 1 << 20
_outputs: dict[int, tuple[int, Path]] = {}
"""Child -> end of the pipe with its output, and the file for it."""


@dataclass(frozen=True)
class Case:
    """A command that is killed.

    Args:
        name: name in the table.
        command: its arguments; it writes to `run`, or reads it.
        before: commands that are run before it.
        inputs: writes the input files to a folder.
        processes: how many run it together, as torchrun starts them.
        check: a command that reads what was written.
    """

    name: str
    command: Sequence[str]
    inputs: Callable[[Path], None]
    before: Sequence[Sequence[str]] = ()
    processes: int = 1
    check: Sequence[str] = ("report", "run", "--json", "report.json", "--out", "r.html")

    @property
    def out(self) -> str:
        """What the command writes, as errors must name it."""
        after = dict(itertools.pairwise(self.command))
        return after.get("--out", "run")


def _fit_inputs(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN_FILE.replace("epochs = 1", "epochs = 2"))
    (folder / "other.toml").write_text(RUN_FILE.replace("limit = 40", "limit = 60"))


def _arrays(*shape: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        x = np.random.default_rng(0).standard_normal((40, *shape)).astype(np.float32)
        np.savez(folder / "data.npz", x=x, y=np.arange(40) % 2)

    return write


def _table(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "data.csv").write_text(TABLES[name]) and None


def _motion(trajectories: int, largest: float) -> Callable[[Path], None]:
    """Write oscillations of sizes from 1 to the largest."""

    def write(folder: Path) -> None:
        times = np.arange(12) * 0.5
        phase = np.random.default_rng(0).uniform(0, 6, (trajectories, 1)) + times
        size = np.linspace(1, largest, trajectories)[:, None]
        states = np.stack([size * np.sin(phase), size * np.cos(phase)], -1)
        np.savez(folder / "t.npz", states=states, times=times)

    return write


_DISCOVER = ("--epochs", "1", "--out", "run", "--quiet", "--no-invariances")
_ONE_START = (*_DISCOVER, "--starts", "1")
_TRAJECTORIES = ("--epochs", "2", "--out", "run", "--quiet")
_FIT = ("fit", "run.toml", "--out", "run", "--quiet")
CASES = {
    case.name: case
    for case in (
        Case("fit", _FIT, _fit_inputs),
        Case(
            "fit over another run",
            ("fit", "other.toml", "--out", "run", "--quiet", "--overwrite"),
            _fit_inputs,
            before=[_FIT],
        ),
        Case("discover vectors", ("discover", "data.npz", *_DISCOVER), _arrays(3)),
        Case("discover images", ("discover", "data.npz", *_ONE_START), _arrays(1, 8, 8)),
        Case("discover series", ("discover", "data.csv", *_ONE_START), _table("series")),
        Case("discover sets", ("discover", "data.csv", *_ONE_START), _table("sets")),
        Case("discover volumes", ("discover", "data.npz", *_ONE_START), _arrays(1, 6, 6, 6)),
        Case("trajectories", ("discover", "t.npz", *_TRAJECTORIES), _motion(5, 1)),
        Case("equations", ("discover", "t.npz", *_TRAJECTORIES), _motion(40, 3)),
        Case(
            "predict",
            ("predict", "run", "data.npz", "--out", "p.npz", "--quiet"),
            _arrays(3),
            before=[("discover", "data.npz", *_DISCOVER)],
        ),
        Case("report", ("report", "run", "--quiet"), _fit_inputs, before=[_FIT]),
        Case("export", ("export", "run", "--quiet"), _fit_inputs, before=[_FIT]),
        Case("two processes", _FIT, _fit_inputs, processes=2),
    )
}


class Operations:
    """Count the operations on files in a folder, and act before one of them."""

    def __init__(
        self, folder: Path, at: int = 0, act: Callable[[str], object] | None = None
    ) -> None:
        self.root, self.at, self.act = f"{os.path.realpath(folder)}/", at, act
        self.done = 0

    def watch(self) -> None:
        """Start; there is no end, so this is for a forked child."""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or not isinstance(args[0], str | os.PathLike):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if not os.path.abspath(os.fspath(args[0])).startswith(self.root):
            return
        self.done += 1
        if self.done == self.at and self.act is not None:
            self.act(os.fspath(args[0]))


def kill_self(_: str) -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_forked(
    folder: Path,
    command: Sequence[str],
    operations: Operations | None = None,
    prepare: Callable[[], None] = lambda: None,
    rank: int = 0,
    size: int = 1,
) -> int:
    """Start the command in a forked child, after `prepare`; return its process id.

    The child writes its output to `output-RANK` and its number of file operations to `count-RANK`,
    next to the folder.
    """
    end, output = os.pipe()  # not a file: file sizes may be limited
    fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    pid = os.fork()
    if pid:
        os.close(output)
        _outputs[pid] = end, folder.parent / f"output-{rank}"
        return pid
    code = 70
    try:
        os.chdir(folder)
        count = os.open(f"../count-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if size > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        operations = operations or Operations(folder)
        prepare()
        operations.watch()
        code = _run_command(command)
        with suppress(OSError):  # no room left
            os.write(count, str(operations.done).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_command(command: Sequence[str]) -> int:
    sys.argv = ["symrazor", *command]
    try:
        app.main()
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 0
    return 0


def warm_up(case: Case) -> None:
    """Run a case in this process, whose forked children then start with all that it imported."""
    place = tempfile.TemporaryDirectory(dir=memory_disk())
    with place as folder, chdir(folder), open(os.devnull, "w") as null:
        case.inputs(Path(folder))
        with redirect_stdout(null), redirect_stderr(null):
            for command in (*case.before, case.command, case.check):
                if _run_command(command):
                    raise RuntimeError(f"{case.name}: {shlex.join(command)} fails")


def wait(pid: int, seconds: float = MAX_SECONDS) -> int:
    """Return the exit code of a child, or minus the signal that ended it; -99 if it hangs."""
    deadline, found, status = time.monotonic() + seconds, 0, 0
    while not found and time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    if not found:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    end, file = _outputs.pop(pid)
    with open(end, "rb") as output:
        file.write_bytes(output.read())
    return os.waitstatus_to_exitcode(status) if found else -99


def run_all(case: Case, folder: Path, kill_at: int = 0, kill_after: float = 0.0) -> list[int]:
    """Run the command in all processes of a case; the first is killed. Return the exit codes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20_000, 60_000))}
    pids = []
    for rank in range(case.processes):
        operations = Operations(folder, kill_at if rank == 0 else 0, kill_self)
        pids.append(run_forked(folder, case.command, operations, rank=rank, size=case.processes))
    if kill_after:
        time.sleep(kill_after)
        os.kill(pids[0], signal.SIGKILL)
    return [wait(pid) for pid in pids]


class Attack:
    """The attempts on one case."""

    def __init__(self, case: Case, place: Path) -> None:
        self.case, self.place = case, place
        self.outcome = Outcome()
        self.fresh = place / "fresh"
        self.fresh.mkdir(parents=True)
        warm_up(case)
        case.inputs(self.fresh)
        for command in case.before:
            self._require(wait(run_forked(self.fresh, command)) == 0)
        self.old_report = self._report(self.fresh) if case.before else None
        started = time.monotonic()
        folder = self.copy()
        self._require(set(run_all(case, folder)) == {0})
        self.seconds = time.monotonic() - started
        self.n_operations = int((place / "count-0").read_text())
        self.expected = contents(folder)
        self.new_report = self._report(folder)

    def _require(self, condition: bool) -> None:
        if not condition:
            raise RuntimeError(f"{self.case.name}: {self.output()}")

    def copy(self) -> Path:
        """Return a new folder with the inputs, and what was run before."""
        folder = self.place / "work"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.fresh, folder)
        return folder

    def _report(self, folder: Path) -> Any:
        """Return what the reading command prints, or None if it refuses the run."""
        code = wait(run_forked(folder, self.case.check))
        text = (self.place / "output-0").read_text()
        if code == 2 and text.count("\n") == 1 and "Traceback" not in text:
            return None
        if code != 0:
            self.outcome.fail("wrong exception", f"{self.case.name}: report: {code} {text[-1500:]}")
            return None
        report = without_times(json.loads((folder / "report.json").read_bytes()))
        for name in ("report.json", "r.html"):
            (folder / name).unlink()
        return report

    def attempt(self, kill_at: int = 0, kill_after: float = 0.0) -> None:
        """Kill one run, look at what is left, run it again, and compare."""
        case, outcome = self.case, self.outcome
        label = f"{case.name}, operation {kill_at}, {kill_after:.2f} s"
        folder = self.copy()
        codes = run_all(case, folder, kill_at, kill_after)
        if codes[0] != -signal.SIGKILL:  # it had ended before
            return
        outcome.tried += 1
        for rank, code in enumerate(codes[1:], 1):
            text = (self.place / f"output-{rank}").read_text()
            if code not in (0, 2) or "Traceback" in text or text.count("\n") > 1:
                outcome.fail("wrong exception", f"{label}: process {rank}: {code} {text[-1500:]}")
        try:
            contents(folder)
        except Exception as error:
            outcome.fail("half-written", f"{label}: {error!r}")
        report = self._report(folder)
        if report is not None and report not in (self.old_report, self.new_report):
            outcome.fail("mixed run", label)
        self.finish(folder, label, report)

    def finish(self, folder: Path, label: str, report: Any = None) -> None:
        """Run the command again, and compare all files with those of an undisturbed run."""
        case, outcome = self.case, self.outcome
        codes = run_all(case, folder)
        if set(codes) != {0} and not self._was_complete(report):
            outcome.fail("lost run", f"{label}: {codes} {self.output()}")
            return
        found = contents(folder)
        different = [
            name
            for name in sorted({*found, *self.expected})
            if found.get(name) != self.expected.get(name) and "checkpoints/" not in name
        ]
        if different:
            outcome.fail("lost run", f"{label}: {different} differ")
        left = [path.name for path in folder.rglob("*") if is_temporary(path.name)]
        if left:
            outcome.fail("temporary left", f"{label}: {left}")

    def output(self, rank: int = 0) -> str:
        """Return the end of what a process printed."""
        return (self.place / f"output-{rank}").read_text()[-1500:]

    def _was_complete(self, report: Any) -> bool:
        """Return whether the killed run was finished, so that it is not run again."""
        return report == self.new_report and "already has a finished run" in self.output()


def attack(name: str, n_random: int, every: int = 1, part: int = 0, parts: int = 1) -> Outcome:
    """Kill a case before every file operation (or each `every`-th) and at random times.

    With several parts, this is one of them.
    """
    rng = random.Random(part)
    with tempfile.TemporaryDirectory(dir=memory_disk()) as place:
        attempts = Attack(CASES[name], Path(place))
        for number in range(1 + part * every, attempts.n_operations + 1, every * parts):
            attempts.attempt(kill_at=number)
        for _ in range(n_random):
            attempts.attempt(kill_after=rng.uniform(0.02, attempts.seconds))
    return attempts.outcome
