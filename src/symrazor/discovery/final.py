"""Train the network to deliver on all training data, and calibrate its predictions.

The recommended network continues from its best start. If some samples can be spared for a check,
larger networks with the same symmetry are trained as well, each for its share of the time; without
a symmetry, also an ordinary one. A larger network is delivered if it predicts the check better than
the recommended one by more than a standard error. No network is delivered if it predicts the check
worse, by more than a standard error, than the network of the comparison, which has not seen these
samples either. With few samples, all are used, and the evidence per sample replaces the check.

Plug-in predictions use the trained weights; averaged ones are a mean over the posterior of the last
layer (`symrazor.inference.last_layer`). Both are calibrated on the training samples that the starts
of the recommended structure left out, and the one that predicts these samples better is the
default. Held-out data take no part in it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood
from symrazor.core.validation import counted
from symrazor.data import Tensors
from symrazor.discovery.answer import Candidate
from symrazor.discovery.budget import (
    EVIDENCE_SUBSET,
    LARGE_SAMPLES,
    MAX_FINAL_EPOCHS,
    ORDINARY_BATCH_SIZE,
    ORDINARY_LEARNING_RATE,
    FinalPlan,
    batch_size,
    evidence_interval,
    measure_costs,
    plan_final,
    result_samples,
    stored_plan,
)
from symrazor.discovery.claims import Margin
from symrazor.discovery.comparison import Compared
from symrazor.discovery.members import Member, continue_from_, log_scores
from symrazor.discovery.question import Options, Question, Tell, select, slug, subsample
from symrazor.inference.evidence import Evidence
from symrazor.inference.last_layer import (
    LastLayer,
    Unseen,
    calibrated,
    features_of,
    last_layer_posterior,
)
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import clock

MIN_CHECKED_SAMPLES = 2000
"""Training samples from which some are kept for the check."""
CHECK_SHARE, MAX_CHECK = 0.05, 1000
SMALL_CHECK_SHARE, MIN_WIDER_SAMPLES = 0.1, 300
"""Share of few samples for the check of a network that was not compared, and the fewest samples for
which one is trained."""
MIN_CALIBRATION_SAMPLES = 20
"""Left-out samples below which predictions are not calibrated on them."""
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
    """Return the network to deliver after its final training; None if that did not improve it.

    That is the recommended network, or a larger one with the same symmetry if it predicts the
    samples that are kept for the check better, by more than a standard error.
    """
    began, best = clock.now(), None
    names = _final_names(question, compared, candidate.name)
    member = max(candidate.members, key=lambda member: member.log_evidence)
    training, check = _split(question, compared, member, names != [candidate.name])
    for number, name in enumerate(names):
        left = (seconds - (clock.now() - began)) / (len(names) - number)
        previous = member if name == candidate.name else None
        final = _train_final(question, compared, name, previous, training, options, left, tell)
        if final is None:
            continue
        gain = _gain(final, candidate.fit, check)
        if gain.mean < -gain.standard_error:
            continue
        scores, temperature = log_scores(final, check)
        if best is None or _margin(scores - best[0]).z > 1:
            measured = gain if len(check[1]) else None
            best = scores, Candidate(name, final, candidate.members, temperature, measured)
    if best is None:
        tell("  the network of the comparison predicts better and is kept")
        return None
    if not len(check[1]):  # shorter trainings may ask for sharper predictions
        return replace(best[1], own_temperature=max(1.0, candidate.temperature))
    return best[1]


def _final_names(question: Question, compared: Compared, name: str) -> list[str]:
    """Return the structures of the final training, the recommended one first.

    Without a symmetry, these include the ordinary network; for a large data set it is the only one.
    """
    family, n = question.family, len(question.train[1])
    has_symmetry = name in [symmetry.structure for symmetry in family.symmetries]
    ordinary = [] if has_symmetry or family.ordinary is None else [family.ordinary.name]
    if n >= LARGE_SAMPLES and ordinary:
        return ordinary
    if n < MIN_WIDER_SAMPLES or not compared.plan.costs:
        return [name]
    wider = [family.wider[name].name] if name in family.wider else []
    return [name, *wider, *ordinary]


def _train_final(
    question: Question,
    compared: Compared,
    name: str,
    previous: Member | None,
    training: Tensors,
    options: Options,
    seconds: float,
    tell: Tell,
) -> Fit | None:
    """Train one structure on all samples but those of the check; None if that does not fit."""
    folder = options.unfinished_folder(question.name)
    file = folder and folder / f"final-{slug(name)}.json"
    make = partial(_final_plan, question, compared, name, len(training[1]), seconds)
    longest = max(MAX_FINAL_EPOCHS, compared.plan.epochs[1])
    plan = stored_plan(file, name, longest, make)
    ordinary = question.family.ordinary
    is_ordinary = ordinary is not None and name == ordinary.name
    needs_steps = previous is None and not is_ordinary  # new weights, and slow layers
    if plan is None or (needs_steps and plan.steps < compared.plan.steps):
        return None
    training = select(training, subsample(len(training[1]), plan.samples, options.seed))
    tell(
        f"  final training: {question.family.label(name)}, {counted(plan.epochs, 'epoch')} on "
        f"{len(training[1]):,} samples"
    )
    return _train(question, compared, previous, plan, training, options)


def _final_plan(
    question: Question, compared: Compared, name: str, n: int, seconds: float
) -> FinalPlan | None:
    """Return the plan of the final training of a structure on n samples."""
    began, costs = clock.now(), compared.plan.costs
    if not costs:
        return FinalPlan(name, compared.plan.epochs[1], n)
    cost = costs.get(name)
    if cost is None:
        structure = question.family.structure(name)
        largest = ORDINARY_BATCH_SIZE if structure == question.family.ordinary else n
        config = replace(compared.comparison.config, batch_size=min(batch_size(n), largest))
        cost = measure_costs([structure], question.train, question.likelihood, config)[name]
    return plan_final(name, cost, n, seconds - (clock.now() - began))


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
        resume=folder and folder / f"final-{slug(plan.name)}",
        progress=options.progress,
        evidence_samples=result_samples(plan.samples),
    )
    ordinary = question.family.ordinary
    if ordinary is not None and plan.name == ordinary.name:
        size = min(config.batch_size, ORDINARY_BATCH_SIZE)
        config = replace(config, lr=ORDINARY_LEARNING_RATE, batch_size=size, keep="last")
    with torch.random.fork_rng([]):
        torch.manual_seed(options.seed)
        model, likelihood = question.family.structure(plan.name).make(), question.likelihood()
        if previous is not None:
            precisions = continue_from_(model, likelihood, previous.state, training[0])
            config = config.change(prior_precision=precisions)
        trained = fit(model, training, likelihood, config=config)
    return trained


def _gain(final: Fit, compared: Fit, check: Tensors) -> Margin:
    """Return how much better the final network is than the one of the comparison, per sample.

    Without a check, the evidence says it.
    """
    if len(check[1]):
        return _margin(log_scores(final, check)[0] - log_scores(compared, check)[0])
    return Margin(_per_datum(final.evidence) - _per_datum(compared.evidence), MAX_EVIDENCE_LOSS)


def _margin(gains: Tensor) -> Margin:
    """Return the mean of gains and its standard error; zeros for fewer than two gains."""
    if len(gains) < 2:
        return Margin(0.0, 0.0)
    return Margin(float(gains.mean()), float(gains.std()) / math.sqrt(len(gains)))


def _per_datum(evidence: Evidence) -> float:
    return float(evidence.per_datum)


@dataclass(frozen=True)
class Calibration:
    """How the delivered network predicts.

    Args:
        averaged: whether predictions are averaged over the posterior.
        factor: factor of the logits of classes before that.
        noise: variance of the noise of standardised targets; empty for classes.
        scores: mean negative log likelihood of left-out samples, by "plug-in" and "averaged".
        n: number of left-out samples.
    """

    averaged: bool
    factor: float = 1.0
    noise: tuple[float, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    n: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        default = "averaged" if self.averaged else "plug-in"
        return {"default": default, "nll": dict(self.scores), "n": self.n}


class Start(NamedTuple):
    """A start of the recommended structure, with the samples that it left out.

    Args:
        fit: the trained network.
        temperature: temperature of its logits.
        left_out: the samples.
    """

    fit: Fit
    temperature: float
    left_out: Tensors


def calibrate(starts: Sequence[Start]) -> Calibration | None:
    """Return the better way to predict with a structure, by samples that its starts left out.

    Logits are divided by the temperature of their start first, as those of the delivered network
    are divided by the mean temperature.

    Returns:
        The calibration; None if the network has no posterior or too few samples were left out.
    """
    n = sum(len(start.left_out[1]) for start in starts)
    if n < MIN_CALIBRATION_SAMPLES:
        return None
    unseen = []
    for trained, own, (x, y) in starts:
        model, likelihood = trained.model, trained.razor.likelihood
        posterior = last_layer_posterior(model, trained.data.x, likelihood, 1 / own)
        if posterior is None:
            return None
        f, phi = features_of(model, posterior.head, x)
        unseen.append(Unseen(posterior, f / own, phi, y.cpu()))
    best, scores = calibrated(unseen)
    noise = tuple(best.noise.tolist())
    return Calibration(best.averaged, float(best.factor), noise, scores, n)


def delivered_posterior(
    network: nn.Module,
    x: Tensor,
    likelihood: Likelihood,
    scale: Tensor | float,
    calibration: Calibration | None,
) -> LastLayer | None:
    """Return the posterior of the delivered network with its calibration, or None.

    Args:
        network: the delivered network, which takes data that are not standardised.
        x: its training inputs.
        likelihood: the trained likelihood.
        scale: scale of the targets, or one divided by the temperature of the logits.
        calibration: how it predicts; None for the default of the likelihood.
    """
    posterior = last_layer_posterior(network, x, likelihood, scale)
    if posterior is None or calibration is None:
        return posterior
    factor, noise = (
        torch.tensor(part, dtype=torch.float64) for part in (calibration.factor, calibration.noise)
    )
    return replace(posterior, averaged=calibration.averaged, factor=factor, noise=noise)
