"""Train the recommended network on all training data, and keep the better of old and new.

The final training continues from the best start of the comparison. Many training samples leave
some for a check: the final network is delivered unless it predicts them worse, by more than a
standard error, than the network of the comparison, which has not seen them either. With few
samples, all are used, and the evidence per sample takes the place of the check.
"""

import math
from dataclasses import replace
from functools import partial

import torch

from symrazor.core.evidence import Evidence
from symrazor.data import Tensors
from symrazor.discovery.answer import Candidate
from symrazor.discovery.budget import (
    EVIDENCE_SUBSET,
    FinalPlan,
    batch_size,
    evidence_interval,
    plan_final,
    stored_plan,
)
from symrazor.discovery.comparison import Compared
from symrazor.discovery.members import Member, continue_from_, log_scores
from symrazor.discovery.question import Options, Question, Tell, select, subsample
from symrazor.training.fit import Fit, fit

MIN_CHECKED_SAMPLES = 2000
"""Training samples from which some are kept for the check."""
CHECK_SHARE, MAX_CHECK = 0.05, 1000
MAX_EVIDENCE_LOSS = 0.05
"""Nats per sample of evidence that the final network may lose, if no samples are kept: the noise of
an estimate by random probes."""


def train_final(
    question: Question,
    compared: Compared,
    candidate: Candidate,
    options: Options,
    seconds: float,
    tell: Tell,
) -> Candidate | None:
    """Return the recommended network after its final training; None if that did not improve it."""
    member = max(candidate.members, key=lambda member: member.log_evidence)
    training, check = _split(question, compared, member)
    folder = options.unfinished_folder(question.name)
    make = partial(_plan, compared, candidate.name, len(training[1]), seconds)
    plan = stored_plan(folder and folder / "final.json", make)
    if plan is None:
        return None
    training = select(training, subsample(len(training[1]), plan.samples, options.seed))
    tell(
        f"  final training: {question.family.label(plan.name)}, {plan.epochs} epochs on "
        f"{plan.samples:,} samples"
    )
    trained = _train(question, compared, member, plan, training, options)
    if not _is_better(trained, candidate.fit, check):
        tell("  the network of the comparison predicts better and is kept")
        return None
    return Candidate(plan.name, trained, candidate.members)


def _split(question: Question, compared: Compared, member: Member) -> tuple[Tensors, Tensors]:
    """Return the samples to train on and those for the check, which the member has not seen."""
    train, n = question.train, len(question.train[1])
    count = min(MAX_CHECK, int(CHECK_SHARE * n)) if n >= MIN_CHECKED_SAMPLES else 0
    comparison = compared.comparison
    pool = subsample(n, len(comparison.question.train[1]), comparison.seed)
    _, outside = comparison.split(member.start)
    check = pool[outside[:count]]
    is_training = torch.ones(n, dtype=torch.bool)
    is_training[check] = False
    return (train[0][is_training], train[1][is_training]), select(train, check)


def _plan(compared: Compared, name: str, n: int, seconds: float) -> FinalPlan | None:
    """Return the plan for the remaining seconds, or for as many epochs as a phase if untimed."""
    plan = compared.plan
    if plan.costs:
        return plan_final(name, plan.costs[name], n, seconds)
    return FinalPlan(name, plan.epochs[1], n)


def _train(
    question: Question,
    compared: Compared,
    member: Member,
    plan: FinalPlan,
    training: Tensors,
    options: Options,
) -> Fit:
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
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(options.seed)
        model, likelihood = question.family.structure(plan.name).make(), question.likelihood()
        precisions = continue_from_(model, likelihood, member.state, training[0])
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
