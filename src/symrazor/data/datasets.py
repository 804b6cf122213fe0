"""Data of any kind as one typed value, and the rules that recognise the kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from symrazor.core.choices import TASKS, Task
from symrazor.core.validation import counted
from symrazor.data.batches import Tensors, check_batch, check_lengths, chunks
from symrazor.data.shapes import (
    CHANNELS_LAST,
    SHAPES,
    as_numbers,
    as_stored,
    plural,
    recognise_kind,
)
from symrazor.data.times import check_states, extrapolate_times

MIN_SAMPLES = 20
"""Fewer samples carry no information about structure."""
MAX_CLASSES = 1000
MAX_INFERRED_CLASSES = 50
"""Integers stored as floats are classes if they are below this number."""


@dataclass(frozen=True)
class Dataset:
    """Inputs and labels together with their kind.

    Args:
        x: Inputs in the shape that `SHAPES` gives for the kind; float32 if that represents the data
            exactly, otherwise float64. Large inputs have the number type of their file; `converted`
            and `as_numbers` convert them.
        y: Classes 0 to K-1, int64 [n], or targets, float64 [n, k]; None for trajectories and for
            inputs to predict.
        kind: Kind of the inputs.
        task: Classification or regression. Trajectories are a regression on their own future.
        names: Names of the classes or of the targets.
        times: Times of the steps of trajectories, [time] or [n, time].
        test: Held-out inputs and labels that came with the data.
        source: Where the data came from, for messages and reports.
        columns: Names of the features or channels of x, if the file has them.
        ids: Names of the samples, such as file names, if the source has them.
        id_name: What the names are, such as "file".
        together: A number for each sample, or None; samples with the same number, such as those of
            one patient, stay on one side of every split.
    """

    x: Tensor
    y: Tensor | None
    kind: str
    task: Task
    names: tuple[str, ...] = ()
    times: Tensor | None = None
    test: Tensors | None = None
    source: str = "data"
    columns: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    id_name: str = ""
    together: Tensor | None = None

    @property
    def outputs(self) -> int:
        """Number of outputs that a network needs: classes or targets."""
        _, y = self.labelled
        return len(self.names) if self.task == "classification" else y.shape[1]

    @property
    def labelled(self) -> Tensors:
        """Inputs and labels; ValueError if the data have no labels."""
        if self.y is None:
            raise ValueError(
                f"{self.source} has no labels. Pass them, or save them next to x, as y."
            )
        return self.x, self.y

    def describe(self) -> str:
        """Return one line with the number, kind and shape of the samples and the task."""
        size = " x ".join(str(length) for length in self.x.shape[1:])
        text = f"{len(self.x):,} {plural(self.kind)} of {size}"
        if self.y is None:
            return text
        if self.task == "classification":
            return f"{text}, {self.outputs} classes"
        return f"{text}, {counted(self.outputs, 'target')} (regression)"

    def __repr__(self) -> str:
        return f"Dataset({self.source}: {self.describe()})"

    def converted(self) -> "Dataset":
        """Return the data with all inputs as float32 or float64, also those of large files."""
        if self.kind == "trajectory":
            return self
        test = self.test and (as_numbers(self.test[0], self.kind), self.test[1])
        return replace(self, x=as_numbers(self.x, self.kind), test=test)

    def part(self, index: Tensor) -> "Dataset":
        """Return the samples with the given indices."""
        numbers = torch.arange(len(self.x))[index].tolist() if self.ids else []
        ids = tuple(self.ids[number] for number in numbers)
        y, together = (None if part is None else part[index] for part in (self.y, self.together))
        return replace(self, x=self.x[index], y=y, ids=ids, together=together)


def dataset(
    x: Tensor,
    y: Tensor | None = None,
    *,
    kind: str | None = None,
    task: Task | None = None,
    names: Sequence[str] = (),
    times: Tensor | None = None,
    test: Tensors | None = None,
    source: str = "data",
) -> Dataset:
    """Make a `Dataset` of tensors; kind and task are recognised unless they are given.

    | x | kind |
    |---|---|
    | [n, d] | vector |
    | [n, h, w], bytes or square from 8 x 8 on | image with one channel |
    | [n, m, d] with d of at most 4 and m > d | set of m points; ambiguous if m is above 64 |
    | [n, c, t] otherwise | series; ambiguous if c > t |
    | [n, t, 2k] without labels, or with times | trajectory |
    | [n, c, h, w], or [n, h, w, c] with c of 1, 3 or 4 | image |
    | [n, d, h, w] with more than 4 slices, all sizes from 8 on | volume with one channel |
    | [n, c, d, h, w] | volume |

    Labels are classes if they are integers, or floats with integer values from 0 to 49. Otherwise
    they are regression targets.

    Args:
        x: Inputs. Bytes are divided by 255 unless they are vectors, sets or trajectories.
        y: Classes or targets, one for each sample.
        kind: Kind of the inputs, if the table does not apply; "series-last" for series
            [n, time, channels].
        task: Task, if the rule for labels does not apply.
        names: Names of the classes 0, 1, ..., or of the targets.
        times: Times of the steps of trajectories.
        test: Held-out x and y.
        source: Name of the data in messages.

    Raises:
        AmbiguousDataError: The kind has to be named.
        ValueError: There are too few samples or classes, a value is not finite, or the data do not
            fit the kind or task.
    """
    if kind == CHANNELS_LAST:
        if x.ndim != 3:
            raise ValueError(
                f"x in {source} must have shape [n, time, channels] for kind {kind!r}, got "
                f"{list(x.shape)}."
            )
        x, kind = x.transpose(1, 2), "series"
        test = None if test is None else (test[0].transpose(1, 2), test[1])
    kind = (
        recognise_kind(x, y, times, source) if kind is None else _check(kind, tuple(SHAPES), "kind")
    )
    inputs = as_stored(x, kind, source)
    if kind == "trajectory":
        times = None if times is None else extrapolate_times(inputs, times)
        check_states(inputs, times, source)
    if y is None:
        if kind != "trajectory":
            check_batch(inputs, torch.zeros(len(inputs)), source)
        return Dataset(inputs, None, kind, task or "regression", times=times, source=source)
    check_lengths(x, y, source)
    if len(y) < MIN_SAMPLES:
        samples = counted(len(y), "sample")
        raise ValueError(f"{source} has {samples}; at least {MIN_SAMPLES} are needed.")
    if all(bool((part == inputs[:1]).all()) for part in chunks(inputs)):
        raise ValueError(f"All inputs in {source} are equal. Check x.")
    task = recognise_task(y) if task is None else _check(task, TASKS, "task")
    test_inputs = None if test is None else _test_inputs(test[0], inputs, kind, source)
    if task == "regression":
        if names and not y.is_floating_point():
            raise ValueError(
                f"Regression needs numbers as targets, but {source} has the classes "
                f"{', '.join(list(names)[:3])}, ... Use --task classification."
            )
        targets = _columns(y)
        check_batch(inputs, targets, source)
        if bool((targets == targets[:1]).all(0).any()):
            raise ValueError(f"A target in {source} is constant. Check the label column.")
        held_out = None if test is None or test_inputs is None else (test_inputs, _columns(test[1]))
        return Dataset(inputs, targets, kind, task, tuple(names), None, held_out, source)
    check_batch(inputs, y, source)
    test_y = None if test is None else test[1]
    labels, class_names, test_labels = _classes(y, tuple(names), test_y, source)
    held_out = None if test_inputs is None or test_labels is None else (test_inputs, test_labels)
    return Dataset(inputs, labels, kind, "classification", class_names, None, held_out, source)


def recognise_task(y: Tensor) -> Task:
    """Return the task that labels suggest by the rule in `dataset`."""
    if y.ndim > 1 and y.shape[1:].numel() > 1:
        return "regression"
    if not y.is_floating_point():
        return "classification"
    are_classes = bool(((y == y.round()) & (y >= 0) & (y < MAX_INFERRED_CLASSES)).all())
    return "classification" if are_classes else "regression"


def _test_inputs(x: Tensor, train: Tensor, kind: str, source: str) -> Tensor:
    where = f"the test data of {source}"
    inputs = as_stored(x, kind, where)
    if inputs.shape[1:] != train.shape[1:]:
        raise ValueError(
            f"Training samples have shape {list(train.shape[1:])}, but samples in {where} have "
            f"{list(inputs.shape[1:])}."
        )
    check_batch(inputs, torch.zeros(len(inputs)), where)
    return inputs


_T = TypeVar("_T")


def _check(value: _T, choices: tuple[_T, ...], option: str) -> _T:
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise ValueError(f"Unknown {option} {value!r}. Choose one of: {listed}.")
    return value


def _columns(y: Tensor) -> Tensor:
    return y.reshape(len(y), -1).double()


def _classes(
    y: Tensor, names: tuple[str, ...], test: Tensor | None, source: str
) -> tuple[Tensor, tuple[str, ...], Tensor | None]:
    """Return labels 0 to K-1, the class names, and the test labels with the same numbers."""
    flat = y.reshape(-1)
    if len(flat) != len(y) or (y.is_floating_point() and bool((y != y.round()).any())):
        raise ValueError(
            f"Classification needs one integer per sample, but y in {source} is {y.dtype} of shape "
            f"{list(y.shape)}. Use --task regression."
        )
    for part in (flat, test):
        if part is not None and part.is_floating_point() and bool((part.abs() > 2**53).any()):
            raise ValueError(
                f"{source} has class labels above 2^53, which are not exact as floating-point "
                "numbers. Number the classes 0, 1, ..., or save the labels as integers."
            )
    values, labels = torch.unique(flat.long(), return_inverse=True)
    if len(values) < 2:
        raise ValueError(f"{source} has only the class {int(values[0])}. Check the labels.")
    if len(values) > min(MAX_CLASSES, len(y) // 2):
        raise ValueError(
            f"{source} has {len(values):,} classes for {len(y):,} samples. If y holds quantities, "
            "use --task regression."
        )
    class_names = tuple(names[v] if 0 <= v < len(names) else str(v) for v in values.tolist())
    if test is None:
        return labels, class_names, None
    test_values = test.reshape(-1).long()
    test_labels = torch.searchsorted(values, test_values).clamp(max=len(values) - 1)
    is_unknown = values[test_labels] != test_values
    if bool(is_unknown.any()):
        value = int(test_values[is_unknown][0])
        name = names[value] if 0 <= value < len(names) else f"{value}"
        raise ValueError(
            f"The test data of {source} have the class {name}, which the training data do not have."
        )
    return labels, class_names, test_labels
