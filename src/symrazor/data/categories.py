"""Encode columns of text as numbers: one column of zeros and ones for each value.

The column of the value "Ulm" of "town" is named "town = Ulm". A run stores these names, so that new
tables are encoded as the training data, whatever the order of their columns.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_CATEGORIES = 20
"""Largest number of different values of a column of text that is encoded."""
MIN_ROWS_PER_CATEGORY = 2
SEPARATOR = " = "

Numbers = np.ndarray[Any, np.dtype[Any]]
Column = tuple[str, ...] | Numbers
"""Text of every row, or numbers."""


def is_number(field: str) -> bool:
    """Return whether a field can be read as a number."""
    try:
        float(field)
    except ValueError:
        return False
    return True


def is_missing(value: object) -> bool:
    """Return whether a value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def encode(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Replace every column of text by one column for each of its values."""
    encoded: dict[str, Column] = {}
    for name, fields in columns.items():
        values = [] if isinstance(fields, np.ndarray) else _categories(fields)
        if not values:
            encoded[name] = fields
        for value in values:
            encoded[f"{name}{SEPARATOR}{value}"] = _indicator(fields, value)
    return encoded


def encode_as(columns: Mapping[str, Column], names: Sequence[str], source: str | Path) -> list[Any]:
    """Return the columns of some names, in their order; texts are encoded as the names say.

    Raises:
        ValueError: a column is missing; the message names it.
    """
    by_name = {name.strip().lower(): fields for name, fields in columns.items()}
    found, known = [], dict[str, set[str]]()
    for name in names:
        base, separator, value = name.partition(SEPARATOR)
        own, base = name.strip().lower(), base.strip().lower()
        if own in by_name:
            found.append(by_name[own])
        elif separator and base in by_name:
            found.append(_indicator(by_name[base], value))
            known.setdefault(base, {""}).add(value)
        else:
            listed = ", ".join(list(columns)[:12])
            missing = base if separator else name
            raise ValueError(
                f"{source} has no column {missing!r}, which the network needs. Columns: {listed}."
            )
    for base, values in known.items():
        _warn_of_others(by_name[base], values, base, source)
    return found


def _categories(fields: Sequence[str]) -> list[str]:
    """Return the values of a column of text; none if it has a number, or too many values."""
    values = {field.strip() for field in fields} - {""}
    if len(values) > MAX_CATEGORIES or len(fields) < MIN_ROWS_PER_CATEGORY * len(values):
        return []
    return [] if any(map(is_number, values)) else sorted(values)


def _indicator(fields: Column, value: str) -> Numbers:
    return np.array([field.strip() == value for field in fields], np.float64)


def _warn_of_others(fields: Column, known: set[str], name: str, source: str | Path) -> None:
    others = [(row, f.strip()) for row, f in enumerate(fields, 1) if f.strip() not in known]
    if others:
        row, value = others[0]
        warnings.warn(
            f"{source}, column {name!r}: {len(others):,} values that the training data do not "
            f"have, the first in data row {row} ({value!r}). They count as none of the known ones.",
            stacklevel=4,
        )


def frame_columns(frame: Any) -> dict[str, Column]:
    """Return the columns of a frame of pandas or polars: numbers, or text with "" where missing."""
    columns: dict[str, Column] = {}
    for name in frame.columns:
        values = np.asarray(frame[name].to_numpy())
        if values.dtype.kind not in "biuf":
            fields = values.tolist()
            if not all(isinstance(field, str) or is_missing(field) for field in fields):
                raise ValueError(
                    f"Column {name!r} of x holds neither numbers nor text ({values.dtype}). Drop "
                    "it or encode it."
                )
            columns[str(name)] = tuple("" if is_missing(field) else field for field in fields)
        else:
            columns[str(name)] = values
    return columns


def stack(columns: Sequence[Column], names: Sequence[str]) -> Numbers:
    """Return columns as an array [rows, columns]; ValueError if one holds text."""
    text = next((n for n, c in zip(names, columns, strict=True) if isinstance(c, tuple)), None)
    if text is not None:
        raise ValueError(
            f"Column {text!r} of x holds text with more than {MAX_CATEGORIES} values, or too few "
            "rows for each. Drop it, or encode it as numbers."
        )
    return np.stack(columns, 1)
