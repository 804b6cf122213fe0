"""Compare the structures of a question: train several starts of each, side by side.

All structures are trained in two phases from the first starts (`symrazor.discovery.members`). If a
claim is then undecided and time is left, further starts follow, until it is decided or the time for
the comparison is used. They train the structures of the open comparisons only. What was done is
written to a file, so that an interrupted run continues with the same trainings.
"""

import contextlib
import json
import math
import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from symrazor.accelerate.devices import run_in_turn
from symrazor.accelerate.workers import Workers
from symrazor.core.files import parse_json, write_atomically
from symrazor.core.validation import counted
from symrazor.discovery.budget import (
    DAMAGED,
    MIN_EPOCHS,
    MIN_LARGE_SAMPLES,
    Plan,
    comparison_shares,
    longest_phase,
    n_workers,
    plan_question,
)
from symrazor.discovery.claims import MAX_STARTS, Claim, claim_of
from symrazor.discovery.members import (
    Comparison,
    Job,
    Member,
    comparison_data,
    train_member,
)
from symrazor.discovery.question import (
    Options,
    Question,
    Step,
    Symmetry,
    Tell,
)
from symrazor.training.loop import Interruption, clock

STEPS_FILE = "steps.json"
MAX_SPEEDUP = 2.0
"""Largest factor by which a fast first phase prolongs the second one."""


@dataclass
class Compared:
    """Result of a comparison.

    Args:
        comparison: what all trainings shared.
        plan: its plan.
        members: one training per structure and start.
        steps: decisions that depended on the clock.
        seconds_per_start: time that a start of all structures took.
    """

    comparison: Comparison
    plan: Plan
    members: list[Member] = field(default_factory=list)
    steps: "_Steps" = field(default_factory=lambda: _Steps(None))
    seconds_per_start: float = 0.0

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Return the claims about the symmetries of the family.

        Of several pairs of structures for one symmetry, the one that predicts best decides: a
        symmetry of the data does not show in networks that lack what the data need otherwise.
        """
        claims: dict[str, Claim] = {}
        quality: dict[str, float] = {}
        family = self.comparison.question.family
        for symmetry in family.symmetries:
            implied_by = claims.get(symmetry.follows_from)
            if implied_by is not None and implied_by.holds is not False:
                continue
            claim = claim_of(symmetry, self.members, self._nested(symmetry))
            best = self._prediction(symmetry)
            if claim is not None and best >= quality.get(symmetry.name, -math.inf):
                claims[symmetry.name], quality[symmetry.name] = claim, best
        return tuple(claims.values())

    def _nested(self, symmetry: Symmetry) -> list[str]:
        """Return the structures that contain the one with the symmetry."""
        contains = self.comparison.question.family.contains
        return [name for name, inner in contains.items() if inner == symmetry.structure]

    def _prediction(self, symmetry: Symmetry) -> float:
        """Return the log likelihood per left-out sample by the best structure that is compared."""
        names = {symmetry.structure, *symmetry.rivals}
        scores: dict[str, list[Tensor]] = {}
        for member in self.members:
            if member.structure in names and len(member.left_out):
                scores.setdefault(member.structure, []).append(member.left_out)
        return max((float(torch.cat(parts).mean()) for parts in scores.values()), default=0.0)

    def open_structures(self) -> list[str]:
        """Return the structures whose further starts can decide what is undecided."""
        family = self.comparison.question.family
        wanted: set[str] = set()
        for claim in self.claims:
            if claim.holds is None:
                pairs = [s for s in family.symmetries if s.name == claim.name]
                symmetry = next(s for s in pairs if s.structure == claim.structure)
                wanted |= {symmetry.structure, *self._open_rivals(symmetry)}
        wanted |= {family.contains[name] for name in wanted if name in family.contains}
        return [structure.name for structure in family.structures if structure.name in wanted]

    def _open_rivals(self, symmetry: Symmetry) -> list[str]:
        """Return the rivals that can still decide against a symmetry.

        The others are excluded: on their own, they would let the symmetry be stated. All are
        returned if none is open, because something else is in doubt then.
        """
        alone = [replace(symmetry, rivals=(rival,)) for rival in symmetry.rivals]
        nested = self._nested(symmetry)
        claims = [claim for pair in alone if (claim := claim_of(pair, self.members, nested))]
        return [c.rival for c in claims if not c.holds] or [c.rival for c in claims]

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
    began = clock.now()
    config, plan = plan_question(question, options, tell)
    folder = options.unfinished_folder(question.name)
    shared = comparison_data(with_structures(question, plan.costs), plan.samples, options.seed)
    comparison = Comparison(shared, config, plan.samples, options.seed, folder)
    compared = Compared(comparison, plan, steps=_Steps(folder and folder / STEPS_FILE))
    limit = comparison_shares(len(question.train[1]))[1] * 60 * options.minutes
    add_starts(compared, options, tell, limit - (clock.now() - began))
    return compared


def with_structures(question: Question, names: Collection[str]) -> Question:
    """Return the question with only the structures of these names; with all if none matches."""
    family = question.family
    structures = [s for s in family.structures if s.name in names] or family.structures
    return replace(question, family=replace(family, structures=structures))


def add_starts(compared: Compared, options: Options, tell: Tell, seconds: float) -> bool:
    """Train the first starts, then further ones while a claim is undecided and time is left.

    Returns:
        Whether starts were added.
    """
    began, comparison, n_before = clock.now(), compared.comparison, compared.n_starts
    jobs_at_once = min(
        n_workers(options), options.starts * len(comparison.question.family.structures)
    )
    is_pool = jobs_at_once > 1
    pool = Workers(jobs_at_once, comparison) if is_pool else contextlib.nullcontext()
    with pool as workers, Interruption(comparison.folder is not None) as signals:
        deadline = began + seconds if compared.plan.costs else None
        runner = _Runner(workers, compared, signals, tell, options.starts, deadline)
        every = [structure.name for structure in comparison.question.family.structures]
        if not compared.members:
            runner.run(range(options.starts), every)
        while compared.undecided and compared.plan.costs:
            first, names = compared.n_starts, compared.open_structures()
            left = seconds - (clock.now() - began)
            wanted = min(max(2, 1 if workers is None else workers.count), MAX_STARTS - first)
            share = _cost(compared.plan, names) / max(_cost(compared.plan, every), 1e-9)
            fitting = int(left / max(share * compared.seconds_per_start, 1e-9))
            more = max(0, min(wanted, fitting))
            more = compared.steps.decide("more starts", more, range(wanted + 1))
            if not more:
                break
            networks = f"{len(names)} of {counted(len(every), 'network')}"
            tell(f"  undecided after {counted(first, 'start')}: training {more} more of {networks}")
            runner.run(range(first, first + more), names)
    return compared.n_starts > n_before


def _cost(plan: Plan, names: Iterable[str]) -> float:
    """Return the training time of structures, per sample and epoch."""
    return sum(plan.costs[name].training for name in names)


@dataclass
class _Steps:
    """Decisions that depend on the clock, kept in a file for an interrupted run."""

    file: Path | None
    stored: list[tuple[str, int]] = field(default_factory=list)
    position: int = 0

    def __post_init__(self) -> None:
        if self.file is not None:
            with contextlib.suppress(*DAMAGED):
                self.stored = [(str(k), int(v)) for k, v in parse_json(self.file)]

    def decide(self, name: str, value: int, possible: range) -> int:
        """Return the stored decision of this place if it is possible, or store the given one."""
        stored_name, stored = (*self.stored, ("", 0))[min(self.position, len(self.stored))]
        if stored_name == name and stored in possible:
            value = stored
        else:
            self.stored = [*self.stored[: self.position], (name, value)]
            if self.file is not None:
                write_atomically(self.file, json.dumps(self.stored).encode())
        self.position += 1
        return value


@dataclass
class _Runner:
    """Runs the two phases of some starts."""

    workers: Workers | None
    compared: Compared
    signals: Interruption
    tell: Tell
    n_planned: int
    deadline: float | None = None

    def run(self, starts: Sequence[int], names: Sequence[str]) -> None:
        """Train some structures from these starts and add the results."""
        began = clock.now()
        comparison, plan = self.compared.comparison, self.compared.plan
        family, epochs = comparison.question.family, plan.epochs[0]
        base = [name for name in names if name not in family.contains]
        first = self._train([Job(n, s, 0, epochs, None, False) for s in starts for n in base])
        # A slower run than planned, for example beside other programs, takes fewer epochs. A faster
        # one takes more: the plan is cautious, and networks at rest are compared more reliably.
        epochs, longest = plan.epochs[1], max(plan.epochs[1], longest_phase(plan.samples))
        if plan.costs and plan.seconds:
            every = [name for name in plan.costs if name not in family.contains]
            share = _cost(plan, base) / (_cost(plan, every) + _cost(plan, plan.costs))
            expected = share * plan.seconds * len(starts) / self.n_planned
            slowdown = (clock.now() - began) / expected if expected else 1.0
            shortest = min(epochs, MIN_EPOCHS) if plan.samples < MIN_LARGE_SAMPLES else 1
            wanted = round(epochs / max(1 / MAX_SPEEDUP, slowdown))
            epochs = min(max(shortest, wanted), longest)
        possible = range(1, longest + 1)
        epochs = self.compared.steps.decide("epochs", epochs, possible)
        jobs = []
        for start in starts:
            for name in names:
                previous = first[family.contains.get(name, name), start]
                jobs.append(Job(name, start, 1, epochs, previous))
        self.compared.members += self._train(jobs).values()
        if len(names) == len(family.structures):
            self.compared.seconds_per_start = (clock.now() - began) / len(starts)

    def _train(self, jobs: Sequence[Job]) -> dict[tuple[str, int], Member]:
        members: dict[tuple[str, int], Member] = {}
        began, phase = clock.now(), jobs[0].phase + 1 if jobs else 1
        stage = f"comparing networks, phase {phase} of 2 ({counted(jobs[0].epochs, 'epoch')})"
        self.tell(Step(stage, 0, len(jobs), "", self._seconds_left(began, 0, len(jobs))))
        if self.workers is not None:
            results = self.workers.run(train_member, jobs, self._stopped)
        else:
            train = partial(train_member, self.compared.comparison)
            results = run_in_turn(train, jobs, self._stopped)
        for number, (index, member) in enumerate(results, 1):
            job = jobs[index]
            members[job.structure, job.start] = member
            left = self._seconds_left(began, number, len(jobs))
            best, last = _best(members.values()), f"{job.structure}, start {job.start + 1}"
            self.tell(Step(stage, number, len(jobs), best, left, last))
        return members

    def _seconds_left(self, began: float, done: int, total: int) -> float | None:
        """Return the time to the end of a timed run, or else of this stage."""
        now = clock.now()
        if self.deadline is not None:
            return max(0.0, self.deadline - now)
        return (now - began) / done * (total - done) if done else None

    def _stopped(self) -> bool:
        """Return whether a signal ended the run; a SIGTERM ends it with its own exit code."""
        if self.signals.received == signal.SIGTERM:
            self.signals.leave()
        return self.signals.received is not None


def _best(members: Iterable[Member]) -> str:
    """Return the structure with the highest mean log evidence so far."""
    values: dict[str, list[float]] = {}
    for member in members:
        values.setdefault(member.structure, []).append(member.log_evidence)
    return max(values, key=lambda name: fmean(values[name]), default="")
