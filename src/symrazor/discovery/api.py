"""Run `discover`: data in, a `Discovery` out.

The candidates are trained within the available time, ranked by their evidence, and the recommended
network is trained for the remaining time.
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.core.likelihood import Categorical, Gaussian
from symrazor.data import Dataset, Tensors, dataset, read
from symrazor.data.arrays import Array, as_both_labels, as_inputs, as_labels, prepare
from symrazor.data.datasets import Task, as_kind
from symrazor.discovery.answer import (
    Answer,
    Candidate,
    last_rise,
    left_out_samples,
    log_scores,
    recommend,
    unconverged_rival,
)
from symrazor.discovery.budget import (
    MIN_STEPS,
    Plan,
    RefitPlan,
    initial_precisions,
    plan_question,
    plan_refit,
    stored_plan,
    timed_config,
)
from symrazor.discovery.families import candidates_for
from symrazor.discovery.invariances import TIME_SHARE, learn_invariances, wants_invariances
from symrazor.discovery.question import (
    MakeLikelihood,
    Options,
    Question,
    Structure,
    Tell,
    select,
    slug,
    subsample,
)
from symrazor.discovery.result import Discovery, QuestionResult
from symrazor.discovery.trajectories import learn_dynamics
from symrazor.groups import GroupAction, TrivialAction, action_on
from symrazor.symmetry.equivariance import Action, equivariance_error
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import Fit, fit
from symrazor.training.options import FitConfig

MAX_HELD_OUT = 5000
"""Largest number of samples that are held out for the report."""
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


def discover(
    x: Any,
    y: Any = None,
    *,
    test: tuple[Any, Any] | None = None,
    kind: str | None = None,
    task: Task | None = None,
    options: Options | None = None,
    tell: Tell = lambda text: None,
    **changes: Any,
) -> Discovery:
    """Find the structure that the data support, and train a network that has it.

    All candidates are trained on the same data for the same number of epochs and ranked by their
    evidence, which needs no held-out data. A fifth of the data is held out nevertheless, so that
    the report can show how well each network predicts.

    Args:
        x: inputs as an array or tensor, a `Dataset`, or the path of a file or folder
            (`symrazor.data.read`).
        y: labels: integers or text for classes, other numbers for regression.
        test: held-out inputs and labels; by default a fifth of the data, at most 5,000 samples.
        kind: kind of the inputs: "image", "volume", "series", "set", "vector", "trajectory", or a
            registered kind (`symrazor.discovery.register_kind`). By default it is recognised.
        task: "classification" or "regression". By default it is recognised.
        options: all options. Single options can be passed by name, as in
            `discover(x, y, minutes=5, seed=1)`.
        tell: called with progress messages.
        **changes: single options, see `Options`.

    Raises:
        ValueError: data or options that cannot be used.
        KeyboardInterrupt: stopped; with `out`, the same call resumes the run.
    """
    options = (options or Options()).change(**changes)
    data = as_dataset(x, y, test, kind, task)
    tell(f"{data.source}: {data.describe()}")
    if data.kind == "trajectory":
        if options.groups is not None:
            raise ValueError("groups has no effect on trajectories. Remove it.")
        return Discovery(dynamics=learn_dynamics(data, options), data=data)
    return Discovery([analyse(data, options, tell)])


def analyse(data: Dataset, options: Options, tell: Tell) -> QuestionResult:
    """Compare the candidates on one data set, and learn invariances of images."""
    data, test = split_held_out(data, options.held_out, options.seed)
    family = candidates_for(data, options.groups)
    preparation = prepare(data, same_scale=bool(family.groups))
    likelihood: MakeLikelihood = Categorical
    if data.task == "regression":
        likelihood = partial(Gaussian, outputs=data.outputs if data.outputs > 1 else None)
    question = Question(
        Path(data.source).stem or "data",
        f"Which structure do the data support? ({data.describe()})",
        family,
        preparation.data(data.labelled),
        None if test is None else preparation.data(test),
        likelihood,
    )
    minutes = TIME_SHARE * options.minutes if wants_invariances(data, options) else 0.0
    compared = options.change(minutes=options.minutes - minutes)
    answer = answer_question(question, compared, tell)
    if minutes:
        remaining = options.change(minutes=minutes)
        invariances = learn_invariances(question, answer.recommended.name, remaining, tell)
        answer = replace(answer, invariances=invariances)
    return QuestionResult(data, answer, preparation, test)


def split_held_out(data: Dataset, share: float, seed: int) -> tuple[Dataset, Tensors | None]:
    """Return training and held-out data: the test set of the data, or a share of each class."""
    x, y = data.labelled
    if data.test is not None:
        return data, data.test
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    share = min(share, MAX_HELD_OUT / len(y))
    strata = [order]
    if data.task == "classification":
        strata = [order[y[order] == label] for label in range(data.outputs)]
    held_out = torch.cat([stratum[: int(share * len(stratum))] for stratum in strata])
    if len(held_out) == 0:
        return data, None
    is_training = torch.ones(len(y), dtype=torch.bool)
    is_training[held_out] = False
    return data.part(is_training), (x[held_out], y[held_out])


def as_dataset(x: Any, y: Any, test: Any, kind: str | None, task: Task | None) -> Dataset:
    """Return the inputs of `discover` as a `Dataset`."""
    if isinstance(x, (str, Path)):
        return read(x, kind, task)
    if isinstance(x, Dataset):
        if y is not None or test is not None or task not in (None, x.task):
            raise ValueError(
                "y, test and task have no effect together with a Dataset. Pass them to "
                "dataset(x, y, task=..., test=...)."
            )
        return x if kind is None else replace(x, x=as_kind(x.x, kind, x.source), kind=kind)
    labels, names = (None, ()) if y is None else as_labels(_label_array(y), "y")
    held_out = None
    if y is not None and test is not None:
        labels, test_labels, names = as_both_labels(_label_array(y), _label_array(test[1]), "y")
        held_out = (_input_tensor(test[0]), test_labels)
    return dataset(_input_tensor(x), labels, kind=kind, task=task, names=names, test=held_out)


def _input_tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        return as_inputs(np.ascontiguousarray(values), "x")
    except ValueError as error:  # rows of different lengths, or no numbers
        raise ValueError(f"x is not an array of numbers: {error}") from error


def _label_array(values: Any) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return np.asarray(values.float() if values.dtype == torch.bfloat16 else values)
    array = np.asarray(values)
    return array.astype(str) if array.dtype.kind == "O" else array


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
    folder = options.unfinished_folder(question.name)
    make = partial(_refit_plan, question, answer, plan, seconds[name], left)
    refit = stored_plan(folder and folder / "refit.json", make)
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
        minutes = factor * options.minutes
        rounded_up = math.ceil(minutes) if minutes > 1 else math.ceil(10 * minutes) / 10
        remedy = f"--minutes {rounded_up:g}"
    else:
        fitted, remedy = "were made", f"--epochs {math.ceil(factor * plan.epochs)}"
    return (
        f"Provisional: only {steps} training steps {fitted}, {MIN_STEPS} are needed (run with "
        f"`{remedy}`).",
    )


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
    question: Question, answer: Answer, plan: Plan, seconds: float, left: float
) -> RefitPlan | None:
    """Return the plan of the final training; None if no epoch fits.

    `seconds` is the time that the recommended candidate took, `left` the time that is left.
    """
    name, trained = answer.recommended_name, answer.recommended.fit
    loop = trained.history[-1]["seconds"]
    cost = plan.costs[name].corrected(plan.samples, plan.epochs, loop, seconds - loop)
    refit = plan_refit(name, cost, len(question.train[1]), left)
    if refit is None:
        return None
    return replace(refit, precisions=initial_precisions(trained.razor, refit.samples))


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
    """Add the spread of the evidence over random probes where another candidate is close."""
    for candidate in candidates:
        is_close = any(
            other is not candidate and abs(other.log_evidence - candidate.log_evidence) < CLOSE_NATS
            for other in candidates
        )
        razor, data = candidate.fit.razor, candidate.fit.data
        if not is_close or razor.config.estimator != "mc":  # an exact curvature has no spread
            yield candidate
            continue
        values = [float(razor.evidence(data).log_evidence) for _ in range(EXTRA_PROBES)]
        yield replace(candidate, spread=statistics.stdev([candidate.log_evidence, *values]))
