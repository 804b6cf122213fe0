"""Run `discover`: data in, a `Discovery` out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from symrazor.core.likelihood import Categorical, Gaussian, Likelihood
from symrazor.data import Dataset, Tensors, dataset, digits, on_canvas, read
from symrazor.data.arrays import Array, as_both_labels, as_inputs, as_labels
from symrazor.data.datasets import Task, as_kind
from symrazor.discovery.answer import Answer
from symrazor.discovery.candidates import Family, UserGroup, candidates_for, register_kind
from symrazor.discovery.comparison import answer_question
from symrazor.discovery.grids import IMAGE, SERIES, VOLUME, grid_family
from symrazor.discovery.invariances import TIME_SHARE, learn_invariances, wants_invariances
from symrazor.discovery.question import MakeLikelihood, Options, Question, Tell
from symrazor.discovery.result import Discovery, QuestionResult
from symrazor.discovery.sets_and_vectors import SET, VECTOR
from symrazor.discovery.trajectories import learn_dynamics
from symrazor.runs.preparation import prepare
from symrazor.training.options import FitConfig

MAX_HELD_OUT = 5000
"""Largest number of samples that are held out for the report."""

for _kind in (IMAGE, VOLUME, SERIES, SET, VECTOR):
    register_kind(_kind)


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
        likelihood = partial(_gaussian, data.outputs)
    question = Question(
        Path(data.source).stem or "data",
        f"Which structure do the data support? ({data.describe()})",
        family,
        preparation.data(data.labelled),
        None if test is None else preparation.data(test),
        likelihood,
    )
    if not wants_invariances(data, options):
        answer = answer_question(question, options, tell)
        return QuestionResult(data, answer, preparation, test)
    answer = answer_question(question, _share_of_time(options, 1 - TIME_SHARE), tell)
    remaining = _share_of_time(options, TIME_SHARE)
    invariances = learn_invariances(question, answer.recommended.name, remaining, tell)
    answer = replace(answer, invariances=invariances)
    return QuestionResult(data, answer, preparation, test)


def _share_of_time(options: Options, share: float) -> Options:
    return options.change(minutes=share * options.minutes)


def _gaussian(outputs: int) -> Likelihood:
    return Gaussian(outputs=outputs if outputs > 1 else None)


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


# The embedded digits: the same images with two questions. Position does not matter for the first
# (which digit?), and matters for the second (which digit, and in which quadrant?).

CANVAS_PIXELS = 16
DigitTask = Literal["digit", "quadrant"]
DIGIT_QUESTIONS: dict[DigitTask, str] = {
    "digit": "Which digit is it?",
    "quadrant": "Which digit is it, and in which quadrant?",
}
DIGIT_CLASSES: dict[DigitTask, int] = {"digit": 10, "quadrant": 40}
DIGIT_CONFIG = FitConfig(epochs=50, batch_size=64, lr=1e-2).change(estimator="mc")


def discover_digits(
    options: Options | None = None,
    tell: Tell = lambda text: None,
    show: Callable[[Answer], object] = lambda answer: None,
) -> Discovery:
    """Discover two structures in the embedded digits: a kept and a broken symmetry.

    Args:
        options: as for `discover`; `epochs` defaults to 50.
        tell: called with progress messages.
        show: called with each answer as soon as it is known.
    """
    options = options or Options()
    results = []
    for task, text in DIGIT_QUESTIONS.items():
        train, test = digits_on_canvas(task, options.seed)
        size = f"{CANVAS_PIXELS} x {CANVAS_PIXELS}"
        tell(f"\n{text}  ({len(train[1]):,} digits on a canvas of {size} pixels)")
        family = digit_family(task, options.groups)
        question = Question(task, text, family, train, test, Categorical, DIGIT_CONFIG)
        names = digit_class_names(task)
        data = Dataset(*train, "image", "classification", names, source="embedded digits")
        results.append(QuestionResult(data, answer_question(question, options, tell), test=test))
        show(results[-1].answer)
    return Discovery(results)


def digits_on_canvas(task: DigitTask, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Return training and test digits in a quadrant of a canvas; the writers differ."""
    train = on_canvas(*digits("train"), size=CANVAS_PIXELS, seed=seed, task=task)
    test = on_canvas(*digits("test"), size=CANVAS_PIXELS, seed=seed + 1, task=task)
    return train, test


def digit_family(task: DigitTask, groups: Sequence[UserGroup] | None = None) -> Family:
    """Return the candidates for the embedded digits."""
    shape = (1, CANVAS_PIXELS, CANVAS_PIXELS)
    return replace(grid_family(shape, DIGIT_CLASSES[task], groups), wording=IMAGE.wording)


def digit_class_names(task: DigitTask) -> tuple[str, ...]:
    """Return the names of the classes."""
    if task == "digit":
        return tuple(map(str, range(10)))
    quadrants = ("top left", "top right", "bottom left", "bottom right")
    return tuple(f"{digit} {quadrant}" for quadrant in quadrants for digit in range(10))
