r"""A group from a small file: JSON with a name and its generators, and nothing else.

{"name": "rotations of a square's corners", "permutations": [[1, 2, 3, 0]]}
{"name": "mirror", "matrices": [[[-1, 0], [0, 1]]]}
{"name": "boosts", "lie": [[[0, 1], [1, 0]]]}

Permutations, or matrices (discrete generators) and lie (continuous ones), of which one may be
missing.
"""

import json
import math
from pathlib import Path
from typing import Any

from symrazor.groups.group import Group
from symrazor.groups.lie import LieAlgebra

SUFFIX = ".json"
"""What the name of such a file ends with, where it stands for the name of a group."""

MAX_FILE_BYTES = 1 << 20
"""Bytes of a file, at most."""

LARGEST_SIZE = 4096
"""Places or dimensions, at most."""


def is_group_file(name: object) -> bool:
    """Whether what stands for a group is the name of a file."""
    return isinstance(name, str) and name.lower().endswith(SUFFIX)


def from_file(path: str | Path) -> Group:
    """The group that a file describes, checked.

    Raises:
        ValueError: a file that is too large, no such JSON, or no group; names the row.
        OSError: a file that cannot be read.
    """
    file = Path(path)
    with file.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(
            f"expected a group of at most {MAX_FILE_BYTES:,} bytes, got more in {file}"
        )
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {file}, got something else: {error}") from error
    try:
        group = _parsed(document, file.stem)
        group.check()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return group


def _parsed(document: Any, default: str) -> Group:
    kinds = ("permutations", "matrices", "lie")
    given = [kind for kind in kinds if kind in document] if isinstance(document, dict) else []
    if not given or (given[0] == kinds[0] and len(given) > 1):
        raise ValueError('expected an object with "permutations", or with "matrices" and "lie"')
    unknown = sorted(set(document) - {"name", *kinds})
    if unknown:
        raise ValueError(f'expected "name", {", ".join(kinds)} alone, got {unknown} too')
    name = document.get("name", default)
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise ValueError(
            f"expected a name of 1 to 200 printable characters, got {str(name)[:40]!r}"
        )
    if "permutations" in document:
        return Group.from_permutations(name, _rows(document["permutations"], 1, "permutations"))
    discrete = _rows(document["matrices"], 2, "matrices") if "matrices" in document else []
    flows = LieAlgebra.of(_rows(document["lie"], 2, "lie")) if "lie" in document else None
    return Group.from_matrices(name, discrete, flows)


def _rows(value: Any, depth: int, what: str) -> list[Any]:
    """A list of equally long lists of numbers, so deep; whole ones for permutations."""
    if not isinstance(value, list) or not value:
        got = "an empty one" if value == [] else type(value).__name__
        raise ValueError(f"expected a list of {what}, got {got}")
    if not isinstance(value[0], list):
        raise ValueError(
            f"expected a list of {what}, each in brackets of its own, got {str(value[0])[:40]} "
            "in row 0"
        )
    size = len(value[0])
    if not 1 <= size <= LARGEST_SIZE:
        raise ValueError(f"expected rows of 1 to {LARGEST_SIZE} entries, got {size} in row 0")
    for number, row in enumerate(value):
        lists = row if depth > 1 else [row]
        square = isinstance(row, list) and len(row) == size
        if not square or not all(isinstance(line, list) and len(line) == size for line in lists):
            shape = f"{size} x {size} numbers" if depth > 1 else f"{size} numbers"
            raise ValueError(f"expected {shape} in row {number} of {what}, got another shape")
        for entry in (entry for line in lists for entry in line):
            whole = isinstance(entry, int) and not isinstance(entry, bool)
            real = whole or (isinstance(entry, float) and math.isfinite(entry))
            if not (real if depth > 1 else whole) or abs(entry) > 1e6:
                kind = "numbers" if depth > 1 else "whole numbers"
                got = repr(entry)[:40]
                raise ValueError(f"expected {kind} in row {number} of {what}, got {got}")
    return value
