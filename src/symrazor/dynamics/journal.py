"""Store a sequence of trainings so that an interrupted run continues where it stopped.

A resumed run makes the same calls in the same order. A finished training returns its result at
once, an interrupted one continues (bit for bit, on the CPU and with a number of steps rather than a
time limit), and decisions that depended on the clock are read back. The files are those of
`symrazor.training.checkpoint`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.trajectories import Transitions
from symrazor.training.checkpoint import Checkpoints, State, compare, describe_tensor, fingerprint

SAVE_INTERVAL = 30.0
"""Seconds between checkpoints of a training."""


class Journal:
    """The trainings and decisions of a run, stored in one directory.

    Args:
        directory: directory of the checkpoints; existing ones are continued. Other files in it, or
            a damaged checkpoint, raise ValueError.

    Attributes:
        trainings: identity, state and result of each training.
        decisions: values of `remember`, by name.
        n_started: trainings that this process has started or read back.
    """

    def __init__(self, directory: str | Path) -> None:
        self.checkpoints = Checkpoints(directory)
        saved = self.checkpoints.load() or {}
        self.decisions: dict[str, Any] = saved.get("decisions", {})
        self.trainings: list[State] = saved.get("trainings", [])
        self.n_started = 0
        if not _is_journal(self.decisions, self.trainings):
            raise ValueError(f"{directory} has checkpoints of another kind of run. Remove them.")

    @property
    def seconds(self) -> float:
        """Total time of all trainings."""
        return float(sum(training["state"]["seconds"] for training in self.trainings))

    def remember(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the stored decision `name`, or make and store it (plain numbers and lists)."""
        if name not in self.decisions:
            self.decisions[name] = make()
        return self.decisions[name]

    def next(
        self,
        model: SymmetrisedNetwork,
        data: Transitions,
        config: TrainConfig,
        current_state: Callable[[], State],
    ) -> "Entry":
        """Return the entry of the next training, whose checkpoints contain `current_state()`.

        Raise ValueError if the stored training has other data, another model or other options.
        """
        number, self.n_started = self.n_started, self.n_started + 1
        options = {key: value for key, value in asdict(config).items() if key != "device"}
        belongs_to = {
            "options": options,
            "data": {"fingerprint": fingerprint(data.x, data.y, data.gaps, data.observed)},
            "model": {k: describe_tensor(v) for k, v in model.state_dict().items()},
        }
        if number == len(self.trainings):
            self.trainings.append({"belongs_to": belongs_to, "state": {"seconds": 0.0}})
        else:
            for name, saved in self.trainings[number]["belongs_to"].items():
                compare(name, saved, belongs_to[name])
        return Entry(self, self.trainings[number], current_state)

    def save(self) -> None:
        """Write a checkpoint."""
        steps = sum(int(training["state"].get("done", 0)) for training in self.trainings)
        n_finished = sum("result" in training for training in self.trainings)
        state = {"decisions": self.decisions, "trainings": self.trainings}
        self.checkpoints.save(state, steps, n_finished)


def _is_journal(decisions: Any, trainings: Any) -> bool:
    """Return whether values from a file have the types that a journal writes."""
    return (
        isinstance(decisions, dict)
        and isinstance(trainings, list)
        and all(
            isinstance(training, dict)
            and isinstance(training.get("belongs_to"), dict)
            and isinstance(training.get("state"), dict)
            and isinstance(training["state"].get("seconds"), float)
            for training in trainings
        )
    )


class Entry:
    """One training in a journal; saves checkpoints of `current_state()`."""

    def __init__(
        self, journal: Journal, training: State, current_state: Callable[[], State]
    ) -> None:
        self.journal, self.training, self.current_state = journal, training, current_state
        self.directory = journal.checkpoints.directory
        self.saved_at = time.monotonic()

    @property
    def state(self) -> State | None:
        """The stored state of the training, or None if it has not started."""
        state: State = self.training["state"]
        return state if "done" in state else None

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of a finished training ("bound" or "error"), or None."""
        return self.training.get("result")

    def due(self, round_ended: bool) -> bool:
        """Return whether the last checkpoint is older than `SAVE_INTERVAL`."""
        return time.monotonic() - self.saved_at >= SAVE_INTERVAL

    def save(self) -> None:
        """Write a checkpoint of the current state."""
        self.training["state"] = self.current_state()
        self.journal.save()
        self.saved_at = time.monotonic()

    def finish(self, result: dict[str, Any]) -> None:
        """Store the result and the final state, without the optimiser."""
        state = self.current_state()
        state.pop("optimiser", None)
        self.training |= {"state": state, "result": result}
        self.journal.save()
