"""A run of several trainings that can be taken up again: what is done, and how far the next is.

The same calls are made again, in the same order. A training that is finished gives its result at
once, one that was stopped goes on bit for bit (on the CPU, with a number of steps), and decisions
that depended on the clock are read back. Files are those of `symrazor.training.checkpoint`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.trajectories import Transitions
from symrazor.training.checkpoint import Checkpoints, State, compare, fingerprint
from symrazor.training.interrupt import Interruption

EVERY = 30.0
"""Seconds between two checkpoints of a training."""


class Journal:
    """What a run has done so far, in a directory of its own.

    Args:
        directory: of its checkpoints; where there are some the run goes on.

    Raises:
        ValueError: a directory with other things, or a damaged checkpoint.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read the newest checkpoint, if there is one."""
        self.checkpoints = Checkpoints(directory)
        saved = self.checkpoints.load() or {}
        self.told: dict[str, Any] = saved.get("told", {})
        self.pages: list[State] = saved.get("pages", [])
        self.at = 0

    @property
    def seconds(self) -> float:
        """Of all trainings so far."""
        return float(sum(page["loop"]["seconds"] for page in self.pages))

    def remember(self, name: str, make: Callable[[], Any]) -> Any:
        """What was decided under this name, or what is decided now: plain numbers and lists."""
        if name not in self.told:
            self.told[name] = make()
        return self.told[name]

    def next(self, model: SymmetrisedNetwork, data: Transitions, config: TrainConfig) -> "Page":
        """The page of the next training.

        Raises:
            ValueError: it belongs to other data, another model or other options.
        """
        number, self.at = self.at, self.at + 1
        options = {key: value for key, value in asdict(config).items() if key != "device"}
        belongs = {
            "options": options,
            "data": {"fingerprint": fingerprint(data.x, data.y, data.gaps, data.observed)},
            "model": {k: _kind(v) for k, v in model.state_dict().items()},
        }
        if number == len(self.pages):
            self.pages.append({"belongs_to": belongs, "loop": {"seconds": 0.0}})
        else:
            for name, expected in self.pages[number]["belongs_to"].items():
                compare(name, expected, belongs[name])
        return Page(self, number)

    def save(self) -> None:
        """Write a checkpoint."""
        steps = sum(int(page["loop"].get("done", 0)) for page in self.pages)
        finished = sum("result" in page for page in self.pages)
        self.checkpoints.save({"told": self.told, "pages": self.pages}, steps, finished)


class Page:
    """One training in a journal.

    Args:
        journal: it is in.
        number: of the training.
    """

    def __init__(self, journal: Journal, number: int) -> None:
        """Hold both."""
        self.journal, self.number, self.saved = journal, number, time.monotonic()

    @property
    def loop(self) -> State | None:
        """The state of the loop, if it has begun."""
        found: State = self.journal.pages[self.number]["loop"]
        return found if "done" in found else None

    @property
    def result(self) -> dict[str, Any] | None:
        """What came out, if it is finished: its bound, or "error"."""
        found: dict[str, Any] | None = self.journal.pages[self.number].get("result")
        return found

    def turn(self, stop: Interruption, state: Callable[[], State]) -> None:
        """Between two steps: save if that is due, and leave if a signal asked for it.

        Raises:
            KeyboardInterrupt: SIGINT.
            SystemExit: SIGTERM.
        """
        if stop.received is None and time.monotonic() - self.saved < EVERY:
            return
        self.journal.pages[self.number]["loop"] = state()
        self.journal.save()
        self.saved = time.monotonic()
        if stop.received is not None:
            stop.leave()

    def finish(self, state: State, result: dict[str, Any]) -> None:
        """Write down how it ended; the optimiser is not needed any more."""
        state.pop("optimiser", None)
        self.journal.pages[self.number] |= {"loop": state, "result": result}
        self.journal.save()


def _kind(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)
