"""Test that interrupted runs on trajectories continue bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from symrazor import dynamics
from symrazor.dynamics import journal as journals
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import FlowTimes, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.systems import oscillators
from symrazor.dynamics.trained import Record, Trained
from symrazor.dynamics.training import Progress, train
from symrazor.dynamics.trajectories import Transitions, simulate, transitions
from symrazor.training.checkpoint import Checkpoints

CONFIG = TrainConfig(
    steps=24, batch_size=10, draws=2, flows=4, noise_kind="closed", burn_in=0.3, record=4
)


def problem(noise: float = 1e-3) -> tuple[SymmetrisedNetwork, Transitions]:
    """Return an oscillator, a narrow network and two candidate quantities."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    network = HamiltonianNetwork(2, None, 8, generator=generator)
    conserved = Quadratic(2, 2, generator=generator)
    model = SymmetrisedNetwork(network, conserved, FlowTimes(2, "ball", "antithetic"))
    data = simulate(oscillators(), 6, 4, 0.2, seed=0)
    return model, transitions(data, noise, seed=1)


def stop_after(count: int, sent: int = signal.SIGINT) -> Progress:
    """Return a progress callback that sends a signal with record `count`."""
    seen: list[Record] = []

    def tell(record: Record) -> None:
        seen.append(record)
        if len(seen) == count:
            os.kill(os.getpid(), sent)

    return tell


def outcome(trained: Trained) -> dict[str, object]:
    """Return everything that must be equal, which excludes times."""
    return {
        "history": [{k: v for k, v in r.items() if k != "seconds"} for r in trained.history],
        "weights": {k: v.tolist() for k, v in trained.model.state_dict().items()},
        "noise": float(trained.noise.variance),
        "bound": trained.bound,
        "trials": trained.trials,
    }


@pytest.mark.parametrize("records", [1, 3])
def test_training_resumes_bit_for_bit(records: int, tmp_path: Path) -> None:
    model, data = problem()
    uninterrupted = train(model, data, CONFIG)
    model, data = problem()
    with pytest.raises(KeyboardInterrupt):
        train(model, data, CONFIG, stop_after(records), Journal(tmp_path))
    model, data = problem()
    resumed = train(model, data, CONFIG, None, Journal(tmp_path))
    assert outcome(resumed) == outcome(uninterrupted)
    model, data = problem()  # and what is finished is there at once
    steps: list[Record] = []
    assert outcome(train(model, data, CONFIG, steps.append, Journal(tmp_path))) == outcome(
        uninterrupted
    )
    assert not steps


@pytest.mark.parametrize("records", [1, 6, 12])
def test_selection_resumes_bit_for_bit(records: int, tmp_path: Path) -> None:
    model, data = problem()
    uninterrupted = train_and_select(model, data, CONFIG)
    with pytest.raises(KeyboardInterrupt):
        train_and_select(model, data, CONFIG, stop_after(records), Journal(tmp_path))
    resumed = train_and_select(model, data, CONFIG, None, Journal(tmp_path))
    assert outcome(resumed) == outcome(uninterrupted)


def test_results_of_a_selection_do_not_change_its_checkpoints(tmp_path: Path) -> None:
    """The training of the next network saves the checkpoints of all trainings again."""
    model, data = problem()
    journal = Journal(tmp_path)
    uninterrupted = train_and_select(model, data, CONFIG, None, journal)
    train(model, data, CONFIG, None, journal)
    model, data = problem()
    resumed = train_and_select(model, data, CONFIG, None, Journal(tmp_path))
    assert outcome(resumed) == outcome(uninterrupted)


def test_periodic_checkpoints_survive_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "SAVE_INTERVAL", 0.0)  # after every step

    class Killed(BaseException):
        pass

    def kill(record: Record) -> None:
        if record["step"] == 12:
            raise Killed

    model, data = problem()
    uninterrupted = train(model, data, CONFIG)
    model, data = problem()
    with pytest.raises(Killed):
        train(model, data, CONFIG, kill, Journal(tmp_path))
    model, data = problem()
    journal = Journal(tmp_path)
    assert journal.trainings[0]["state"]["done"] == 12  # before its record
    assert outcome(train(model, data, CONFIG, None, journal)) == outcome(uninterrupted)


def test_sigterm_ends_a_process_after_a_checkpoint(tmp_path: Path) -> None:
    job = (
        "import signal, sys; sys.path[:0] = ['tests/dynamics', 'tests/support']\n"
        "from test_journal import *\n"
        "model, data = problem()\n"
        f"train(model, data, CONFIG, stop_after(2, signal.SIGTERM), Journal({str(tmp_path)!r}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", job], check=False, cwd=Path(__file__).parents[2])
    assert ended.returncode == 128 + signal.SIGTERM
    model, data = problem()
    uninterrupted = outcome(train(model, data, CONFIG))
    model, data = problem()
    assert outcome(train(model, data, CONFIG, None, Journal(tmp_path))) == uninterrupted


def test_diverged_training_is_stored(tmp_path: Path) -> None:
    def diverge() -> None:
        model, data = problem()
        with torch.no_grad():
            model.network.biases[0].fill_(torch.nan)
        train(model, data, CONFIG, None, Journal(tmp_path))

    for _ in range(2):
        with pytest.raises(FloatingPointError, match="had no finite gradients"):
            diverge()
    assert "error" in Journal(tmp_path).trainings[0]["result"]


def test_other_data_or_options_are_rejected(tmp_path: Path) -> None:
    model, data = problem()
    train(model, data, CONFIG, None, Journal(tmp_path))
    with pytest.raises(ValueError, match=r"differ in the options: lr"):
        train(model, data, CONFIG.change(lr=0.1), None, Journal(tmp_path))
    other = problem(noise=2e-3)[1]
    with pytest.raises(ValueError, match="differ in the data"):
        train(model, other, CONFIG, None, Journal(tmp_path))


def test_discover_resumes(tmp_path: Path) -> None:
    data = simulate(oscillators(), 6, 5, 0.2, seed=0).with_noise(1e-4, seed=1)

    def told(share: float, line: str) -> None:
        if share > 0.5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        dynamics.discover(data, minutes=0.05, steps=30, progress=told, resume=tmp_path)
    before = Journal(tmp_path)
    assert before.trainings and before.decisions["plan"]
    result = dynamics.discover(data, minutes=0.05, steps=30, progress=False, resume=tmp_path)
    after = Journal(tmp_path)
    assert after.decisions["plan"] == before.decisions["plan"]
    assert len(after.trainings) >= len(before.trainings)
    assert result.verdict


@pytest.mark.parametrize("trainings", [3, [3], [{"state": {"seconds": 1.0}}], [{"belongs_to": {}}]])
def test_checkpoints_of_another_kind_are_named(trainings: object, tmp_path: Path) -> None:
    Checkpoints(tmp_path).save({"trainings": trainings}, 1, 0)
    with pytest.raises(ValueError, match="checkpoints of another kind of run"):
        Journal(tmp_path)
