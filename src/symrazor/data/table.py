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

import csv
import math
import re
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.data.batches import refusal
from symrazor.data.dataset import FEW_CLASSES, Kind

LABELS = ("y", "label", "labels", "class", "target")
IDS: dict[str, Kind] = {"series": "series", "set": "set", "trajectory": "trajectory"}
TIMES = ("time", "t")
LARGEST = 200_000_000
"""Bytes of a CSV file: text takes ten times its size while it is read."""
Numbers = np.ndarray[Any, np.dtype[Any]]
_STEP = re.compile(r"t_?\d+")
_LARGEST_FIELD = 4096


@dataclass(frozen=True)
class Table:
    """What a CSV file holds: x, y or None, names of classes, kind, times of trajectories."""

    x: Tensor
    y: Tensor | None
    names: tuple[str, ...]
    kind: Kind
    times: Tensor | None = None


def read_csv(path: str | Path, labelled: bool = True) -> Table:
    """Read a CSV file; see the module for what is recognised.

    Args:
        path: the file, UTF-8, comma, semicolon or tab between the fields.
        labelled: False where the file may come without labels, for `symrazor predict`.

    Raises:
        ValueError: ragged rows, text among numbers, groups of different lengths, too much.
    """
    path = Path(path)
    header, rows = _rows(path)
    lower = [name.strip().lower() for name in header]
    group = next((name for name in IDS if name in lower), None)
    label = next((name for name in LABELS if name in lower), None)
    if label is None and labelled and group != "trajectory":
        label = lower[-1]
    named = dict(zip(lower, zip(*rows, strict=True), strict=True))
    y, names = (None, ()) if label is None else _labels(named.pop(label), path)
    if group is None:
        values = _numbers(named, path)
        steps = len(named) >= 8 and all(_STEP.fullmatch(name) for name in named)
        return Table(torch.from_numpy(values), y, names, "series" if steps else "vector")
    ids = named.pop(group)
    clock = next((name for name in TIMES if name in named), None)
    times = None if clock is None else _numbers({clock: named.pop(clock)}, path, np.float64)[:, 0]
    return _grouped(_numbers(named, path), y, names, ids, times, IDS[group], path)


def _rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header (made up where there is none) and rows, all of one length."""
    if path.stat().st_size > LARGEST:
        got = f"{path} of {path.stat().st_size / 1e6:,.0f} MB"
        raise refusal(f"a CSV file of at most {LARGEST / 1e6:.0f} MB", got, "save it as .npz")
    csv.field_size_limit(_LARGEST_FIELD)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            sample = "".join(islice(file, 2))
            file.seek(0)
            counts = {mark: sample.count(mark) for mark in ",;\t"}
            mark = max(counts, key=lambda key: counts[key])
            rows = [row for row in csv.reader(file, delimiter=mark) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise refusal("a CSV file in UTF-8", f"{path}: {error}", "save it as UTF-8") from error
    if len(rows) < 2:
        raise refusal("a CSV file with rows", f"{path} with {len(rows)}", "check the path")
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            got = f"{len(row)} in row {number} of {path}"
            raise refusal(f"{width} fields as in the first row", got, "repair that row")
    if any(not _is_number(field) for field in rows[0][: max(1, width - 1)]):
        header = rows.pop(0)
    else:
        header = [f"column {number}" for number in range(1, width + 1)]
    if len({name.strip().lower() for name in header}) < width:
        raise refusal(f"column names that differ in {path}", str(header[:8]), "rename them")
    return header, rows


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _numbers(
    columns: dict[str, tuple[str, ...]], path: Path, kind: type[np.floating[Any]] = np.float32
) -> Numbers:
    """Columns as [rows, columns] numbers."""
    if not columns:
        do = "add the inputs; commas, semicolons or tabs separate columns"
        raise refusal(f"columns of numbers in {path}", "none beside labels", do)
    found = []
    for name, fields in columns.items():
        try:
            found.append(np.array([field.strip() or "nan" for field in fields], kind))
        except ValueError:
            row, field = next((i, f) for i, f in enumerate(fields, 1) if not _is_number(f or "nan"))
            got = f"{field!r} in column {name!r}, data row {row} of {path}"
            do = "encode text as numbers, or drop the column"
            if _is_number(field.replace(",", ".", 1)):
                do = "write numbers with a decimal point"
            raise refusal("a number", got, do) from None
    return np.stack(found, 1)


def _labels(fields: tuple[str, ...], path: Path) -> tuple[Tensor, tuple[str, ...]]:
    """Text and few whole numbers are classes, other numbers are targets."""
    cleaned = [field.strip() for field in fields]
    if not all(map(_is_number, cleaned)):
        if "" in cleaned:
            what = f"a label in every row of {path}"
            raise refusal(what, f"none in data row {cleaned.index('') + 1}", "fill or drop the row")
        names, index = np.unique(np.array(cleaned), return_inverse=True)
        return torch.from_numpy(index.astype(np.int64)), tuple(names.tolist())
    values = np.array(cleaned, np.float64)
    whole = all(math.isfinite(v) and v == round(v) for v in values)
    if whole and len(np.unique(values)) <= FEW_CLASSES:
        return torch.from_numpy(values.astype(np.int64)), ()
    return torch.from_numpy(values.astype(np.float32)), ()


def _grouped(
    values: Numbers,
    y: Tensor | None,
    names: tuple[str, ...],
    ids: tuple[str, ...],
    times: Numbers | None,
    kind: Kind,
    path: Path,
) -> Table:
    """Rows with the same id are one sample, in the order of their times."""
    order: dict[str, list[int]] = {}
    for row, name in enumerate(ids):
        order.setdefault(name, []).append(row)
    if times is not None:
        order = {name: sorted(rows, key=lambda r: times[r]) for name, rows in order.items()}
    if kind == "trajectory":
        return _trajectories(values, times, order, path)
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


def _trajectories(
    values: Numbers, times: Numbers | None, order: dict[str, list[int]], path: Path
) -> Table:
    """Trajectories with their times; shorter ones end with missing states, which are NaN."""
    if times is None:
        raise refusal(f"a column 'time' in {path}", f"{sorted(set(TIMES))} missing", "add it")
    _check_rows(values, times, order, path)
    longest = max(len(rows) for rows in order.values())
    x = torch.full((len(order), longest, values.shape[1]), torch.nan)
    clock = torch.zeros(len(order), longest, dtype=torch.float64)
    for place, rows in enumerate(order.values()):
        x[place, : len(rows)] = torch.from_numpy(values[rows])
        seen = torch.from_numpy(times[rows])
        gap = (seen[-1] - seen[0]) / (len(rows) - 1) if len(rows) > 1 else 1.0
        clock[place, : len(rows)] = seen
        clock[place, len(rows) :] = seen[-1] + gap * torch.arange(1, longest - len(rows) + 1)
    shared = torch.allclose(clock, clock[:1].expand_as(clock))
    return Table(x, None, (), "trajectory", clock[0] if shared else clock)


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
