"""Groups that are there from the start.

Rotations and reflections are matrices acting on coordinates (x, y) or (x, y, z), which come in the
opposite order of the axes of a tensor: x is the last one. On an image, whose rows grow downwards, a
positive angle turns clockwise.
"""

import itertools
import math
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from symrazor.groups import lie
from symrazor.groups.group import Group


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"expected a whole number of at least 1 as {name}, got {value!r}")
    return int(value)


def trivial(n: int) -> Group:
    """The identity alone, on n places."""
    return Group.from_permutations("1", torch.arange(_whole("n", n)).unsqueeze(0), ("e",))


def symmetric(n: int) -> Group:
    """All permutations of n places, from a transposition and a cycle."""
    _whole("n", n)
    if n == 1:
        return Group.from_permutations("S1", torch.zeros(1, 1, dtype=torch.long), ("e",))
    swap = torch.arange(n)
    swap[:2] = torch.tensor([1, 0])
    return Group.from_permutations(f"S{n}", torch.stack([swap, _shift(n)]), ("s", "c"))


def alternating(n: int) -> Group:
    """Even permutations of n >= 3 places, from cycles of three."""
    if _whole("n", n) < 3:
        raise ValueError(f"expected n of at least 3, got {n}")
    rows = torch.arange(n).repeat(n - 2, 1)
    for k in range(n - 2):
        rows[k, [0, 1, k + 2]] = torch.tensor([1, k + 2, 0])
    return Group.from_permutations(f"A{n}", rows)


def translations(shape: Sequence[int]) -> Group:
    """Circular shifts of a grid (Z^d modulo its shape), on its places in row-major order."""
    given: object = shape
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"expected the shape of a grid, as in (8, 8), got {given!r}")
    sizes = [_whole("size", size) for size in shape]
    if not sizes:
        raise ValueError("expected at least one size, got none")
    grid = torch.arange(math.prod(sizes)).reshape(sizes)
    rows = [torch.roll(grid, -1, axis).reshape(-1) for axis in range(len(sizes))]
    name = f"translations of {' x '.join(map(str, sizes))}"
    letters = [f"t{axis}" for axis in range(len(sizes))] if len(sizes) > 1 else ["t"]
    return Group.from_permutations(name, torch.stack(rows), letters)


def cyclic_permutations(n: int) -> Group:
    """Circular shifts of n places."""
    rows = _shift(_whole("n", n)).unsqueeze(0)
    return Group.from_permutations(f"Z{n}", rows, ("t",))


def dihedral_permutations(n: int) -> Group:
    """Circular shifts and reversals of n places: the symmetries of a polygon's corners."""
    flip = torch.arange(_whole("n", n)).flip(0)
    return Group.from_permutations(f"Dih{n}", torch.stack([_shift(n), flip]), ("t", "f"))


def _shift(n: int) -> Tensor:
    return (torch.arange(n) + 1) % n


def _turn(n: int) -> Tensor:
    """A rotation by 360/n degrees, without rounding where it maps a square grid to itself."""
    cosine, sine = math.cos(2 * math.pi / n), math.sin(2 * math.pi / n)
    if n in (1, 2, 4):
        cosine, sine = round(cosine), round(sine)
    return torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)


def _mirror() -> Tensor:
    return torch.diag(torch.tensor([-1.0, 1.0], dtype=torch.float64))


def cyclic(n: int) -> Group:
    """Rotations of the plane by multiples of 360/n degrees; exact on square grids for 1, 2, 4."""
    return Group.from_matrices(f"C{_whole('n', n)}", _turn(n).unsqueeze(0), letters=("r",))


def dihedral(n: int) -> Group:
    """Those rotations and the reflection of x; exact on square grids for n in 1, 2, 4."""
    rows = torch.stack([_turn(_whole("n", n)), _mirror()])
    return Group.from_matrices(f"D{n}", rows, letters=("r", "m"))


def reflections(dims: int = 2) -> Group:
    """Reflections of each coordinate."""
    _whole("dims", dims)
    unit = torch.ones(dims, dims, dtype=torch.float64) - 2 * torch.eye(dims, dtype=torch.float64)
    letters = [f"m{axis}" for axis in ("xyzw" if dims <= 4 else range(dims))][:dims]
    name = " x ".join(["reflection"] * dims)
    return Group.from_matrices(name, torch.diag_embed(unit), letters=letters)


def octahedral(reflected: bool = False) -> Group:
    """The 24 rotations of a cube, exact on cubic grids; with reflections 48."""
    about_x = torch.tensor([[1, 0, 0], [0, 0, -1], [0, 1, 0]], dtype=torch.float64)
    about_z = torch.tensor([[0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    rows, letters = [about_x, about_z], ["x", "z"]
    if reflected:
        rows, letters = [*rows, -torch.eye(3, dtype=torch.float64)], [*letters, "i"]
    return Group.from_matrices("Oh" if reflected else "O", torch.stack(rows), letters=letters)


def so(n: int) -> Group:
    """Rotations of vectors in n >= 2 dimensions."""
    if _whole("n", n) < 2:
        raise ValueError(f"expected at least 2 dimensions, got {n}")
    known = {2: lie.so2, 3: lie.so3}
    if n in known:
        return Group.from_matrices(f"SO({n})", lie=known[n]())
    A = torch.zeros(n * (n - 1) // 2, n, n, dtype=torch.float64)
    for row, (i, j) in zip(A, itertools.combinations(range(n), 2), strict=True):
        row[i, j], row[j, i] = -1, 1
    return Group.from_matrices(f"SO({n})", lie=lie.LieAlgebra.of(A))


def o(n: int) -> Group:
    """Rotations and reflections of vectors in n dimensions."""
    mirror = torch.eye(_whole("n", n), dtype=torch.float64)
    mirror[0, 0] = -1
    algebra = so(n).lie if n > 1 else None
    return Group.from_matrices(f"O({n})", mirror.unsqueeze(0), algebra, ("m",))


def rotations() -> Group:
    """SO(2) on homogeneous coordinates (x, y, 1)."""
    return Group.from_matrices("SO(2)", lie=lie.rotation2())


def se2() -> Group:
    """SE(2), rotations and translations, on homogeneous coordinates (x, y, 1)."""
    return Group.from_matrices("SE(2)", lie=lie.se2())


def scalings() -> Group:
    """Scalings of the plane, on homogeneous coordinates (x, y, 1)."""
    return Group.from_matrices("scalings", lie=lie.scale2())


def affine2() -> Group:
    """Affine(2), the part connected to the identity, on homogeneous coordinates (x, y, 1)."""
    return Group.from_matrices("Affine(2)", lie=lie.affine2())
