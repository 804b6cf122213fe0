"""Data in, a `Discovery` out."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.core.likelihood import Categorical, Gaussian, Likelihood
from symrazor.data import Dataset, Tensors, dataset, read
from symrazor.data.arrays import Array, as_both_labels, as_inputs, as_labels
from symrazor.data.datasets import Kind, Task, as_kind
from symrazor.discovery import digits, invariances, trajectories
from symrazor.discovery.answer import Answer
from symrazor.discovery.question import Asked, Options, Tell
from symrazor.discovery.registry import candidates
from symrazor.discovery.result import Discovery, Found
from symrazor.discovery.run import answer
from symrazor.runs.preparation import prepare

MOST_HELD_OUT = 5000
"""At most so many data are kept for the report alone."""


def discover(
    x: Any,
    y: Any = None,
    *,
    test: tuple[Any, Any] | None = None,
    kind: Kind | None = None,
    task: Task | None = None,
    options: Options | None = None,
    tell: Tell = lambda text: None,
    **changes: Any,
) -> Discovery:
    """Find out which structure the data ask for, and train a network that has it.

    Candidates are trained on the same data for the same number of passes and ranked by their
    evidence, which needs no held-out data; a fifth of the data is held out all the same, so that
    the report can show how well each predicts.

    Args:
        x: inputs as an array or tensor, a `Dataset`, or the path of a file or folder
            (`symrazor.data.read`).
        y: labels: whole numbers or text for classes, other numbers for regression.
        test: held-out inputs and labels; by default a fifth of the data, at most 5,000.
        kind: of x, instead of the one that is recognised (`symrazor.data.datasets`).
        task: "classification" or "regression", instead of the one that is recognised.
        options: all options; single ones can be given by name, as in
            `discover(x, y, minutes=5, seed=1)`.
        tell: is told in words what is going on.
        **changes: those single options.

    Raises:
        ValueError: data or options that cannot be used.
        KeyboardInterrupt: stopped; with `out`, the same call takes the run up again.
    """
    chosen = (options or Options()).change(**changes)
    data = _dataset(x, y, test, kind, task)
    tell(f"{data.source}: {data.describe()}")
    if data.kind == "trajectory":
        if chosen.groups is not None:
            raise ValueError("groups= has no effect on trajectories. Remove it.")
        return Discovery(dynamics=trajectories.discover(data, chosen), data=data)
    found = [_ask(data, chosen, tell)]
    return Discovery(found)


def discover_digits(
    options: Options | None = None,
    tell: Tell = lambda text: None,
    show: Callable[[Answer], object] = lambda found: None,
) -> Discovery:
    """The embedded digits on a canvas, twice: a symmetry that is kept, and one that is broken.

    Args:
        options: as for `discover`; without `epochs` the digits take 50.
        tell: is told in words what is going on.
        show: is given each answer as soon as it is there.
    """
    chosen = options or Options()
    found = []
    for task, question in digits.QUESTIONS.items():
        train, test = digits.canvas(task, chosen.seed)
        size = f"{digits.CANVAS} x {digits.CANVAS}"
        tell(f"\n{question}  ({len(train[1]):,} digits on a {size} canvas)")
        family = digits.family(task, chosen.groups)
        asked = Asked(task, question, family, train, test, Categorical, digits.DEFAULTS)
        names = digits.names(task)
        data = Dataset(*train, "image", "classification", names, source="embedded digits")
        found.append(Found(data, answer(asked, chosen, tell), test=test))
        show(found[-1].answer)
    return Discovery(found)


def _ask(data: Dataset, options: Options, tell: Tell) -> Found:
    """One question about a data set."""
    data.labelled  # noqa: B018  (refuses data without labels)
    data, test = held_out(data, options.held_out, options.seed)
    family = candidates(data, options.groups)
    preparation = prepare(data, same_scale=bool(family.groups))
    x, y = data.labelled
    prepared = (preparation.inputs(x), preparation.targets(y))
    tested = None
    if test is not None:
        tested = (preparation.inputs(test[0]), preparation.targets(test[1]))
    make: Any = Categorical
    if data.task == "regression":
        make = partial(_gaussian, data.outputs)
    question = f"Which structure do the data ask for? ({data.describe()})"
    asked = Asked(
        Path(data.source).stem or "data",
        question,
        family,
        prepared,
        tested,
        make,
        ordered=data.kind == "set",
    )
    if not invariances.wanted(data, options):
        return Found(data, answer(asked, options, tell), preparation, test)
    share = invariances.SHARE
    found = answer(asked, options.change(minutes=(1 - share) * options.minutes), tell)
    rest = options.change(minutes=share * options.minutes)
    found = invariances.learn_widths(asked, found, rest, tell)
    return Found(data, found, preparation, test)


def _gaussian(outputs: int) -> Likelihood:
    return Gaussian(outputs=outputs if outputs > 1 else None)


def held_out(data: Dataset, part: float, seed: int) -> tuple[Dataset, Tensors | None]:
    """Training data and test data: those that came with them, or a part of each class."""
    x, y = data.labelled
    if data.test is not None:
        return data, data.test
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    part = min(part, MOST_HELD_OUT / len(y))
    if data.task == "classification":
        groups = [order[y[order] == label] for label in range(data.outputs)]
    else:
        groups = [order]
    test = torch.cat([group[: int(part * len(group))] for group in groups])
    if len(test) == 0:
        return data, None
    keep = torch.ones(len(y), dtype=torch.bool)
    keep[test] = False
    return data.part(keep), (x[test], y[test])


def _dataset(x: Any, y: Any, test: Any, kind: Kind | None, task: Task | None) -> Dataset:
    """Whatever was given, as a `Dataset`."""
    if isinstance(x, (str, Path)):
        return read(x, kind, task)
    if isinstance(x, Dataset):
        if y is not None or test is not None or task not in (None, x.task):
            raise ValueError(
                "y, test and task have no effect beside a Dataset. Pass them to "
                "dataset(x, y, task=..., test=...)."
            )
        return x if kind is None else replace(x, x=as_kind(x.x, kind, x.source), kind=kind)
    labels, names = (None, ()) if y is None else as_labels(_array(y), "y")
    held = None
    if y is not None and test is not None:
        labels, tested, names = as_both_labels(_array(y), _array(test[1]), "y")
        held = (_tensor(test[0]), tested)
    return dataset(_tensor(x), labels, kind=kind, task=task, names=names, test=held)


def _tensor(values: Any) -> Tensor:
    """Inputs as a tensor."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        return as_inputs(np.ascontiguousarray(values), "x")
    except ValueError as error:  # rows of different lengths, or no numbers
        raise ValueError(f"x is not an array of numbers: {error}") from error


def _array(values: Any) -> Array:
    """Labels as an array of numbers or text."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return np.asarray(values.float() if values.dtype == torch.bfloat16 else values)
    array = np.asarray(values)
    return array.astype(str) if array.dtype.kind == "O" else array
