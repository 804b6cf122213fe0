# Over 400 lines: the public function, and each step that it takes.
"""Run `discover`: data in, a `Discovery` out.

The candidates are compared over several starts, and the recommended network is trained on all
training data for the remaining time.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.core.choices import Task
from symrazor.core.files import BUDGET_VARIABLE, budget
from symrazor.core.likelihood import Categorical, Gaussian
from symrazor.data import Dataset, Tensors, dataset
from symrazor.data import read as read_data
from symrazor.data.arrays import (
    Array,
    FileContents,
    as_arrays,
    as_both_labels,
    as_inputs,
    as_labels,
    labelled_only,
    prepare,
)
from symrazor.data.categories import is_missing
from symrazor.data.datasets import MIN_SAMPLES
from symrazor.data.shapes import as_kind, as_numbers
from symrazor.discovery.answer import Answer, Candidate, recommend
from symrazor.discovery.budget import LARGE_SAMPLES, MIN_STEPS, comparison_shares
from symrazor.discovery.claims import remedy
from symrazor.discovery.comparison import Compared, add_starts, compare
from symrazor.discovery.families import candidates_for
from symrazor.discovery.final import Calibration, Start, calibrate, train_final
from symrazor.discovery.invariances import (
    TIME_SHARE,
    LearnedInvariances,
    learn_invariances,
    wants_invariances,
)
from symrazor.discovery.question import (
    MakeLikelihood,
    Options,
    Question,
    Tell,
    folds_of,
    select,
    shown_messages,
    subsample,
)
from symrazor.discovery.result import Discovery, QuestionResult
from symrazor.discovery.trajectories import learn_dynamics
from symrazor.groups import GroupAction, TrivialAction, action_on
from symrazor.symmetry.equivariance import Action, equivariance_error
from symrazor.symmetry.reading import read
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import PRUNED, Fit, equivariance_inputs
from symrazor.training.loop import clock, in_notebook

STANDARDISED_BYTES = 8
"""Memory of a standardised number and of its copy in a selection of samples."""
MIN_FINAL_SHARE = 0.3
"""Share of the time that further starts leave for the final training."""
MAX_HELD_OUT = 5000
"""Largest number of samples that are held out for the report."""
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
    together: Any = None,
    kind: str | None = None,
    task: Task | None = None,
    header: bool | None = None,
    columns: Sequence[str] = (),
    options: Options | None = None,
    tell: Tell | None = None,
    **changes: Any,
) -> Discovery:
    """Find the structure that the data support, and train a network that has it.

    All candidates are trained from the same starts for the same number of epochs. Their evidence,
    and how well they predict training samples that a start leaves out, decide about the symmetry; a
    decision that is not sure is called undecided. A fifth of the data is held out from all this, so
    that the report can show how well each network predicts.

    Args:
        x: inputs as an array, a tensor or a frame of pandas or polars; a torch data set or
            `DataLoader`, or a Hugging Face data set, with the labels; a `symrazor.data.Dataset`; or
            the path of a file or folder (`symrazor.data.read`).
        y: labels: integers or text for classes, other numbers for regression.
        test: held-out inputs and labels; by default a fifth of the data, at most 5,000 samples.
        together: one value per sample, such as the patient, or the name of a column; samples with
            the same value stay on one side of every split.
        kind: kind of the inputs: "image", "volume", "series", "set", "vector", "trajectory", or a
            registered kind (`symrazor.discovery.register_kind`). By default it is recognised.
            "series-last" for series [n, time, channels].
        task: "classification" or "regression". By default it is recognised.
        header: whether the first row of a CSV file names the columns, if that is not clear.
        columns: columns of a table to use as inputs; by default all but the label.
        options: all options. Single options can be passed by name, as in
            `discover(x, y, minutes=5, seed=1)`.
        tell: called with progress messages. By default, a notebook shows a bar.
        **changes: single options, see `Options`.

    Raises:
        AmbiguousDataError: data that can be read in several ways; the message names the option.
        ValueError: data or options that cannot be used.
        KeyboardInterrupt: stopped; with `out`, the same call resumes the run.
    """
    options = (options or Options()).change(**changes)
    if isinstance(x, (str, Path)):
        data = read_data(x, kind, task, header=header, columns=columns, together=together)
    else:
        data = as_dataset(x, y, test, kind, task, together)
    with shown_messages(tell, options.progress) as report:
        if in_notebook():
            options = options.change(progress=False)  # one bar for everything
        report(f"{data.source}: {data.describe()}")
        if data.kind == "trajectory":
            if options.groups is not None:
                raise ValueError("groups has no effect on trajectories. Remove it.")
            return Discovery(dynamics=learn_dynamics(data, options), data=data)
        return Discovery([analyse(data, options, report)])


def analyse(data: Dataset, options: Options, tell: Tell) -> QuestionResult:
    """Compare the candidates on one data set, and learn invariances of images."""
    data = fitting_memory(data, options.seed)
    data, test = split_held_out(data, options.held_out, options.seed)
    family = candidates_for(data, options.groups)
    acts_by_matrices = any(group.permutations is None for group in family.groups.values())
    preparation = prepare(data, bool(family.groups), centred=not acts_by_matrices)
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
        together=data.together,
    )
    return QuestionResult(data, _answer_image(question, data, options, tell), preparation, test)


def _answer_image(question: Question, data: Dataset, options: Options, tell: Tell) -> Answer:
    """Answer a question; for images, also learn invariances within their share of the time.

    Time that they leave is for further starts, if a claim is undecided, and the final training.
    """
    if not wants_invariances(data, options):
        return answer_question(question, options, tell)
    began, available = clock.now(), 60 * options.minutes
    share = TIME_SHARE / 3 if len(question.train[1]) >= LARGE_SAMPLES else TIME_SHARE
    shorter = options.change(minutes=(1 - share) * options.minutes)
    compared = compare(question, shorter, tell)
    answer, compare_seconds = compared_answer(question, compared, options), clock.now() - began
    chosen, remaining = answer.recommended, options.change(minutes=share * options.minutes)
    rival = torch.cat([member.left_out for member in chosen.members])
    unused = (1 - share) * available - compare_seconds
    spare = 0.0 if compared.undecided else unused
    invariances = learn_invariances(question, chosen.name, rival, remaining, tell, spare, unused)
    left = available - (clock.now() - began)
    limit = comparison_shares(len(question.train[1]))[1] * available - compare_seconds
    if add_starts(compared, options, tell, min(limit, left - MIN_FINAL_SHARE * available)):
        answer = compared_answer(question, compared, options)
    learned = invariances if isinstance(invariances, LearnedInvariances) else None
    if learned is not None and learned.delivered is not None:
        fit, temperature = learned.delivered, learned.temperature
        final: Candidate | None = Candidate(learned.network, fit, chosen.members, temperature)
    else:
        left = available - (clock.now() - began)
        final = train_final(question, compared, answer.recommended, options, left, tell)
    left = available - (clock.now() - began)
    answer = with_last_starts(question, compared, answer, options, left, tell)
    if final is not None:
        score(question, final, MAX_HELD_OUT, options.seed)
    return replace(answer, invariances=invariances, final=final)


def with_last_starts(
    question: Question,
    compared: Compared,
    answer: Answer,
    options: Options,
    seconds: float,
    tell: Tell,
) -> Answer:
    """Return the answer after further starts in the time that the final training left, if any.

    They help to decide a claim. The network that is delivered has been trained.
    """
    if not add_starts(compared, options, tell, seconds):
        return answer
    return compared_answer(question, compared, options, answer.recommended_name)


def fitting_memory(data: Dataset, seed: int) -> Dataset:
    """Return the data, or a half, a quarter, ... of them at random, to fit the memory budget.

    Large files are mapped into memory; discovery copies and converts the samples that it uses.
    Halves make the number of samples the same for a resumed run, although the free memory varies.
    """
    train, test = data.labelled, data.test
    index = _fitting_index(train, data, seed, "")
    if test is not None:
        data = replace(data, test=select(test, _fitting_index(test, data, seed, "test ")))
    return (data if len(index) == len(train[1]) else data.part(index)).converted()


def _fitting_index(part: Tensors, data: Dataset, seed: int, name: str) -> Tensor:
    """Return the indices of the samples that fit the memory budget; warn if these are not all."""
    x, y = part
    number_bytes = as_numbers(x[:1], data.kind).element_size() + STANDARDISED_BYTES
    count, allowed = len(y), budget()
    while count // 2 >= MIN_SAMPLES and count * x[:1].numel() * number_bytes > allowed:
        count //= 2
    if count < len(y):
        warnings.warn(
            f"{data.source}: using {count:,} of {len(y):,} {name}samples, chosen at random. More "
            f"do not fit into {allowed / 2**30:,.2f} GiB of memory. Set {BUDGET_VARIABLE} to use "
            "more.",
            stacklevel=3,
        )
    return subsample(len(y), count, seed)


def split_held_out(data: Dataset, share: float, seed: int) -> tuple[Dataset, Tensors | None]:
    """Return training and held-out data: the test set of the data, or a share of each class."""
    x, y = data.labelled
    if data.test is not None:
        return data, data.test
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    share = min(share, MAX_HELD_OUT / len(y))
    if data.together is not None:
        fold = folds_of(data.together, int(share * len(y)), seed)
        is_held_out = (fold == 0) & (int(share * len(y)) > 0) & bool(fold.max() > 0)
        if not bool(is_held_out.any()):
            return data, None
        return data.part(~is_held_out), (x[is_held_out], y[is_held_out])
    strata = [order]
    if data.task == "classification":
        strata = [order[y[order] == label] for label in range(data.outputs)]
    held_out = torch.cat([stratum[: int(share * len(stratum))] for stratum in strata])
    if len(held_out) == 0:
        return data, None
    is_training = torch.ones(len(y), dtype=torch.bool)
    is_training[held_out] = False
    return data.part(is_training), (x[held_out], y[held_out])


def as_dataset(
    x: Any,
    y: Any,
    test: Any,
    kind: str | None,
    task: Task | None,
    together: Any = None,
) -> Dataset:
    """Return the inputs of `discover` as a `Dataset`."""
    if isinstance(x, Dataset):
        if y is not None or test is not None or task not in (None, x.task):
            raise ValueError(
                "y, test and task have no effect together with a Dataset. Pass them to "
                "dataset(x, y, task=..., test=...)."
            )
        data = x if kind is None else replace(x, x=as_kind(x.x, kind, x.source), kind=kind)
        groups = data.together if together is None else _group_numbers(together, len(data.x))
        return replace(data, together=groups)
    x, y, columns, class_names = as_arrays(x, y)
    labels, names = (None, ()) if y is None else as_labels(_label_array(y), "y")
    names, held_out = names or class_names, None
    groups = None if together is None else _group_numbers(together, len(x))
    if test is not None:
        test = as_arrays(*test)[:2]
    if y is not None and test is not None:
        labels, test_labels, names = as_both_labels(_label_array(y), _label_array(test[1]), "y")
        held_out = (_input_tensor(test[0]), test_labels)
    contents = FileContents(_input_tensor(x), labels, names, together=groups)
    contents = labelled_only(contents, "y")
    x, labels = contents.x, contents.y
    data = dataset(x, labels, kind=kind, task=task, names=names, test=held_out)
    return replace(data, columns=columns, together=contents.together)


def _group_numbers(values: Any, n: int) -> Tensor:
    """Return a number for each sample; equal values have equal numbers."""
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.shape != (n,):
        raise ValueError(f"together must have one value per sample, [{n}], got {array.shape}.")
    array = array.astype(str) if array.dtype.kind == "O" else array
    return torch.from_numpy(np.unique(array, return_inverse=True)[1].astype(np.int64))


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
    if array.dtype.kind != "O":
        return array
    missing = [is_missing(value) for value in array.reshape(-1).tolist()]
    if not any(missing) or array.ndim != 1:
        return array.astype(str)
    known = array[~np.array(missing)].tolist()
    if all(isinstance(value, int | float) for value in known):  # numbers with gaps, in pandas
        return np.array([np.nan if value is None else value for value in array.tolist()], float)
    return array


def answer_question(question: Question, options: Options, tell: Tell) -> Answer:
    """Compare the structures, then train the recommended one on all training data."""
    started = clock.now()
    compared = compare(question, options, tell)
    answer = compared_answer(question, compared, options)
    seconds = 60 * options.minutes - (clock.now() - started)
    final = train_final(question, compared, answer.recommended, options, seconds, tell)
    seconds = 60 * options.minutes - (clock.now() - started)
    answer = with_last_starts(question, compared, answer, options, seconds, tell)
    if final is not None:
        score(question, final, MAX_HELD_OUT, options.seed)
    return replace(answer, final=final)


def compared_answer(
    question: Question, compared: Compared, options: Options, name: str = ""
) -> Answer:
    """Return the answer of a comparison, without a final training; `name` if it is recommended."""
    candidates = sorted(candidates_of(question, compared), key=lambda c: -c.log_evidence)
    claims = compared.claims
    name = name or recommend(candidates, question.family, claims)
    notes = _notes(compared, options)
    answer = Answer(
        question.name, question.text, question.family, candidates, claims, notes, None, None, name
    )
    minutes = options.minutes if compared.plan.costs else None
    remedies = {
        claim.name: remedy(claim, minutes, len(question.train[1]))
        for claim in claims
        if claim.holds is None
    }
    calibration = _calibration(question, compared, name)
    return replace(answer, calibration=calibration, remedies=remedies)


def _calibration(question: Question, compared: Compared, name: str) -> Calibration | None:
    """Return how the delivered network predicts, by what the starts of its structure left out."""
    comparison, structure = compared.comparison, question.family.structure(name)
    starts = []
    for member in compared.members:
        if member.structure == name:
            inside, outside = (
                select(comparison.question.train, part) for part in comparison.split(member.start)
            )
            trained = member.as_fit(structure, question.likelihood(), inside)
            starts.append(Start(trained, member.temperature, outside))
    return calibrate(starts)


def candidates_of(question: Question, compared: Compared) -> Iterator[Candidate]:
    """Yield the trained structures, scored on held-out data, with their measured invariances."""
    comparison = compared.comparison
    for structure in question.family.structures:
        members = tuple(m for m in compared.members if m.structure == structure.name)
        if not members:
            continue
        best = max(members, key=lambda member: member.log_evidence)
        inside, _ = comparison.split(best.start)
        data = select(comparison.question.train, inside)
        trained = best.as_fit(structure, question.likelihood(), data)
        measure_equivariance(trained, comparison.seed)
        candidate = Candidate(structure.name, trained, members)
        score(question, candidate, MAX_SCORED_SAMPLES, comparison.seed)
        yield candidate


def measure_equivariance(trained: Fit, seed: int) -> None:
    """Add equivariance errors to the reading of a network whose training left them out."""
    x, old = trained.data.x, trained.reading
    inputs = equivariance_inputs(trained.model, x, seed)
    if inputs is not None:
        reading = read(trained.razor, trained.evidence, old.train, old.test, inputs)
        verdict = f"{PRUNED} " * old.verdict.startswith(PRUNED) + reading.verdict
        trained.reading = replace(reading, verdict=verdict)


def score(question: Question, candidate: Candidate, max_samples: int, seed: int) -> None:
    """Add scores on held-out data and measured invariances to the reading of a network."""
    trained = candidate.fit
    if question.test is not None:
        index = subsample(len(question.test[1]), max_samples, seed)
        x, y = (part.to(trained.data.x.device) for part in select(question.test, index))
        f = outputs(trained.model, x) / candidate.temperature
        test = trained.razor.likelihood.scores(f, y)
        trained.reading = replace(trained.reading, test=test)
    _measure_invariances(question, trained, trained.data.x, seed)


def _notes(compared: Compared, options: Options) -> tuple[str, ...]:
    """Return notes on what was not tested, and on too few training steps, with their remedies."""
    plan, family, notes = compared.plan, compared.comparison.question.family, list[str]()
    is_cut = bool(set(family.optional) - {structure.name for structure in family.structures})
    if is_cut and not all(claim.holds for claim in compared.claims):
        notes.append(
            "Shifts along one axis alone: not tested, for lack of time (run with more `--minutes`)."
        )
    if plan.steps >= MIN_STEPS:
        return tuple(notes)
    factor = MIN_STEPS / plan.steps
    if plan.costs:
        fitted = f"fitted into {options.minutes:g} minute{'s' * (options.minutes != 1)}"
        minutes = factor * options.minutes
        rounded_up = math.ceil(minutes) if minutes > 1 else math.ceil(10 * minutes) / 10
        remedy = f"--minutes {rounded_up:g}"
    else:
        fitted, remedy = "were made", f"--epochs {math.ceil(factor * sum(plan.epochs))}"
    notes.append(
        f"Provisional: only {plan.steps} training steps {fitted}, {MIN_STEPS} are needed (run with "
        f"`{remedy}`)."
    )
    return tuple(notes)


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
