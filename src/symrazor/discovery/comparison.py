"""Compare the structures of a question: train several starts of each, side by side.

All structures are trained in two phases from the first starts (`symrazor.discovery.members`). If a
claim is then undecided and time is left, further starts follow, of all structures, until it is
decided or the time for the comparison is used. What was done is written to a file, so that an
interrupted run continues with the same trainings.
"""

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from symrazor.accelerate.workers import Workers
from symrazor.core.files import write_atomically
from symrazor.discovery.budget import (
    MAX_COMPARISON_SHARE,
    MIN_EPOCHS,
    Plan,
    n_workers,
    plan_question,
)
from symrazor.discovery.claims import Claim, claim_of
from symrazor.discovery.members import Comparison, Job, Member, comparison_data, train_member
from symrazor.discovery.question import Options, Question, Tell
from symrazor.training.loop import Interruption

MAX_STARTS = 10
"""Starts of a structure after which a comparison ends undecided."""
STEPS_FILE = "steps.json"


@dataclass
class Compared:
    """Result of a comparison.

    Args:
        comparison: what all trainings shared.
        plan: its plan.
        members: one training per structure and start.
    """

    comparison: Comparison
    plan: Plan
    members: list[Member] = field(default_factory=list)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Return the claims about the symmetries of the family."""
        symmetries = self.comparison.question.family.symmetries
        claims = [claim_of(symmetry, self.members) for symmetry in symmetries]
        return tuple(claim for claim in claims if claim is not None)

    @property
    def undecided(self) -> bool:
        """Whether a claim is undecided."""
        return any(claim.holds is None for claim in self.claims)

    @property
    def n_starts(self) -> int:
        """Number of starts."""
        return len({member.start for member in self.members})


def compare(question: Question, options: Options, tell: Tell) -> Compared:
    """Train all structures from several starts, within the time for the comparison."""
    began = time.perf_counter()
    config, plan = plan_question(question, options, tell)
    folder = options.unfinished_folder(question.name)
    data = comparison_data(question.train, plan.samples, options.seed)
    # Starts are scored once, at the end, on data that no worker needs.
    shared = replace(question, train=data, test=None)
    comparison = Comparison(shared, config, plan.samples, options.seed, folder)
    compared = Compared(comparison, plan)
    steps = _Steps(folder and folder / STEPS_FILE)
    limit = MAX_COMPARISON_SHARE * 60 * options.minutes
    jobs_at_once = min(n_workers(options), options.starts * len(question.family.structures))
    with Workers(jobs_at_once, comparison) as workers, Interruption(folder is not None) as signals:
        runner = _Runner(workers, compared, signals, tell, options.starts)
        runner.run(range(options.starts), steps)
        while compared.undecided and plan.costs:
            first, more = compared.n_starts, max(2, workers.count)
            more = min(more, MAX_STARTS - first)
            spent = time.perf_counter() - began
            fits = spent + runner.seconds_per_start * more <= limit
            if not steps.decide("more starts", more if fits else 0):
                break
            tell(f"  undecided after {first} starts: training {more} more")
            runner.run(range(first, first + more), steps)
    return compared


@dataclass
class _Steps:
    """Decisions that depend on the clock, kept in a file for an interrupted run."""

    file: Path | None
    stored: list[tuple[str, int]] = field(default_factory=list)
    position: int = 0

    def __post_init__(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self.stored = [(str(k), int(v)) for k, v in json.loads(self.file.read_text())]

    def decide(self, name: str, value: int) -> int:
        """Return the stored decision of this place, or store the given one."""
        if self.position < len(self.stored) and self.stored[self.position][0] == name:
            value = self.stored[self.position][1]
        else:
            self.stored = [*self.stored[: self.position], (name, value)]
            if self.file is not None:
                write_atomically(self.file, json.dumps(self.stored).encode())
        self.position += 1
        return value


@dataclass
class _Runner:
    """Runs the two phases of some starts."""

    workers: Workers
    compared: Compared
    signals: Interruption
    tell: Tell
    n_planned: int
    seconds_per_start: float = 0.0

    def run(self, starts: Sequence[int], steps: _Steps) -> None:
        """Train all structures from these starts and add the results."""
        began = time.perf_counter()
        comparison, plan = self.compared.comparison, self.compared.plan
        family = comparison.question.family
        names = [structure.name for structure in family.structures]
        epochs = plan.epochs[0]
        base = [name for name in names if name not in family.contains]
        first = self._train([Job(n, s, 0, epochs, None, False) for s in starts for n in base])
        # A slower run than planned, for example beside other programs, takes fewer epochs.
        epochs = plan.epochs[1]
        if plan.costs and plan.seconds:
            share = sum(plan.costs[name].training for name in base)
            share /= share + sum(cost.training for cost in plan.costs.values())
            expected = share * plan.seconds * len(starts) / self.n_planned
            slowdown = (time.perf_counter() - began) / expected if expected else 1.0
            shortest = min(epochs, MIN_EPOCHS)
            epochs = max(shortest, round(epochs / max(1.0, slowdown)))
        epochs = steps.decide("epochs", epochs)
        jobs = []
        for start in starts:
            for name in names:
                previous = first[family.contains.get(name, name), start]
                jobs.append(Job(name, start, 1, epochs, previous))
        self.compared.members += self._train(jobs).values()
        self.seconds_per_start = (time.perf_counter() - began) / len(starts)

    def _train(self, jobs: Sequence[Job]) -> dict[tuple[str, int], Member]:
        members: dict[tuple[str, int], Member] = {}
        results = self.workers.run(train_member, jobs, self._stopped)
        for number, (index, member) in enumerate(results, 1):
            job = jobs[index]
            members[job.structure, job.start] = member
            self.tell(
                f"  {number} of {len(jobs)}: {job.structure}, start {job.start + 1}, phase "
                f"{job.phase + 1}: {job.epochs} epochs"
            )
        return members

    def _stopped(self) -> bool:
        """Return whether a signal ended the run; a SIGTERM ends it with its own exit code."""
        if self.signals.received == signal.SIGTERM:
            self.signals.leave()
        return self.signals.received is not None
