"""Text between commas as columns of numbers: what every reader of CSV files begins with."""

import csv
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from symrazor.data.batches import refusal

LARGEST = 200_000_000
"""Bytes of a CSV file: text takes ten times its size while it is read."""
Numbers = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, tuple[str, ...]]
"""Name in lower case -> text of every row."""
MADE_UP = "column 1"
"""Name of the first column of a file without a header."""
_LARGEST_FIELD = 4096


def read_columns(path: Path) -> Columns:
    """The columns of a file, in UTF-8, with comma, semicolon or tab between the fields.

    Without a header they are "column 1", "column 2", ...

    Raises:
        ValueError: ragged rows, no rows, names that occur twice, another encoding, too much.
    """
    header, rows = _rows(path)
    names = [name.strip().lower() for name in header]
    return dict(zip(names, zip(*rows, strict=True), strict=True))


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
    if any(not is_number(field) for field in rows[0][: max(1, width - 1)]):
        header = rows.pop(0)
    else:
        header = [f"column {number}" for number in range(1, width + 1)]
    if len({name.strip().lower() for name in header}) < width:
        raise refusal(f"column names that differ in {path}", str(header[:8]), "rename them")
    return header, rows


def is_number(field: str) -> bool:
    """Whether a field is a number."""
    try:
        float(field)
    except ValueError:
        return False
    return True


def numbers(columns: Mapping[str, tuple[str, ...]], path: Path) -> Numbers:
    """Return columns as a float64 array [rows, columns]; empty fields are NaN.

    Raises:
        ValueError: no columns, or text; the field is named.
    """
    if not columns:
        do = "add the inputs; commas, semicolons or tabs separate columns"
        raise refusal(f"columns of numbers in {path}", "none beside labels", do)
    found = []
    for name, fields in columns.items():
        try:
            found.append(np.array([field.strip() or "nan" for field in fields], np.float64))
        except ValueError:
            row, field = next((i, f) for i, f in enumerate(fields, 1) if not is_number(f or "nan"))
            got = f"{field!r} in column {name!r}, data row {row} of {path}"
            do = "encode text as numbers, or drop the column"
            if is_number(field.replace(",", ".", 1)):
                do = "write numbers with a decimal point"
            raise refusal("a number", got, do) from None
    return np.stack(found, 1)
