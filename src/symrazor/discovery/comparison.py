"""Train the candidates of one question within the available time, and compare them."""

import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch

from symrazor.core.files import write_atomically
from symrazor.data import Tensors
from symrazor.discovery.answer import Answer, Candidate
from symrazor.discovery.budget import (
    MIN_STEPS,
    Plan,
    RefitPlan,
    initial_precisions,
    plan_question,
    plan_refit,
    timed_config,
)
from symrazor.discovery.candidates import Structure, slug
from symrazor.discovery.question import Options, Question, Tell, select, subsample
from symrazor.discovery.selection import (
    last_rise,
    left_out_samples,
    log_scores,
    recommend,
    unconverged_rival,
)
from symrazor.groups import GroupAction, TrivialAction, action_on
from symrazor.symmetry.equivariance import Action, equivariance_error
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import Fit, fit
from symrazor.training.options import FitConfig

EXTRA_PROBES = 3
"""Further evidence estimates of candidates whose evidence is close to that of another."""
CLOSE_NATS = 30.0
LATEST_END = 0.6
"""Candidates that would end after this share of the available time are not trained."""
RANDOM_ORDERS = 8
MAX_TRANSFORMED_SAMPLES = 128
"""Training samples on which invariance under groups is measured."""
MAX_SCORED_SAMPLES = 2000
"""Held-out samples on which candidates of a timed comparison are scored."""


def answer_question(question: Question, options: Options, tell: Tell) -> Answer:
    """Train and rank the candidates, then train the recommended one for the remaining time.

    The first candidate is always trained, the others while time is left. With a given number of
    epochs there is no final training.
    """
    started = time.perf_counter()
    config, plan = plan_question(question, options, tell)
    used = subsample(len(question.train[1]), plan.samples, options.seed)
    train = select(question.train, used)
    candidates, seconds = _train_candidates(question, train, config, plan, options, tell)
    if plan.costs and (left_out := left_out_samples(question.train, used)) is not None:
        candidates = [replace(c, left_out=log_scores(c.fit, left_out)) for c in candidates]
    steps = config.epochs * math.ceil(len(train[1]) / config.batch_size)
    ranked = sorted(_with_spread(candidates), key=lambda c: -c.log_evidence)
    notes = _notes(steps, plan, options)
    answer = Answer(question.name, question.text, question.family, ranked, notes)
    if not plan.costs:
        return answer
    rival = unconverged_rival(answer)
    if rival is not None:
        label = question.family.label(rival.name)
        rise = (
            f"the evidence of {label} still rose by {last_rise(rival):,.0f} nats at the last step"
        )
        notes = (*notes, f"Not converged: {rise}. Allow more time.")
    name = recommend(answer, provisional=steps < MIN_STEPS or rival is not None)
    answer = replace(answer, notes=notes, recommended_name=name)
    left = 60 * options.minutes - (time.perf_counter() - started)
    refit = _refit_plan(question, answer, plan, seconds[name], left, options)
    if refit is None or refit.epochs * refit.samples < plan.epochs * plan.samples:
        return answer  # too little time is left to do better
    tell(
        f"  final training: {question.family.label(refit.name)}, {refit.epochs} epochs on "
        f"{refit.samples:,} samples"
    )
    final = _refit(question, refit, config, options)
    return replace(answer, recommended_name=refit.name, final=final)


def _notes(steps: int, plan: Plan, options: Options) -> tuple[str, ...]:
    """Return a note if the comparison had too few training steps, with the option to change."""
    if steps >= MIN_STEPS:
        return ()
    factor = MIN_STEPS / steps
    if plan.costs:
        fitted = f"fitted into {options.minutes:g} minutes"
        remedy = f"--minutes {_rounded_up(factor * options.minutes)}"
    else:
        fitted, remedy = "were made", f"--epochs {math.ceil(factor * plan.epochs)}"
    return (
        f"Provisional: only {steps} training steps {fitted}, {MIN_STEPS} are needed (run with "
        f"`{remedy}`).",
    )


def _rounded_up(minutes: float) -> str:
    return f"{math.ceil(minutes):d}" if minutes > 1 else f"{math.ceil(10 * minutes) / 10:g}"


def _train_candidates(
    question: Question,
    train: Tensors,
    config: FitConfig,
    plan: Plan,
    options: Options,
    tell: Tell,
) -> tuple[list[Candidate], dict[str, float]]:
    """Return the trained candidates, and the seconds that each of them took."""
    structures, expected = question.family.structures, plan.seconds
    deadline = time.perf_counter() + LATEST_END * 60 * options.minutes
    candidates: list[Candidate] = []
    spent: dict[str, float] = {}
    slowdown = 1.0  # of this run, relative to the plan
    for number, structure in enumerate(structures, 1):
        position = f"{number} of {len(structures)}"
        started = time.perf_counter()
        end = started + slowdown * expected.get(structure.name, 0.0)
        if candidates and expected and end > deadline:
            tell(f"  {position}: {structure.name} skipped, no time left")
            continue
        candidate = _train(question, structure, train, config, options)
        candidates.append(candidate)
        seconds = candidate.fit.history[-1]["seconds"]
        spent[structure.name] = max(seconds, time.perf_counter() - started)
        if expected:
            slowdown = max(1.0, sum(spent.values()) / sum(expected[name] for name in spent))
        epochs = "1 epoch" if config.epochs == 1 else f"{config.epochs} epochs"
        tell(f"  {position}: {candidate.name} done, {epochs} in {seconds:.0f} s")
    return candidates, spent


def _refit_plan(
    question: Question, answer: Answer, plan: Plan, seconds: float, left: float, options: Options
) -> RefitPlan | None:
    """Return the plan of the final training: the stored one of an interrupted run, or a new one.

    Args:
        question: the question.
        answer: its answer so far, with the recommended name.
        plan: plan of the comparison.
        seconds: time that the recommended candidate took.
        left: seconds that are left.
        options: options of the run.
    """
    name, trained = answer.recommended_name, answer.recommended.fit
    loop = trained.history[-1]["seconds"]
    cost = plan.costs[name].corrected(plan.samples, plan.epochs, loop, seconds - loop)
    refit = plan_refit(name, cost, len(question.train[1]), left)
    if refit is not None:
        refit = replace(refit, precisions=initial_precisions(trained.razor, refit.samples))
    folder = options.unfinished_folder(question.name)
    if folder is None:
        return refit
    file = folder / "refit.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RefitPlan(**json.loads(file.read_text()))
    if refit is not None:
        write_atomically(file, json.dumps(asdict(refit)).encode())
    return refit


def _refit(question: Question, plan: RefitPlan, config: FitConfig, options: Options) -> Candidate:
    """Train the recommended network from new initial weights, as planned."""
    used = subsample(len(question.train[1]), plan.samples, options.seed)
    config = timed_config(config, plan.epochs, plan.samples, plan.evidence_steps)
    if plan.precisions:
        config = config.change(prior_precision=plan.precisions)
    structure = question.family.structure(plan.name)
    return _train(question, structure, select(question.train, used), config, options, "refit")


def _train(
    question: Question,
    structure: Structure,
    train: Tensors,
    config: FitConfig,
    options: Options,
    folder_name: str | None = None,
) -> Candidate:
    """Train one network, score it on held-out data and measure its invariances."""
    is_refit, is_timed = folder_name is not None, question.config is None
    folder = options.unfinished_folder(question.name)
    folder = folder and folder / slug(folder_name or structure.name)
    with torch.random.fork_rng([]):
        torch.manual_seed(options.seed)
        model = structure.make()
        trained = fit(
            model,
            train,
            question.likelihood(),
            test=None if is_timed else question.test,  # timed runs are scored once, at the end
            config=replace(config, resume=folder, device=options.resolved_device()),
        )
    if question.test is not None and is_timed:
        n = len(question.test[1])
        index = subsample(n, n if is_refit else MAX_SCORED_SAMPLES, options.seed)
        x, y = (part.to(trained.data.x.device) for part in select(question.test, index))
        test = trained.razor.likelihood.scores(outputs(model, x), y)
        trained.reading = replace(trained.reading, test=test)
    _measure_invariances(question, trained, train[0], options.seed)
    return Candidate(structure.name, trained)


def _measure_invariances(question: Question, trained: Fit, x: torch.Tensor, seed: int) -> None:
    """Add the errors under permutations of points and under the groups of the user."""
    model = trained.model
    x = x[:MAX_TRANSFORMED_SAMPLES].to(next(model.parameters()).device)
    actions: dict[str, Sequence[Action] | tuple[GroupAction, GroupAction]] = {}
    if question.family.permutes_points:
        actions["permutation"] = random_permutations(x.shape[2], seed)
    for name, group in question.family.groups.items():
        actions[name] = (action_on(group, x.shape), TrivialAction(group))
    errors = {name: equivariance_error(model, x, action) for name, action in actions.items()}
    measured = {**trained.reading.equivariance_error, **errors}
    trained.reading = replace(trained.reading, equivariance_error=measured)


def random_permutations(points: int, seed: int) -> list[Action]:
    """Return random permutations of the points of [n, features, points]; outputs are invariant."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(points, generator=generator) for _ in range(RANDOM_ORDERS)]
    return [Action(lambda x, o=o: x[:, :, o.to(x.device)], (lambda y: y,)) for o in orders]  # type: ignore[misc]


def _with_spread(candidates: list[Candidate]) -> Iterator[Candidate]:
    """Add the spread of the evidence where another candidate is close."""
    for candidate in candidates:
        is_close = any(
            other is not candidate and abs(other.log_evidence - candidate.log_evidence) < CLOSE_NATS
            for other in candidates
        )
        yield replace(candidate, spread=_spread(candidate.fit)) if is_close else candidate


def _spread(trained: Fit) -> float:
    """Return the standard deviation of the evidence over probes; 0 for an exact curvature."""
    if trained.razor.config.estimator != "mc":
        return 0.0
    values = [float(trained.razor.evidence(trained.data).log_evidence) for _ in range(EXTRA_PROBES)]
    return statistics.stdev([float(trained.evidence.log_evidence), *values])
