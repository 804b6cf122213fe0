"""Data of any kind as one typed value, and what kind they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from symrazor.data.batches import Tensors, check_batch, check_lengths, refusal
from symrazor.data.times import continued

Kind = Literal["image", "volume", "series", "set", "vector", "trajectory"]
Task = Literal["classification", "regression"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TASKS: tuple[Task, ...] = get_args(Task)

LEAST = 20
"""Fewer samples than this say nothing about a structure."""
MOST_CLASSES = 1000
FEW_CLASSES = 50
"""Whole numbers that are not of an integer type are classes if there are at most so many."""
SHAPES: dict[str, str] = {
    "image": "[n, channels, height, width]",
    "volume": "[n, channels, depth, height, width]",
    "series": "[n, channels, time]",
    "set": "[n, points, features]",
    "vector": "[n, features]",
    "trajectory": "[n, time, coordinates]",
}
_EXACT_AS_FLOAT32 = (
    *(torch.float32, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.bool),
)
_DIMS = {"image": 4, "volume": 5, "series": 3, "set": 3, "vector": 2, "trajectory": 3}


@dataclass(frozen=True)
class Dataset:
    """Inputs and labels, and what they are.

    Args:
        x: in the shape that `SHAPES` gives for the kind; float32 where that holds the data
            exactly, else float64.
        y: int64 classes 0 to K-1 [n], or float64 targets [n, k]; None where nothing is asked
            (trajectories, or data to predict).
        kind: what x is.
        task: what y is; trajectories are a regression on their own future.
        names: of the classes, or of the targets.
        times: of the steps of trajectories, [time] or [n, time].
        test: held-out inputs and labels that came with the data.
        source: where the data came from, for messages and the document.
        columns: names of the features or channels of x, where the file has them.
    """

    x: Tensor
    y: Tensor | None
    kind: Kind
    task: Task
    names: tuple[str, ...] = ()
    times: Tensor | None = None
    test: Tensors | None = None
    source: str = "x and y"
    columns: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        """Outputs that a network needs: classes or targets."""
        if self.y is None:
            raise refusal(f"labels in {self.source}", "none", "save them beside x, as y")
        return len(self.names) if self.task == "classification" else self.y.shape[1]

    @property
    def labelled(self) -> Tensors:
        """Inputs and labels.

        Raises:
            ValueError: there is no y.
        """
        if self.y is None:
            raise refusal(f"labels in {self.source}", "none", "save them beside x, as y")
        return self.x, self.y

    def describe(self) -> str:
        """One line: how many, of what kind and shape, and what is asked of them."""
        size = " x ".join(str(part) for part in self.x.shape[1:])
        text = f"{len(self.x):,} {plural(self.kind)} of {size}"
        if self.y is None:
            return text
        if self.task == "classification":
            return f"{text}, {self.outputs} classes"
        return f"{text}, {self.outputs} target{'s' if self.outputs > 1 else ''} (regression)"

    def __repr__(self) -> str:
        """What they are, not all numbers."""
        return f"Dataset({self.source}: {self.describe()})"

    def part(self, index: Tensor) -> "Dataset":
        """The samples of an index."""
        return replace(self, x=self.x[index], y=None if self.y is None else self.y[index])


def plural(kind: str) -> str:
    """Several of a kind, in words."""
    return {"series": "series", "trajectory": "trajectories"}.get(kind, f"{kind}s")


def dataset(
    x: Tensor,
    y: Tensor | None = None,
    *,
    kind: Kind | None = None,
    task: Task | None = None,
    names: Sequence[str] = (),
    times: Tensor | None = None,
    test: Tensors | None = None,
    source: str = "x and y",
) -> Dataset:
    """Inputs and labels as a `Dataset`; kind and task are recognised where they are not given.

    | x | kind |
    |---|---|
    | [n, d] | vector |
    | [n, h, w], bytes or square from 8 x 8 on | image of one channel |
    | [n, m, d] with d of at most 4 and m > d | set of m points |
    | [n, c, t] otherwise | series |
    | [n, t, 2k] without labels, or with times | trajectory |
    | [n, c, h, w], or [n, h, w, c] with c of 1, 3 or 4 | image |
    | [n, d, h, w] with more than 4 slices, all sizes from 8 on | volume of one channel |
    | [n, c, d, h, w] | volume |

    Labels are classes if they are integers, or floats that are whole numbers from 0 to 49;
    regression targets otherwise.

    Args:
        x: numbers; bytes are divided by 255 unless they are vectors.
        y: classes or targets, one for each x.
        kind: instead of the one that the table gives.
        task: instead of the one that y gives.
        names: of the classes 0, 1, ..., or of the targets.
        times: of the steps of trajectories.
        test: held-out x and y, as `x` and `y`.
        source: what messages call these data.

    Raises:
        ValueError: too few data, values that are not finite, one class, or a kind or task that
            they cannot have.
    """
    found = recognised(x, y, times, source) if kind is None else _known(kind, KINDS, "kind")
    values = shaped(x, found, source)
    if found == "trajectory":
        times = None if times is None else continued(values, times)
        _check_states(values, times, source)
    if y is None:
        if found != "trajectory":
            check_batch(values, torch.zeros(len(values)), source)
        return Dataset(values, None, found, task or "regression", times=times, source=source)
    check_lengths(x, y, source)
    if len(y) < LEAST:
        what = f"at least {LEAST} samples in {source}"
        raise refusal(what, f"{len(y)}", "collect more: fewer say nothing about a structure")
    if bool((values == values[:1]).all()):
        raise refusal(f"inputs that differ in {source}", "the same for all samples", "check x")
    asked = _task(y) if task is None else _known(task, TASKS, "task")
    tested = None if test is None else _held(test[0], values, found, source)
    if asked == "regression":
        if names and not y.is_floating_point():
            got = f"the classes {', '.join(list(names)[:3])}, ..."
            raise refusal(f"numbers as targets in {source}", got, "--task classification")
        targets = _columns(y)
        check_batch(values, targets, source)
        if bool((targets == targets[:1]).all(0).any()):
            raise refusal(f"targets that vary in {source}", "a constant", "check the label column")
        held = None if test is None or tested is None else (tested, _columns(test[1]))
        return Dataset(values, targets, found, asked, tuple(names), None, held, source)
    check_batch(values, y, source)
    labels, names, held_labels = _classes(
        y, tuple(names), None if test is None else test[1], source
    )
    held = None if tested is None or held_labels is None else (tested, held_labels)
    return Dataset(values, labels, found, asked, names, None, held, source)


def _held(x: Tensor, train: Tensor, kind: Kind, source: str) -> Tensor:
    """Test inputs, like those for training."""
    found = shaped(x, kind, f"the test data of {source}")
    if found.shape[1:] != train.shape[1:]:
        what = f"test data of shape {list(train.shape[1:])} in {source}"
        raise refusal(what, f"{list(found.shape[1:])}", "convert them as the training data were")
    check_batch(found, torch.zeros(len(found)), f"the test data of {source}")
    return found


def _check_states(x: Tensor, times: Tensor | None, source: str) -> None:
    """Refuse states that are infinite or not in order, and name the row; NaN is a missing one."""
    bad = x.isinf().any(2).nonzero()
    if len(bad):
        got = f"infinity in trajectory {int(bad[0, 0])}, row {int(bad[0, 1])}"
        raise refusal(f"finite states in {source}", got, "repair it, or leave it out as NaN")
    if times is None:
        return
    if times.shape not in (x.shape[1:2], x.shape[:2]):
        got = f"shape {list(times.shape)}"
        what = f"{x.shape[1]} times as t in {source}"
        raise refusal(what, got, "save one time for each row")
    unknown = (~times.isfinite()).nonzero()
    if len(unknown):
        *b, row = unknown[0].tolist()
        got = f"none in {_of(b)}row {row}"
        raise refusal(f"a time for every state in {source}", got, "fill it in")
    late = (~(times.diff(dim=-1) > 0)).nonzero()
    if len(late):
        *b, row = late[0].tolist()
        before, after = (float(times[(*b, r)]) for r in (row, row + 1))
        got = f"{_of(b)}rows {row} and {row + 1} at {before:.9g} and {after:.9g}"
        do = "sort the rows by time" if after < before else "drop one of the two"
        raise refusal(f"times that increase in {source}", got, do)


def _of(trajectory: list[int]) -> str:
    return f"trajectory {trajectory[0]}, " if trajectory else ""


def _columns(y: Tensor) -> Tensor:
    return y.reshape(len(y), -1).double()


_T = TypeVar("_T")


def _known(value: _T, among: tuple[_T, ...], what: str) -> _T:
    if value not in among:
        listed = ", ".join(str(part) for part in among)
        raise refusal(f"a {what} among {listed}", repr(value), f"--{what} {among[0]}")
    return value


def recognised(x: Tensor, y: Tensor | None, times: Tensor | None, source: str) -> Kind:
    """What the table of `dataset` says."""
    shape = x.shape[1:]
    found: Kind
    match len(shape):
        case 1:
            found = "vector"
        case 2 if times is not None:
            found = "trajectory"
        case 2 if x.dtype == torch.uint8 or (shape[0] == shape[1] and shape[0] >= 8):
            found = "image"
        case 2 if y is None and shape[1] % 2 == 0 and shape[0] > shape[1]:
            found = "trajectory"
        case 2:
            found = "set" if shape[1] <= 4 and shape[0] > shape[1] else "series"
        case 3:
            thick = shape[0] > 4 and shape[-1] not in (1, 3, 4) and min(shape) >= 8
            found = "volume" if thick else "image"
        case 4:
            found = "volume"
        case _:
            got = f"shape {list(x.shape)}"
            raise refusal(f"x with 2 to 5 dimensions in {source}", got, "reshape it, see --kind")
    return found


def shaped(x: Tensor, kind: Kind, source: str) -> Tensor:
    """Return inputs in the shape of the kind: float32 if that is exact for their type, or float64.

    Bytes of images, volumes and series are divided by 255.
    """
    values = x.float() if x.dtype in _EXACT_AS_FLOAT32 else x.double()
    if x.dtype == torch.uint8 and kind not in ("vector", "set", "trajectory"):
        values = values / 255
    if kind == "vector" and values.ndim != 2:
        values = values.reshape(len(values), -1)
    if kind in ("image", "volume", "series") and values.ndim == _DIMS[kind] - 1:
        values = values.unsqueeze(1)
    if (
        kind == "image"
        and values.ndim == 4
        and values.shape[1] > 4
        and values.shape[3] in (1, 3, 4)
    ):
        values = values.permute(0, 3, 1, 2).contiguous()
    if values.ndim != _DIMS[kind] or 0 in values.shape[1:]:
        got = f"shape {list(x.shape)}"
        raise refusal(
            f"x of shape {SHAPES[kind]} in {source}", got, "reshape it, or another --kind"
        )
    return values


def _task(y: Tensor) -> Task:
    """Whole numbers are classes; so are floats that are few whole numbers from 0 on."""
    if y.ndim > 1 and y.shape[1:].numel() > 1:
        return "regression"
    if not y.is_floating_point():
        return "classification"
    few = bool(((y == y.round()) & (y >= 0) & (y < FEW_CLASSES)).all())
    return "classification" if few else "regression"


def _classes(
    y: Tensor, names: tuple[str, ...], test: Tensor | None, source: str
) -> tuple[Tensor, tuple[str, ...], Tensor | None]:
    """Labels as 0 to K-1, the names of the classes, and the labels of the test data likewise."""
    flat = y.reshape(-1)
    if len(flat) != len(y) or (y.is_floating_point() and bool((y != y.round()).any())):
        got = f"{y.dtype} of shape {list(y.shape)}"
        raise refusal(f"one whole number per sample as y in {source}", got, "--task regression")
    values, labels = torch.unique(flat.long(), return_inverse=True)
    if len(values) < 2:
        got = f"the one class {int(values[0])}"
        raise refusal(f"at least two classes in {source}", got, "check the labels, or regress")
    if len(values) > min(MOST_CLASSES, len(y) // 2):
        got = f"{len(values):,} for {len(y):,} samples"
        raise refusal(f"several samples per class in {source}", got, "--task regression")
    listed = values.tolist()
    named = tuple(names[v] if 0 <= v < len(names) else str(v) for v in listed)
    if test is None:
        return labels, named, None
    place = torch.searchsorted(values, test.reshape(-1).long()).clamp(max=len(values) - 1)
    unknown = values[place] != test.reshape(-1).long()
    if bool(unknown.any()):
        value = int(test.reshape(-1)[unknown][0])
        got = names[value] if 0 <= value < len(names) else f"{value}"
        what = f"only classes of the training data in the test data of {source}"
        raise refusal(what, f"the class {got}", "check both files of labels")
    return labels, named, place
