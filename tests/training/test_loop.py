"""Test the generic training loop with a counting task."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from symrazor.training.loop import Loop, Task


class Counting(Task):
    """Rounds of three steps; optionally fails or sends a signal at one step."""

    def __init__(self, rounds: int = 3, diverge_at: int = 0, interrupt_at: int = 0) -> None:
        super().__init__()
        self.rounds, self.diverge_at, self.interrupt_at = rounds, diverge_at, interrupt_at
        self.steps, self.recovered = 0, 0

    def finished(self) -> bool:
        return len(self.history) == self.rounds

    def batches(self) -> Iterator[int]:
        yield from range(3)

    def step(self, batch: int) -> None:
        self.steps += 1
        if self.steps == self.diverge_at:
            raise FloatingPointError("diverged")
        if self.steps == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluate(self) -> None:
        self.history.append({"epoch": len(self.history) + 1, "nll": float(self.steps)})

    def position(self) -> str:
        return f"step {self.steps}"


class Recovering(Counting):
    def recover(self) -> bool:
        self.recovered += 1
        return True


class Saved:
    """Records when checkpoints are written."""

    directory = Path("run")

    def __init__(self, task: Counting, full_disk: bool = False) -> None:
        self.task, self.full_disk, self.at = task, full_disk, list[int]()

    def due(self, round_ended: bool) -> bool:
        return round_ended

    def save(self) -> None:
        if self.full_disk:
            raise OSError("no space left on device")
        self.at.append(self.task.steps)


def test_rounds_are_trained_evaluated_saved_and_published() -> None:
    task, published = Counting(), list[dict[str, float]]()
    saved = Saved(task)
    history = Loop(task, [published.append], saved).run()
    assert [record["nll"] for record in history] == [3, 6, 9]
    assert published == history and published[0] is not history[0]
    assert saved.at == [3, 6, 9]


def test_signal_stops_between_steps_after_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    task = Counting(interrupt_at=5)
    saved = Saved(task)
    with pytest.raises(SystemExit) as error:
        Loop(task, saver=saved).run()
    assert error.value.code == 143
    assert saved.at == [3, 5] and len(task.history) == 1
    assert "Stopped by SIGTERM after step 5. Continue with resume='run'." in caplog.text


def test_full_disk_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    task = Counting()
    assert len(Loop(task, saver=Saved(task, full_disk=True)).run()) == 3
    assert caplog.text.count("Could not write a checkpoint") == 3


def test_divergence_ends_the_run_unless_the_task_recovers() -> None:
    with pytest.raises(FloatingPointError, match="diverged"):
        Loop(Counting(diverge_at=4)).run()
    task = Recovering(diverge_at=4)
    assert len(Loop(task).run()) == 3
    assert task.recovered == 1
