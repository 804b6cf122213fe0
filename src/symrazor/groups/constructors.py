"""Construct common groups, and read groups from JSON files.

Rotations and reflections are matrices on coordinates (x, y) or (x, y, z), in the opposite order of
the axes of a tensor: x is the last axis. On an image, whose rows are numbered downwards, a positive
angle is a clockwise rotation.

A file has a name and generators: permutations, or matrices (discrete generators), lie (continuous
generators), or both.

{"name": "rotations of a square's corners", "permutations": [[1, 2, 3, 0]]}
{"name": "mirror", "matrices": [[[-1, 0], [0, 1]]]}
{"name": "boosts", "lie": [[[0, 1], [1, 0]]]}
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symrazor.core.files import reader
from symrazor.core.validation import check_positive_integer
from symrazor.groups import lie
from symrazor.groups.generators import grid_shape
from symrazor.groups.group import Group

FILE_SUFFIX = ".json"
"""Group options with this suffix are file names."""

MAX_FILE_BYTES = 1 << 20
MAX_GROUP_SIZE = 4096
"""Largest number of positions or dimensions."""


def trivial(n: int) -> Group:
    """Return the trivial group on n positions."""
    identity = torch.arange(check_positive_integer("n", n)).unsqueeze(0)
    return Group.from_permutations("1", identity, ("e",))


def symmetric(n: int) -> Group:
    """Return all permutations of n positions, from a transposition and a cycle."""
    check_positive_integer("n", n)
    if n == 1:
        return Group.from_permutations("S1", torch.zeros(1, 1, dtype=torch.long), ("e",))
    swap = torch.arange(n)
    swap[:2] = torch.tensor([1, 0])
    return Group.from_permutations(f"S{n}", torch.stack([swap, _shift(n)]), ("s", "c"))


def alternating(n: int) -> Group:
    """Return the even permutations of n >= 3 positions, from cycles of three."""
    if check_positive_integer("n", n) < 3:
        raise ValueError(f"n must be at least 3, got {n}.")
    rows = torch.arange(n).repeat(n - 2, 1)
    for k in range(n - 2):
        rows[k, [0, 1, k + 2]] = torch.tensor([1, k + 2, 0])
    return Group.from_permutations(f"A{n}", rows)


def translations(shape: Sequence[int]) -> Group:
    """Return the circular shifts of a grid, on its positions in row-major order."""
    sizes = grid_shape(shape)
    grid = torch.arange(math.prod(sizes)).reshape(sizes)
    rows = [torch.roll(grid, -1, axis).reshape(-1) for axis in range(len(sizes))]
    name = f"translations of {' x '.join(map(str, sizes))}"
    letters = [f"t{axis}" for axis in range(len(sizes))] if len(sizes) > 1 else ["t"]
    return Group.from_permutations(name, torch.stack(rows), letters)


def cyclic_permutations(n: int) -> Group:
    """Return the circular shifts of n positions."""
    rows = _shift(check_positive_integer("n", n)).unsqueeze(0)
    return Group.from_permutations(f"Z{n}", rows, ("t",))


def dihedral_permutations(n: int) -> Group:
    """Return circular shifts and reversals of n positions: symmetries of a polygon's corners."""
    flip = torch.arange(check_positive_integer("n", n)).flip(0)
    return Group.from_permutations(f"Dih{n}", torch.stack([_shift(n), flip]), ("t", "f"))


def _shift(n: int) -> Tensor:
    return (torch.arange(n) + 1) % n


def _rotation(n: int) -> Tensor:
    """Return a rotation by 360/n degrees, without rounding errors if it maps the grid to itself."""
    cosine, sine = math.cos(2 * math.pi / n), math.sin(2 * math.pi / n)
    if n in (1, 2, 4):
        cosine, sine = round(cosine), round(sine)
    return torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)


def cyclic(n: int) -> Group:
    """Return rotations of the plane by multiples of 360/n degrees; exact on grids for 1, 2, 4."""
    return Group.from_matrices(
        f"C{check_positive_integer('n', n)}", _rotation(n).unsqueeze(0), letters=("r",)
    )


def dihedral(n: int) -> Group:
    """Return the rotations of `cyclic(n)` and the reflection of x; exact on grids for 1, 2, 4."""
    mirror = torch.tensor([[-1, 0], [0, 1]], dtype=torch.float64)
    rows = torch.stack([_rotation(check_positive_integer("n", n)), mirror])
    return Group.from_matrices(f"D{n}", rows, letters=("r", "m"))


def reflections(dims: int = 2) -> Group:
    """Return the reflections of each coordinate."""
    check_positive_integer("dims", dims)
    unit = torch.ones(dims, dims, dtype=torch.float64) - 2 * torch.eye(dims, dtype=torch.float64)
    letters = [f"m{axis}" for axis in ("xyzw" if dims <= 4 else range(dims))][:dims]
    name = " x ".join(["reflection"] * dims)
    return Group.from_matrices(name, torch.diag_embed(unit), letters=letters)


def octahedral(reflected: bool = False) -> Group:
    """Return the 24 rotations of a cube, exact on cubic grids; 48 elements with reflections."""
    about_x = torch.tensor([[1, 0, 0], [0, 0, -1], [0, 1, 0]], dtype=torch.float64)
    about_z = torch.tensor([[0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    rows, letters = [about_x, about_z], ["x", "z"]
    if reflected:
        rows, letters = [*rows, -torch.eye(3, dtype=torch.float64)], [*letters, "i"]
    return Group.from_matrices("Oh" if reflected else "O", torch.stack(rows), letters=letters)


def so(n: int) -> Group:
    """Return the rotations of vectors in n >= 2 dimensions."""
    if check_positive_integer("n", n) < 2:
        raise ValueError(f"n must be at least 2, got {n}.")
    algebras = {2: lie.so2, 3: lie.so3}
    if n in algebras:
        return Group.from_matrices(f"SO({n})", lie=algebras[n]())
    A = torch.zeros(n * (n - 1) // 2, n, n, dtype=torch.float64)
    for row, (i, j) in zip(A, itertools.combinations(range(n), 2), strict=True):
        row[i, j], row[j, i] = -1, 1
    return Group.from_matrices(f"SO({n})", lie=lie.LieAlgebra.of(A))


def o(n: int) -> Group:
    """Return the rotations and reflections of vectors in n dimensions."""
    mirror = torch.eye(check_positive_integer("n", n), dtype=torch.float64)
    mirror[0, 0] = -1
    algebra = so(n).lie if n > 1 else None
    return Group.from_matrices(f"O({n})", mirror.unsqueeze(0), algebra, ("m",))


def rotations() -> Group:
    """Return SO(2) on homogeneous coordinates (x, y, 1)."""
    return Group.from_matrices("SO(2)", lie=lie.rotation2())


def se2() -> Group:
    """Return SE(2), rotations and translations, on homogeneous coordinates (x, y, 1)."""
    return Group.from_matrices("SE(2)", lie=lie.se2())


def scalings() -> Group:
    """Return scalings of the plane on homogeneous coordinates (x, y, 1)."""
    return Group.from_matrices("scalings", lie=lie.scale2())


def affine2() -> Group:
    """Return the identity component of Affine(2) on homogeneous coordinates (x, y, 1)."""
    return Group.from_matrices("Affine(2)", lie=lie.affine2())


def is_group_file(name: object) -> bool:
    """Return whether a group option is a file name."""
    return isinstance(name, str) and name.lower().endswith(FILE_SUFFIX)


@reader
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
    flows = lie.LieAlgebra.of(_rows(document["lie"], 2, "lie")) if "lie" in document else None
    return Group.from_matrices(name, discrete, flows)


def _rows(value: Any, depth: int, name: str) -> list[Any]:
    """Check a list of permutations (depth 1) or of square matrices (depth 2) and return it."""
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{name} must be a list with at least one entry, got {got}.")
    if not isinstance(value[0], list):
        raise ValueError(f"{name} must be a list of lists, got {str(value[0])[:40]} in row 0.")
    size = len(value[0])
    if not 1 <= size <= MAX_GROUP_SIZE:
        raise ValueError(
            f"Rows of {name} must have 1 to {MAX_GROUP_SIZE} entries, got {size} in row 0."
        )
    types: tuple[type, ...] = (int, float) if depth > 1 else (int,)
    for number, row in enumerate(value):
        lists = row if depth > 1 else [row]
        square = isinstance(row, list) and len(row) == size
        if not square or not all(isinstance(line, list) and len(line) == size for line in lists):
            shape = f"{size} x {size} numbers" if depth > 1 else f"{size} numbers"
            raise ValueError(f"Row {number} of {name} must have {shape}.")
        for entry in itertools.chain(*lists):
            if type(entry) not in types or not abs(entry) <= 1e6:
                kind, got = "numbers" if depth > 1 else "integers", repr(entry)[:40]
                raise ValueError(f"Row {number} of {name} must contain {kind}, got {got}.")
    return value
