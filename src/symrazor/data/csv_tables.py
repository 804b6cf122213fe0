"""Comma-separated values: tables, series, sets and trajectories.

| columns | read as |
|---|---|
| numbers, and one `y`, `label`, `class` or `target` (else the last one) | vectors, a row each |
| `t0, t1, t2, ...` and a label | series of one channel, a row each |
| `series`, `time`, values, label | series, a row per step |
| `set`, values, label | sets, a row per point |
| `trajectory`, `time`, coordinates | trajectories, a row per step |

Without a header the last column is the label. Labels that are text, or whole numbers of which there
are few, are classes.
"""

import re
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from symrazor.data.batches import refusal
from symrazor.data.csv_columns import Columns, Numbers, is_number, numbers, read_columns
from symrazor.data.datasets import FEW_CLASSES, Kind

LABELS = ("y", "label", "labels", "class", "target")
IDS: dict[str, Kind] = {"series": "series", "set": "set", "trajectory": "trajectory"}
TIMES = ("time", "t")
LARGEST_WHOLE = 2**53
"""Beyond, all float64 numbers are whole, and say nothing about classes."""
_STEP = re.compile(r"t_?\d+")


@dataclass(frozen=True)
class Table:
    """The contents of a CSV file.

    Args:
        x: float64 inputs.
        y: classes or targets; None where there are none.
        names: of the classes.
        kind: of the inputs.
        times: of trajectories.
        columns: names of the columns of x, where each is a feature or a channel.
    """

    x: Tensor
    y: Tensor | None
    names: tuple[str, ...]
    kind: Kind
    times: Tensor | None = None
    columns: tuple[str, ...] = ()


def read_csv(path: str | Path, labelled: bool = True) -> Table:
    """Read a CSV file; see the module for what is recognised.

    Args:
        path: the file, UTF-8, comma, semicolon or tab between the fields.
        labelled: False where the file may come without labels, for `symrazor predict`.

    Raises:
        ValueError: ragged rows, text among numbers, groups of different lengths, too much.
    """
    path = Path(path)
    named = read_columns(path)
    group = next((name for name in IDS if name in named), None)
    label = next((name for name in LABELS if name in named), None)
    if group == "trajectory":
        labels = {name for name in LABELS if name != "y"}  # y is a coordinate, beside x
        x, clock = read_trajectories({k: v for k, v in named.items() if k not in labels}, path)
        shared = bool((clock == clock[:1]).all())  # exactly: days are long beside their steps
        return Table(x, None, (), "trajectory", clock[0] if shared else clock)
    if label is None and labelled:
        label = list(named)[-1]
    y, names = (None, ()) if label is None else _labels(named.pop(label), path)
    if group is None:
        values = numbers(named, path)
        steps = len(named) >= 8 and all(_STEP.fullmatch(name) for name in named)
        if steps:
            return Table(torch.from_numpy(values), y, names, "series")
        return Table(torch.from_numpy(values), y, names, "vector", columns=tuple(named))
    ids = named.pop(group)
    order = _order(ids, _times(named, path))
    table = _grouped(numbers(named, path), y, names, order, IDS[group], path)
    return replace(table, columns=tuple(named))


def read_trajectories(columns: Columns, path: Path) -> tuple[Tensor, Tensor]:
    """States [n, time, d] and times [n, time] of columns that are an id, a time and coordinates.

    Rows are sorted by time. Shorter trajectories end with missing states, which are NaN. Where all
    names are pairs such as q1 and p1, or x and px, positions come first, with a warning.

    Args:
        columns: "trajectory" is the id, else the first; "time" or "t" the time.
        path: of the file, for what is wrong with it.

    Raises:
        ValueError: no id, no time, infinite states, two rows of one time; the row is named.
    """
    left = dict(columns)
    ids = left.pop("trajectory" if "trajectory" in left else next(iter(left)))
    times = _times(left, path)
    if times is None:
        raise refusal(f"a column 'time' in {path}", f"{sorted(set(TIMES))} missing", "add it")
    blank = next((row for row, name in enumerate(ids, 1) if not name.strip()), None)
    if blank is not None:
        got = f"none in data row {blank} of {path}"
        raise refusal("the id of a trajectory in every row", got, "fill it, or drop that row")
    names = _positions_first(list(left))
    if names != list(left):
        warnings.warn(f"columns of {path} are taken in the order {', '.join(names)}", stacklevel=2)
    values = numbers({name: left[name] for name in names}, path)
    order = _order(ids, times)
    _check_rows(values, times, order, path)
    longest = max(len(rows) for rows in order.values())
    x = torch.full((len(order), longest, values.shape[1]), torch.nan, dtype=torch.float64)
    clock = torch.zeros(len(order), longest, dtype=torch.float64)
    for place, rows in enumerate(order.values()):
        x[place, : len(rows)] = torch.from_numpy(values[rows])
        seen = torch.from_numpy(times[rows])
        gap = (seen[-1] - seen[0]) / (len(rows) - 1) if len(rows) > 1 else 1.0
        clock[place, : len(rows)] = seen
        clock[place, len(rows) :] = seen[-1] + gap * torch.arange(1, longest - len(rows) + 1)
    return x, clock


def _positions_first(names: list[str]) -> list[str]:
    """Positions, then their momenta, where the names say which is which; else as they are."""
    momenta: dict[str, str] = {}  # of a position
    for name in names:
        if name[0:1] in ("p", "v"):
            rest = name[1:]
            candidates = (f"q{rest}", rest, rest.removeprefix("_"))
            position = next((other for other in candidates if other in names), None)
            if position is not None:
                momenta[position] = name
    positions = [name for name in names if name in momenta]
    if {*positions, *momenta.values()} != set(names) or 2 * len(positions) != len(names):
        return names
    return positions + [momenta[name] for name in positions]


def _times(columns: Columns, path: Path) -> Numbers | None:
    """The column of times, taken out."""
    name = next((name for name in TIMES if name in columns), None)
    return None if name is None else numbers({name: columns.pop(name)}, path)[:, 0]


def _order(ids: tuple[str, ...], times: Numbers | None) -> dict[str, list[int]]:
    """The rows of each id, by time where there is one."""
    order: dict[str, list[int]] = {}
    for row, name in enumerate(ids):
        order.setdefault(name, []).append(row)
    if times is None:
        return order
    return {name: sorted(rows, key=lambda r: times[r]) for name, rows in order.items()}


def _labels(fields: tuple[str, ...], path: Path) -> tuple[Tensor, tuple[str, ...]]:
    """Text and few whole numbers are classes, other numbers are targets."""
    cleaned = [field.strip() for field in fields]
    if not all(map(is_number, cleaned)):
        if "" in cleaned:
            what = f"a label in every row of {path}"
            raise refusal(what, f"none in data row {cleaned.index('') + 1}", "fill or drop the row")
        names, index = np.unique(np.array(cleaned), return_inverse=True)
        return torch.from_numpy(index.astype(np.int64)), tuple(names.tolist())
    values = np.array(cleaned, np.float64)
    whole = all(abs(v) < LARGEST_WHOLE and v == round(v) for v in values)
    if whole and len(np.unique(values)) <= FEW_CLASSES:
        return torch.from_numpy(values.astype(np.int64)), ()
    return torch.from_numpy(values), ()


def _grouped(
    values: Numbers,
    y: Tensor | None,
    names: tuple[str, ...],
    order: dict[str, list[int]],
    kind: Kind,
    path: Path,
) -> Table:
    """Rows with the same id are one sample, in the order of their times."""
    lengths = {name: len(rows) for name, rows in order.items()}
    first = next(iter(lengths))
    other = next((name for name in lengths if lengths[name] != lengths[first]), None)
    if other is not None:
        got = f"{lengths[first]} for {kind} {first!r} and {lengths[other]} for {other!r} in {path}"
        raise refusal(f"as many rows for each {kind}", got, "cut them to one length")
    index = np.array(list(order.values()))
    x = torch.from_numpy(values[index])
    if y is not None:
        of_samples = y[torch.from_numpy(index)]
        mixed = (of_samples != of_samples[:, :1]).any(1)
        if bool(mixed.any()):
            culprit = list(order)[int(mixed.nonzero()[0])]
            got = f"several for {kind} {culprit!r} in {path}"
            raise refusal(f"one label for each {kind}", got, "repeat the same label in its rows")
        y = of_samples[:, 0]
    if kind == "series":
        x = x.transpose(1, 2).contiguous()
    return Table(x, y, names, kind)


def _check_rows(values: Numbers, times: Numbers, order: dict[str, list[int]], path: Path) -> None:
    """Refuse rows of trajectories that have no time, are infinite, or there twice; name them."""
    for bad, what in ((~np.isfinite(times), "a time"), (np.isinf(values).any(1), "finite states")):
        if bad.any():
            got = f"none in data row {int(bad.argmax()) + 1} of {path}"
            raise refusal(f"{what} in every row", got, "fill it, or drop that row")
    for name, rows in order.items():
        for before, after in pairwise(rows):
            if not times[after] > times[before]:
                both = f"data rows {before + 1} and {after + 1} of {path}"
                what = f"one row for each time of trajectory {name!r}"
                raise refusal(what, f"{times[after]:g} in {both}", "drop one of them")
