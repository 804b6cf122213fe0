"""Compare the structures of a question: train several starts of each, side by side.

All structures are trained in two phases from the first starts (`symrazor.discovery.members`). If a
claim is then undecided and time is left, further starts follow, of all structures, until it is
decided or the time for the comparison is used. What was done is written to a file, so that an
interrupted run continues with the same trainings.

The recommended network is then trained on all training data, from its best start (`train_final`).
Many training samples leave some for a check: the final network is delivered unless it predicts them
worse, by more than a standard error, than the network of the comparison, which has not seen them
either. With few samples, all are used, and the evidence per sample takes the place of the check.
"""

import contextlib
import json
import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from symrazor.accelerate.devices import run_in_turn
from symrazor.accelerate.workers import Workers
from symrazor.core.files import parse_json, write_atomically
from symrazor.data import Tensors
from symrazor.discovery.answer import Candidate
from symrazor.discovery.budget import (
    DAMAGED,
    EVIDENCE_SUBSET,
    LARGE_SAMPLES,
    MIN_EPOCHS,
    ORDINARY_LEARNING_RATE,
    FinalPlan,
    Plan,
    batch_size,
    comparison_shares,
    evidence_interval,
    measure_costs,
    n_workers,
    plan_final,
    plan_question,
    result_samples,
    stored_plan,
)
from symrazor.discovery.claims import Claim, claim_of
from symrazor.discovery.members import (
    Comparison,
    Job,
    Member,
    comparison_data,
    continue_from_,
    log_scores,
    train_member,
)
from symrazor.discovery.question import Options, Question, Step, Tell, select, subsample
from symrazor.inference.evidence import Evidence
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import Interruption, clock

MAX_STARTS = 10
"""Starts of a structure after which a comparison ends undecided."""
STEPS_FILE = "steps.json"
MIN_CHECKED_SAMPLES = 2000
"""Training samples from which some are kept for the check."""
CHECK_SHARE, MAX_CHECK = 0.05, 1000
SMALL_CHECK_SHARE, MIN_WIDER_SAMPLES = 0.1, 300
"""Share of few samples for the check of a network that was not compared, and the fewest samples for
which one is trained."""
MAX_EVIDENCE_LOSS = 0.05
"""Nats per sample of evidence that the final network may lose, if no samples are kept: the noise of
an estimate by random probes."""


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
        claims: dict[str, Claim] = {}
        family = self.comparison.question.family
        for symmetry in family.symmetries:
            nested = [k for k, inner in family.contains.items() if inner == symmetry.structure]
            implied_by = claims.get(symmetry.follows_from)
            if implied_by is not None and implied_by.holds is not False:
                continue
            claim = claim_of(symmetry, self.members, nested)
            if claim is not None:
                claims[symmetry.name] = claim
        return tuple(claims.values())

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
    shared = comparison_data(question, plan.samples, options.seed)
    comparison = Comparison(shared, config, plan.samples, options.seed, folder)
    compared = Compared(comparison, plan)
    steps = _Steps(folder and folder / STEPS_FILE)
    limit = comparison_shares(len(question.train[1]))[1] * 60 * options.minutes
    jobs_at_once = min(n_workers(options), options.starts * len(question.family.structures))
    is_pool = jobs_at_once > 1
    pool = Workers(jobs_at_once, comparison) if is_pool else contextlib.nullcontext()
    with pool as workers, Interruption(folder is not None) as signals:
        deadline = began + 60 * options.minutes if plan.costs else None
        runner = _Runner(workers, compared, signals, tell, options.starts, deadline)
        runner.run(range(options.starts), steps)
        while compared.undecided and plan.costs:
            first, more = compared.n_starts, max(2, 1 if workers is None else workers.count)
            more = min(more, MAX_STARTS - first)
            spent = clock.now() - began
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
            with contextlib.suppress(*DAMAGED):
                self.stored = [(str(k), int(v)) for k, v in parse_json(self.file)]

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

    workers: Workers | None
    compared: Compared
    signals: Interruption
    tell: Tell
    n_planned: int
    deadline: float | None = None
    seconds_per_start: float = 0.0

    def run(self, starts: Sequence[int], steps: _Steps) -> None:
        """Train all structures from these starts and add the results."""
        began = clock.now()
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
            slowdown = (clock.now() - began) / expected if expected else 1.0
            shortest = min(epochs, MIN_EPOCHS)
            epochs = max(shortest, round(epochs / max(1.0, slowdown)))
        epochs = steps.decide("epochs", epochs)
        jobs = []
        for start in starts:
            for name in names:
                previous = first[family.contains.get(name, name), start]
                jobs.append(Job(name, start, 1, epochs, previous))
        self.compared.members += self._train(jobs).values()
        self.seconds_per_start = (clock.now() - began) / len(starts)

    def _train(self, jobs: Sequence[Job]) -> dict[tuple[str, int], Member]:
        members: dict[tuple[str, int], Member] = {}
        began, phase = clock.now(), jobs[0].phase + 1 if jobs else 1
        stage = f"comparing networks, phase {phase} of 2 ({jobs[0].epochs} epochs)"
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


def train_final(
    question: Question,
    compared: Compared,
    candidate: Candidate,
    options: Options,
    seconds: float,
    tell: Tell,
) -> Candidate | None:
    """Return the network to deliver after its final training; None if that did not improve it.

    That is the recommended network, or a wider one with the same symmetry; with many data and no
    symmetry built in, the ordinary one.
    """
    member = max(candidate.members, key=lambda member: member.log_evidence)
    folder = options.unfinished_folder(question.name)
    make = partial(_final_plan, question, compared, candidate.name, seconds)
    plan = stored_plan(folder and folder / "final.json", make)
    if plan is None:
        return None
    previous = member if plan.name == candidate.name else None
    training, check = _split(question, compared, member, previous is None)
    training = select(training, subsample(len(training[1]), plan.samples, options.seed))
    tell(
        f"  final training: {question.family.label(plan.name)}, {plan.epochs} epochs on "
        f"{plan.samples:,} samples"
    )
    trained = _train(question, compared, previous, plan, training, options)
    if not _is_better(trained, candidate.fit, check):
        tell("  the network of the comparison predicts better and is kept")
        return None
    # Shorter trainings may ask for sharper predictions. The final network is past that.
    temperature = max(1.0, candidate.temperature)
    if len(check[1]):
        temperature = log_scores(trained, check)[1]
    return Candidate(plan.name, trained, candidate.members, temperature)


def _final_plan(
    question: Question, compared: Compared, name: str, seconds: float
) -> FinalPlan | None:
    """Return the plan for the recommended network, or for a larger one with the same symmetry.

    The larger one starts from new weights. Unless it is the ordinary one, it needs at least as many
    steps as the networks of the comparison had.
    """
    began, family, n = clock.now(), question.family, len(question.train[1])
    costs, epochs = compared.plan.costs, compared.plan.epochs[1]
    has_symmetry = name in [symmetry.structure for symmetry in family.symmetries]
    larger = family.wider.get(name) if costs and n >= MIN_WIDER_SAMPLES else None
    if n >= LARGE_SAMPLES and not has_symmetry and family.ordinary is not None:
        larger = family.ordinary
    if larger is not None and not costs:
        return FinalPlan(larger.name, epochs, n)
    if larger is not None:
        config = replace(compared.comparison.config, batch_size=batch_size(n))
        cost = measure_costs([larger], question.train, question.likelihood, config)[larger.name]
        seconds -= clock.now() - began
        plan = plan_final(larger.name, cost, n, seconds)
        if plan is not None and (larger is family.ordinary or plan.steps >= compared.plan.steps):
            return plan
    return plan_final(name, costs[name], n, seconds) if costs else FinalPlan(name, epochs, n)


def _split(
    question: Question, compared: Compared, member: Member, is_larger: bool
) -> tuple[Tensors, Tensors]:
    """Return the samples to train on and those for the check, which the member has not seen."""
    train, n = question.train, len(question.train[1])
    count = min(MAX_CHECK, int(CHECK_SHARE * n)) if n >= MIN_CHECKED_SAMPLES else 0
    if is_larger:  # another network: evidences do not tell whether it predicts better
        count = min(MAX_CHECK, max(count, int(SMALL_CHECK_SHARE * n)))
    comparison = compared.comparison
    pool = subsample(n, len(comparison.question.train[1]), comparison.seed)
    _, outside = comparison.split(member.start)
    check = pool[outside[:count]]
    is_training = torch.ones(n, dtype=torch.bool)
    is_training[check] = False
    if question.together is not None:
        is_training[torch.isin(question.together, question.together[check])] = False
    return (train[0][is_training], train[1][is_training]), select(train, check)


def _train(
    question: Question,
    compared: Compared,
    previous: Member | None,
    plan: FinalPlan,
    training: Tensors,
    options: Options,
) -> Fit:
    """Continue from a network of the comparison; with None, train from new weights."""
    config, folder = compared.comparison.config, options.unfinished_folder(question.name)
    config = replace(
        config,
        epochs=plan.epochs,
        every=evidence_interval(plan.epochs, plan.evidence_steps),
        subset=min(plan.samples, EVIDENCE_SUBSET),
        batch_size=config.batch_size if question.config else batch_size(plan.samples),
        start="given",
        resume=folder and folder / "final",
        progress=options.progress,
        evidence_samples=result_samples(plan.samples),
    )
    ordinary = question.family.ordinary
    if ordinary is not None and plan.name == ordinary.name:
        config = replace(config, lr=ORDINARY_LEARNING_RATE, keep="last")
    with torch.random.fork_rng([]):
        torch.manual_seed(options.seed)
        model, likelihood = question.family.structure(plan.name).make(), question.likelihood()
        if previous is not None:
            precisions = continue_from_(model, likelihood, previous.state, training[0])
            config = config.change(prior_precision=precisions)
        trained = fit(model, training, likelihood, config=config)
    return trained


def _is_better(final: Fit, compared: Fit, check: Tensors) -> bool:
    """Return whether the final network is at least as good as the one of the comparison."""
    if len(check[1]):
        gain = log_scores(final, check)[0] - log_scores(compared, check)[0]
        return float(gain.mean()) >= -float(gain.std()) / math.sqrt(len(gain))
    return _per_datum(final.evidence) >= _per_datum(compared.evidence) - MAX_EVIDENCE_LOSS


def _per_datum(evidence: Evidence) -> float:
    return float(evidence.per_datum)


def _best(members: Iterable[Member]) -> str:
    """Return the structure with the highest mean log evidence so far."""
    values: dict[str, list[float]] = {}
    for member in members:
        values.setdefault(member.structure, []).append(member.log_evidence)
    return max(values, key=lambda name: fmean(values[name]), default="")
