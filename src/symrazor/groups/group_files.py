r"""Read groups from JSON files with a name and generators.

{"name": "rotations of a square's corners", "permutations": [[1, 2, 3, 0]]}
{"name": "mirror", "matrices": [[[-1, 0], [0, 1]]]}
{"name": "boosts", "lie": [[[0, 1], [1, 0]]]}

A file has permutations, or matrices (discrete generators), lie (continuous generators), or both.
"""

import json
import math
from pathlib import Path
from typing import Any

from symrazor.groups.group import Group
from symrazor.groups.lie import LieAlgebra

FILE_SUFFIX = ".json"
"""Group options with this suffix are file names."""

MAX_FILE_BYTES = 1 << 20
MAX_GROUP_SIZE = 4096
"""Largest number of positions or dimensions."""


def is_group_file(name: object) -> bool:
    """Return whether a group option is a file name."""
    return isinstance(name, str) and name.lower().endswith(FILE_SUFFIX)


def from_file(path: str | Path) -> Group:
    """Read a group from a file and check it.

    Raises:
        ValueError: the file is too large or invalid, or does not describe a group.
        OSError: the file cannot be read.
    """
    file = Path(path)
    with file.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(
            f"{file}: a group file has at most {MAX_FILE_BYTES:,} bytes, this one has more."
        )
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}.") from error
    try:
        group = _parsed(document, file.stem)
        group.check()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return group


def _parsed(document: Any, default: str) -> Group:
    kinds = ("permutations", "matrices", "lie")
    present = [kind for kind in kinds if kind in document] if isinstance(document, dict) else []
    if not present or (present[0] == kinds[0] and len(present) > 1):
        raise ValueError(
            'A group file is an object with "permutations", or with "matrices" and "lie".'
        )
    unknown = sorted(set(document) - {"name", *kinds})
    if unknown:
        raise ValueError(f'Unknown keys {unknown}. Allowed: "name", {", ".join(kinds)}.')
    name = document.get("name", default)
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise ValueError(
            f"The name must have 1 to 200 printable characters, got {str(name)[:40]!r}."
        )
    if "permutations" in document:
        return Group.from_permutations(name, _rows(document["permutations"], 1, "permutations"))
    discrete = _rows(document["matrices"], 2, "matrices") if "matrices" in document else []
    flows = LieAlgebra.of(_rows(document["lie"], 2, "lie")) if "lie" in document else None
    return Group.from_matrices(name, discrete, flows)


def _rows(value: Any, depth: int, what: str) -> list[Any]:
    """Check a list of permutations (depth 1) or of square matrices (depth 2) and return it."""
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{what} must be a list with at least one entry, got {got}.")
    if not isinstance(value[0], list):
        raise ValueError(f"{what} must be a list of lists, got {str(value[0])[:40]} in row 0.")
    size = len(value[0])
    if not 1 <= size <= MAX_GROUP_SIZE:
        raise ValueError(
            f"Rows of {what} must have 1 to {MAX_GROUP_SIZE} entries, got {size} in row 0."
        )
    for number, row in enumerate(value):
        lists = row if depth > 1 else [row]
        square = isinstance(row, list) and len(row) == size
        if not square or not all(isinstance(line, list) and len(line) == size for line in lists):
            shape = f"{size} x {size} numbers" if depth > 1 else f"{size} numbers"
            raise ValueError(f"Row {number} of {what} must have {shape}.")
        for entry in (entry for line in lists for entry in line):
            integer = isinstance(entry, int) and not isinstance(entry, bool)
            real = integer or (isinstance(entry, float) and math.isfinite(entry))
            if not (real if depth > 1 else integer) or abs(entry) > 1e6:
                kind = "numbers" if depth > 1 else "integers"
                got = repr(entry)[:40]
                raise ValueError(f"Row {number} of {what} must contain {kind}, got {got}.")
    return value
