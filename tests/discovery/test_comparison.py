"""Compare structures over several starts: more starts while undecided, and resumed decisions."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from discover_data import some_data

from symrazor.core.likelihood import Categorical
from symrazor.discovery import api, comparison
from symrazor.discovery.budget import MIN_EPOCHS, Cost, Plan
from symrazor.discovery.comparison import MAX_STARTS, Compared, add_starts, compare
from symrazor.discovery.families import candidates_for
from symrazor.discovery.members import Job
from symrazor.discovery.question import Options, Question
from symrazor.training.options import FitConfig

COST = Cost(training=1.0, evidence=0.0, once=0.0)
STRUCTURES = ("relaxed", "shared", "fully connected")


class Trainings:
    """Take the place of `train_member`: the jobs, and members with a chosen advantage."""

    def __init__(self, clock: "Clock", advantage: float, excluded: str = "") -> None:
        self.clock, self.advantage, self.jobs = clock, advantage, list[Job]()
        self.excluded = excluded

    def __call__(self, shared: Any, job: Job) -> Any:
        self.jobs.append(job)
        self.clock.now += self.clock.seconds_per_job
        gain = self.advantage if job.structure != "shared" else 0.0
        gain = -5.0 if job.structure == self.excluded else gain
        scores = torch.full((20,), -1.0, dtype=torch.float64)
        return SimpleNamespace(
            structure=job.structure,
            start=job.start,
            log_evidence=-100 + 100 * gain,
            evidence=SimpleNamespace(n_data=80),
            left_out=scores + gain,
            guess=scores - 1,
        )

    @property
    def schedule(self) -> list[tuple[str, int, int, int]]:
        return [(job.structure, job.start, job.phase, job.epochs) for job in self.jobs]

    @property
    def starts(self) -> int:
        return len({job.start for job in self.jobs})


class Clock:
    """A clock that only trainings advance."""

    def __init__(self, seconds_per_job: float = 0.0) -> None:
        self.now, self.seconds_per_job = 0.0, seconds_per_job

    def read(self) -> float:
        return self.now


def run(
    monkeypatch: pytest.MonkeyPatch,
    advantage: float,
    seconds_per_job: float = 0.0,
    out: Path | None = None,
    timed: bool = True,
    planned_seconds: float = 0.0,
    excluded: str = "",
) -> tuple[Compared, Trainings]:
    """Compare three stand-ins for trained structures within ten minutes."""
    data = some_data("set", n=100)
    question = Question("a", "?", candidates_for(data), data.labelled, None, Categorical)
    costs = dict.fromkeys(STRUCTURES, COST) if timed else {}
    plan = Plan((40, 40), 80, planned_seconds, costs)
    clock = Clock(seconds_per_job)
    trainings = Trainings(clock, advantage, excluded)
    monkeypatch.setattr(comparison, "plan_question", lambda *_: (FitConfig(), plan))
    monkeypatch.setattr(comparison, "n_workers", lambda options: 1)
    monkeypatch.setattr(comparison, "train_member", trainings)
    monkeypatch.setattr(comparison.clock, "now", clock.read)
    if out is not None:
        Options(out=out).unfinished_folder("a").mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
    compared = compare(question, Options(minutes=10, out=out), lambda text: None)
    return compared, trainings


def test_every_structure_has_every_start_and_larger_ones_begin_with_the_strict_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared, trainings = run(monkeypatch, advantage=5.0)
    assert [(m.structure, m.start) for m in compared.members] == [
        (name, start) for start in range(3) for name in STRUCTURES
    ]
    first = [job for job in trainings.jobs if job.phase == 0]
    assert {job.structure for job in first} == {"shared", "fully connected"}  # not the relaxed one
    assert not any(job.is_compared or job.previous for job in first)
    for job in [job for job in trainings.jobs if job.phase == 1]:
        before = "shared" if job.structure == "relaxed" else job.structure
        assert job.is_compared and job.previous is not None
        assert (job.previous.structure, job.previous.start) == (before, job.start)


def test_a_decided_comparison_ends_after_the_first_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, trainings = run(monkeypatch, advantage=5.0)
    assert [claim.holds for claim in compared.claims] == [False]
    assert compared.n_starts == trainings.starts == 3


@pytest.mark.parametrize(
    ("timed", "seconds_per_job", "starts"),
    [
        (True, 0.0, MAX_STARTS),
        (True, 10.0, 7),  # 50 s per start; 350 s are within 65 % of ten minutes, 450 s are not
        (True, 30.0, 3),  # no time for two more
        (False, 0.0, 3),  # with a number of epochs, the number of starts is fixed as well
    ],
)
def test_more_starts_follow_while_undecided(
    timed: bool, seconds_per_job: float, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, trainings = run(monkeypatch, 0.05, seconds_per_job, timed=timed)
    assert compared.undecided
    assert compared.n_starts == trainings.starts == starts
    assert len(compared.members) == starts * len(STRUCTURES)


def test_further_starts_leave_out_structures_that_are_excluded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rival that is far worse than the symmetric structure decides nothing."""
    compared, _ = run(monkeypatch, 0.05, 10.0, excluded="fully connected")
    starts = {
        name: len([m for m in compared.members if m.structure == name]) for name in STRUCTURES
    }
    # A start of all networks takes 50 s, one without the excluded network 30 s.
    assert starts == {"relaxed": 10, "shared": 10, "fully connected": 3}
    (claim,) = compared.claims
    assert (claim.rival, claim.starts) == ("relaxed", MAX_STARTS)


def test_time_that_is_left_later_is_used_for_further_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared, _ = run(monkeypatch, 0.05, seconds_per_job=30.0)
    options = Options(minutes=10)
    assert not add_starts(compared, options, lambda text: None, 149.0)
    assert add_starts(compared, options, lambda text: None, 160.0)  # 150 s per start
    assert compared.n_starts == 4


def test_a_run_that_is_slower_than_planned_takes_fewer_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of five trainings of a start are its first phase: 60 s, where 24 s were planned."""
    _, trainings = run(monkeypatch, 5.0, seconds_per_job=10.0, planned_seconds=60.0)
    assert {epochs for _, _, phase, epochs in trainings.schedule if phase == 0} == {40}
    assert {epochs for _, _, phase, epochs in trainings.schedule if phase == 1} == {16}
    _, trainings = run(monkeypatch, 5.0, seconds_per_job=1000.0, planned_seconds=60.0)
    assert {epochs for _, _, phase, epochs in trainings.schedule if phase == 1} == {MIN_EPOCHS}


def test_a_run_that_is_faster_than_planned_trains_the_second_phase_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first phase takes 60 s where 90 s were planned; 80 samples allow 200 epochs at most."""
    _, trainings = run(monkeypatch, 5.0, seconds_per_job=10.0, planned_seconds=225.0)
    assert {epochs for _, _, phase, epochs in trainings.schedule if phase == 0} == {40}
    assert {epochs for _, _, phase, epochs in trainings.schedule if phase == 1} == {60}
    _, trainings = run(monkeypatch, 5.0, seconds_per_job=1.0, planned_seconds=225.0)
    assert {epochs for _, _, phase, epochs in trainings.schedule if phase == 1} == {80}


def test_a_resumed_run_repeats_the_decisions_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints fit only to the same jobs: the same epochs from the same starts."""
    slow = {"seconds_per_job": 10.0, "planned_seconds": 100.0}
    _, first = run(monkeypatch, 0.05, out=tmp_path, **slow)
    _, resumed = run(monkeypatch, 0.05, out=tmp_path, planned_seconds=100.0)
    _, new = run(monkeypatch, 0.05, planned_seconds=100.0)
    assert resumed.schedule[: len(first.schedule)] == first.schedule
    assert new.schedule[: len(first.schedule)] != first.schedule


def test_decisions_after_another_one_are_taken_anew(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    steps = comparison._Steps(file)
    few = range(1, 10)
    assert [steps.decide(name, n, few) for name, n in [("epochs", 5), ("starts", 2)]] == [5, 2]
    resumed = comparison._Steps(file)
    assert resumed.decide("epochs", 9, few) == 5
    assert resumed.decide("epochs", 7, few) == 7  # another decision was stored here
    assert comparison._Steps(file).stored == [("epochs", 5), ("epochs", 7)]
    for damaged in ("[damaged", '[["epochs", 10]]', f'[["epochs", 1{"0" * 400}]]'):
        file.write_text(damaged)
        assert comparison._Steps(file).decide("epochs", 3, few) == 3


def test_time_after_the_final_training_decides_claims_and_keeps_the_recommendation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network that is delivered was trained before: claims may change, its name may not."""
    compared, _ = run(monkeypatch, 0.05, seconds_per_job=30.0)
    options, question = Options(minutes=10), compared.comparison.question
    monkeypatch.setattr(api, "candidates_of", lambda *_: [])
    monkeypatch.setattr(api, "_calibration", lambda *_: None)
    monkeypatch.setattr(api, "recommend", lambda *_: "fully connected")
    monkeypatch.setattr(api, "_notes", lambda *_: ())
    before = api.compared_answer(question, compared, options, "shared")
    continued = partial(api.with_last_starts, question, compared, before, options)
    assert continued(149.0, lambda text: None) is before  # 150 s per start
    after = continued(160.0, lambda text: None)
    assert after.recommended_name == "shared"
    assert [claim.starts for claim in before.claims] == [3]
    assert [claim.starts for claim in after.claims] == [4]
