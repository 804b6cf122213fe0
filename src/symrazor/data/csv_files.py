# Over 400 lines: one format in its five layouts, which common rules tell apart.
"""Read tables, series, sets and trajectories from CSV files.

| columns | read as |
|---|---|
| numbers, and `y`, `label`, `class` or `target` (otherwise the last column) | a vector per row |
| `t0, t1, t2, ...` and a label | a series with one channel per row |
| `series`, `time`, values, label | series, one step per row |
| `set`, values, label | sets, one point per row |
| `trajectory`, `time`, coordinates | trajectories, one step per row |

Columns of text with few values are encoded (`symrazor.data.categories`), for a vector per row.
A column `id`, `file`, `filename`, `index`, or without a name, has names of the rows and is no
input. In a file without a header the last column is the label. Labels are classes if they are text
or at most `MAX_INFERRED_CLASSES` different integers.
"""

import csv
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symrazor.core.choices import Kind
from symrazor.core.errors import AmbiguousDataError
from symrazor.core.files import reader, reserve
from symrazor.data.arrays import FileContents, label_numbers
from symrazor.data.categories import Column, encode, encode_as, is_number
from symrazor.data.datasets import MAX_INFERRED_CLASSES

BYTES_PER_FIELD = 280
"""Memory that a field of a CSV file takes while it is read: measured with short fields."""
PADDED_COPIES = 3
"""Copies of padded trajectories, in float64, that are in memory while they are checked."""
_BLOCK_BYTES = 1 << 20
MAX_FIELD_CHARACTERS = 4096
MAX_EXACT_INTEGER = 2**53
"""Above this, every float64 number is an integer, so integers do not indicate classes."""
FIRST_UNNAMED_COLUMN = "column 1"
"""Name of the first column of a file without a header."""
NAME_COLUMNS = ("id", "file", "filename", "index", "")
"""Columns that name the rows."""
LABEL_COLUMNS = ("y", "label", "labels", "class", "target")
ID_COLUMNS: dict[str, Kind] = {"series": "series", "set": "set", "trajectory": "trajectory"}
TIME_COLUMNS = ("time", "t")
MIN_SERIES_STEPS = 8
"""Columns t0, t1, ... are read as one series if there are at least this many."""
FIX_FIELD = (
    "Remove the row, fill in the value, or choose other columns as inputs (--columns, columns=)."
)
_STEP_NAME = re.compile(r"t_?\d+")
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")

Numbers = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, tuple[str, ...]]
"""Column name in lower case -> text of every row."""


@reader
def read_csv(
    path: str | Path,
    labelled: bool = True,
    header: bool | None = None,
    inputs: Sequence[str] = (),
    together: str | None = None,
) -> FileContents:
    """Read a CSV file; the module docstring lists what is recognised. Numbers are float64.

    Args:
        path: UTF-8 file with commas, semicolons or tabs between the fields.
        labelled: False if the file may have no labels, as for `symrazor predict`.
        header: Whether the first row names the columns; recognised if it is not given.
        inputs: Columns to use as inputs; all others by default.
        together: Column that says which rows belong together, such as the patient; no input.

    Raises:
        AmbiguousDataError: The first row consists of numbers that may be names.
        ValueError: Rows or groups have different lengths, a number is not readable, or the file is
            too large. The message names the row.
    """
    path = Path(path)
    return read_table(read_columns(path, header), path, labelled, inputs, together)


def read_table(
    columns: Columns,
    path: Path,
    labelled: bool = True,
    inputs: Sequence[str] = (),
    together: str | None = None,
) -> FileContents:
    """Return the contents of a table; for the arguments see `read_csv`."""
    columns, rows_together = _select_columns(columns, path, inputs, together)
    id_column = next((name for name in ID_COLUMNS if name in columns), None)
    label = next((name for name in LABEL_COLUMNS if name in columns), None)
    if id_column == "trajectory":
        labels = {name for name in LABEL_COLUMNS if name != "y"}  # y is a coordinate here
        states = {name: text for name, text in columns.items() if name not in labels}
        x, times = read_trajectories(states, path)
        # Exact comparison: calendar times are large compared with their steps.
        share_times = bool((times == times[:1]).all())
        return FileContents(x, None, (), "trajectory", times[0] if share_times else times)
    id_name = None
    if id_column is None:
        id_name = next((name for name in NAME_COLUMNS if name in columns), None)
    ids = () if id_name is None else columns.pop(id_name)
    if label is None and labelled and columns:
        label = list(columns)[-1]
    y, names = (None, ()) if label is None else _parse_labels(columns.pop(label), path)
    if id_column is None:
        encoded: dict[str, Column] = encode(columns) if labelled else dict(columns)
        reserve(8 * sum(map(len, encoded.values())), path)
        values = torch.from_numpy(_parse_finite_numbers(encoded, path))
        is_series = len(columns) >= MIN_SERIES_STEPS and all(map(_STEP_NAME.fullmatch, columns))
        if is_series:
            table = FileContents(values, y, names, "series", target=label)
        else:
            table = FileContents(values, y, names, "vector", columns=tuple(encoded), target=label)
        return replace(table, ids=ids, id_name=id_name or "row", together=rows_together)
    ids = columns.pop(id_column)
    rows_of = _rows_by_id(ids, _pop_times(columns, path))
    table = _group_rows(
        _parse_finite_numbers(columns, path), y, rows_of, ID_COLUMNS[id_column], path
    )
    table = replace(table, names=names, columns=tuple(columns), target=label)
    if rows_together is not None:
        first = [rows[0] for rows in rows_of.values()]
        rows_together = rows_together[torch.tensor(first)]
    return replace(table, ids=tuple(rows_of), id_name=id_column, together=rows_together)


def select_inputs(columns: Columns, names: Sequence[str], path: Path) -> FileContents:
    """Return the inputs of a table for a network that was trained on columns of these names."""
    fields = encode_as(columns, names, path)
    values = _parse_finite_numbers(dict(zip(names, fields, strict=True)), path)
    id_name = next((name for name in NAME_COLUMNS if name in columns), None)
    ids = () if id_name is None else columns[id_name]
    x = torch.from_numpy(values)
    return FileContents(x, kind="vector", columns=tuple(names), ids=ids, id_name=id_name or "row")


def _select_columns(
    columns: Columns, path: Path, inputs: Sequence[str], together: str | None
) -> tuple[Columns, Tensor | None]:
    """Return the inputs, label and names of the rows; and which rows belong together."""
    chosen = [name.strip().lower() for name in inputs]
    group = None if together is None else together.strip().lower()
    unknown = [name for name in (*chosen, *([group] if group else [])) if name not in columns]
    if unknown:
        listed = ", ".join(list(columns)[:12])
        raise ValueError(f"{path} has no column {unknown[0]!r}. Columns: {listed}.")
    if chosen:
        kept = {*chosen, *LABEL_COLUMNS, *NAME_COLUMNS, *ID_COLUMNS, *TIME_COLUMNS, group}
        last = list(columns)[-1]  # the label, if no column has the name of one
        kept |= set() if set(LABEL_COLUMNS) & set(columns) else {last}
        columns = {name: text for name, text in columns.items() if name in kept}
    if group is None:
        return columns, None
    values = np.unique(np.array(columns[group]), return_inverse=True)[1]
    others = {name: text for name, text in columns.items() if name != group}
    return others, torch.from_numpy(values.reshape(-1).astype(np.int64))


@reader
def read_columns(path: Path, header: bool | None = None) -> Columns:
    """Return the text of every column; without a header they are "column 1", "column 2", ...

    Raises ValueError for a file that is empty, too large or not UTF-8, or whose columns do not fit.
    """
    reserve(2 * path.stat().st_size, path)
    reserve(BYTES_PER_FIELD * _max_fields(path), path)
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first_lines = "".join(islice(file, 2))
            file.seek(0)
            delimiter = max(",;\t", key=first_lines.count)
            rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"Cannot read {path} as a UTF-8 CSV file: {error}.") from error
    if len(rows) < 2:
        raise ValueError(f"{path} has fewer than two rows. Add data rows.")
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            raise ValueError(
                f"{path}, row {number}: {len(row)} fields, but the first row has {width}. "
                "Add or remove fields."
            )
    first = rows[0]
    if header is None:
        header = any(not is_number(field) for field in first[: max(1, width - 1)])
        if _may_be_data(rows) if header else _may_be_names(rows):
            raise AmbiguousDataError(
                f"The first row of {path} is {', '.join(first[:4])}, ...: names or data?",
                [
                    ("header", "yes", "the first row names the columns"),
                    ("header", "no", "the first row is data"),
                ],
            )
    if header:
        del rows[0]
    else:
        first = [f"column {number}" for number in range(1, width + 1)]
    names = [name.strip().lower() for name in first]
    if len(set(names)) < width:
        raise ValueError(f"{path} has two columns with the same name: {first[:8]}. Rename one.")
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def _may_be_names(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a first row of numbers may be a header.

    It may if its fields are consecutive integers from 0 or 1, which pandas writes for unnamed
    columns, or different integers above columns that have none.
    """
    first, n_inputs = rows[0], max(1, len(rows[0]) - 1)
    if not all(_INTEGER.fullmatch(field.strip()) for field in first[:n_inputs]):
        return False
    integers = [int(field) for field in first[:n_inputs]]
    if n_inputs > 2 and integers in ([*range(n_inputs)], [*range(1, n_inputs + 1)]):
        return True
    others = (field.strip() for row in rows[1:] for field in row[:n_inputs])
    return len(set(integers)) == n_inputs > 1 and not any(map(_INTEGER.fullmatch, others))


def _may_be_data(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a first row of numbers and text may be data.

    It may if every text in it stands above text only, and some number above numbers.
    """
    inputs = list(zip(*rows, strict=True))[: max(1, len(rows[0]) - 1)]
    texts = [column for column in inputs if not is_number(column[0])]
    if len(texts) == len(inputs):
        return False
    return all(not any(map(is_number, column)) for column in texts)


def _max_fields(path: Path) -> int:
    """Return the number of fields, or a little more, without splitting the file into them."""
    count = 1
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            separators = max(map(block.count, (b",", b";", b"\t")))
            count += separators + block.count(b"\n") + block.count(b"\r")
    return count


def parse_numbers(columns: Mapping[str, Column], path: Path) -> Numbers:
    """Return columns as a float64 array [rows, columns]; empty fields are NaN.

    Raises ValueError if there are no columns, or names a field that is not a number.
    """
    if not columns:
        raise ValueError(
            f"{path} has no input columns besides the label. Separate columns by commas, "
            "semicolons or tabs."
        )
    arrays = []
    for name, fields in columns.items():
        if isinstance(fields, np.ndarray):
            arrays.append(fields)
            continue
        try:
            arrays.append(np.array([field.strip() or "nan" for field in fields], np.float64))
        except ValueError:
            row, field = next((i, f) for i, f in enumerate(fields, 1) if not is_number(f or "nan"))
            if is_number(field.replace(",", ".", 1)):
                action = "Write numbers with a decimal point."
            else:
                action = FIX_FIELD
            raise ValueError(
                f"{path}, column {name!r}, data row {row}: not a number ({field!r}). {action}"
            ) from None
    return np.stack(arrays, 1)


def _parse_finite_numbers(columns: Mapping[str, Column], path: Path) -> Numbers:
    """Return columns as a float64 array [rows, columns]; empty and infinite fields are errors."""
    values = parse_numbers(columns, path)
    not_finite = np.argwhere(~np.isfinite(values))
    if len(not_finite):
        row, column = not_finite[0]
        name, fields = list(columns.items())[column]
        raise ValueError(
            f"{path}, column {name!r}, data row {row + 1}: not a finite number ({fields[row]!r}). "
            f"{FIX_FIELD}"
        )
    return values


def read_trajectories(columns: Columns, path: Path) -> tuple[Tensor, Tensor]:
    """Return states [n, time, d] and times [n, time] from an id, a time and coordinates.

    The id is "trajectory", otherwise the first column; the time is "time" or "t". Rows are sorted
    by time. Shorter trajectories are padded with NaN. If all coordinates form pairs such as q1 and
    p1, or x and px, positions come first, with a warning if that changes the order.

    Raises:
        ValueError: There is no id or time, a state is infinite, or a time occurs twice; the message
            names the row.
    """
    coordinates = dict(columns)
    id_column = "trajectory" if "trajectory" in coordinates else next(iter(coordinates))
    ids = coordinates.pop(id_column)
    row_times = _pop_times(coordinates, path)
    if row_times is None:
        raise ValueError(f"{path} has no column 'time' or 't'. Add the time of each row.")
    blank = next((row for row, name in enumerate(ids, 1) if not name.strip()), None)
    if blank is not None:
        raise ValueError(
            f"{path}, data row {blank}: the trajectory id is empty. Fill it in or drop the row."
        )
    names = _positions_first(list(coordinates))
    if names != list(coordinates):
        warnings.warn(f"{path}: using the columns in the order {', '.join(names)}", stacklevel=2)
    values = parse_numbers({name: coordinates[name] for name in names}, path)
    rows_of = _rows_by_id(ids, row_times)
    _check_trajectory_rows(values, row_times, rows_of, path)
    n_steps = max(len(rows) for rows in rows_of.values())
    padded = 8 * len(rows_of) * n_steps * (values.shape[1] + 1)
    reserve(PADDED_COPIES * padded, path)
    x = torch.full((len(rows_of), n_steps, values.shape[1]), torch.nan, dtype=torch.float64)
    times = torch.zeros(len(rows_of), n_steps, dtype=torch.float64)
    for number, rows in enumerate(rows_of.values()):
        x[number, : len(rows)] = torch.from_numpy(values[rows])
        known = torch.from_numpy(row_times[rows])
        step = (known[-1] - known[0]) / (len(rows) - 1) if len(rows) > 1 else 1.0
        times[number, : len(rows)] = known
        times[number, len(rows) :] = known[-1] + step * torch.arange(1, n_steps - len(rows) + 1)
    return x, times


def _positions_first(names: list[str]) -> list[str]:
    """Order names as positions, then momenta, if every name belongs to such a pair."""
    momentum_of: dict[str, str] = {}
    for name in names:
        if name[0:1] in ("p", "v"):
            suffix = name[1:]
            candidates = (f"q{suffix}", suffix, suffix.removeprefix("_"))
            position = next((other for other in candidates if other in names), None)
            if position is not None:
                momentum_of[position] = name
    positions = [name for name in names if name in momentum_of]
    is_complete = {*positions, *momentum_of.values()} == set(names)
    if not is_complete or 2 * len(positions) != len(names):
        return names
    return positions + [momentum_of[name] for name in positions]


def _pop_times(columns: Columns, path: Path) -> Numbers | None:
    name = next((name for name in TIME_COLUMNS if name in columns), None)
    return None if name is None else parse_numbers({name: columns.pop(name)}, path)[:, 0]


def _rows_by_id(ids: tuple[str, ...], times: Numbers | None) -> dict[str, list[int]]:
    """Return the row numbers of each id, sorted by time if there is one."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(ids):
        rows_of.setdefault(name, []).append(row)
    if times is None:
        return rows_of
    return {name: sorted(rows, key=lambda r: times[r]) for name, rows in rows_of.items()}


def _parse_labels(fields: tuple[str, ...], path: Path) -> tuple[Tensor, tuple[str, ...]]:
    stripped = [field.strip() for field in fields]
    if not all(is_number(field) or not field for field in stripped):
        if "" in stripped:
            return label_numbers([field or None for field in stripped])
        names, index = np.unique(np.array(stripped), return_inverse=True)
        return torch.from_numpy(index.astype(np.int64)), tuple(names.tolist())
    integers = [int(field) if _INTEGER.fullmatch(field) else 0 for field in stripped]
    if any(abs(value) > MAX_EXACT_INTEGER and int(float(value)) != value for value in integers):
        raise ValueError(
            f"{path}: labels above 2^53 lose digits as numbers. Number the classes 0, 1, ..., or "
            "subtract a constant from the targets."
        )
    values = np.array([field or "nan" for field in stripped], np.float64)
    are_integers = all(abs(v) < MAX_EXACT_INTEGER and v == round(v) for v in values)
    if are_integers and len(np.unique(values)) <= MAX_INFERRED_CLASSES:
        return torch.from_numpy(values.astype(np.int64)), ()
    return torch.from_numpy(values), ()


def _group_rows(
    values: Numbers, y: Tensor | None, rows_of: dict[str, list[int]], kind: Kind, path: Path
) -> FileContents:
    """Combine the rows of each id into one sample."""
    lengths = {name: len(rows) for name, rows in rows_of.items()}
    first = next(iter(lengths))
    other = next((name for name in lengths if lengths[name] != lengths[first]), None)
    if other is not None:
        raise ValueError(
            f"{path}: {kind} {first!r} has {lengths[first]} rows and {kind} {other!r} has "
            f"{lengths[other]}. Cut or pad them to the same length."
        )
    index = np.array(list(rows_of.values()))
    x = torch.from_numpy(values[index])
    if y is not None:
        row_labels = y[torch.from_numpy(index)]
        is_mixed = (row_labels != row_labels[:, :1]).any(1)
        if bool(is_mixed.any()):
            culprit = list(rows_of)[int(is_mixed.nonzero()[0])]
            raise ValueError(
                f"{path}: {kind} {culprit!r} has several labels. Repeat one label in all its rows."
            )
        y = row_labels[:, 0]
    if kind == "series":
        x = x.transpose(1, 2).contiguous()
    return FileContents(x, y, (), kind)


def _check_trajectory_rows(
    values: Numbers, times: Numbers, rows_of: dict[str, list[int]], path: Path
) -> None:
    infinite = np.isinf(values).any(1)
    for is_bad, problem in ((~np.isfinite(times), "no time"), (infinite, "an infinite state")):
        if is_bad.any():
            row = int(is_bad.argmax()) + 1
            raise ValueError(
                f"{path}, data row {row}: {problem}. Fill in the value or drop the row."
            )
    for name, rows in rows_of.items():
        for before, after in pairwise(rows):
            if not times[after] > times[before]:
                raise ValueError(
                    f"{path}, data rows {before + 1} and {after + 1}: trajectory {name!r} has two "
                    f"states at time {times[after]:g}. Drop one of them."
                )
