r"""Exponentials of many small matrices: scaling and squaring in float64, with fixed work.

`torch.linalg.matrix_exp` chooses its work by the norm of each matrix, which stops a GPU to look.
Here a bound of the norm is given, so the number of squarings is known and nothing waits. And it
takes too few terms for a single matrix in float64 of norm 0.02 to 0.05, which costs 1e-12 to 2e-10.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.accelerate.cuda_graphs import run_on_streams

TERMS = 12
SCALED = 0.5
"""Norm after scaling: the remainder of the series is below 0.5^13 / 13! = 2e-14."""


def exponential(matrix: Float[Tensor, "*b d d"], cap: float) -> Float[Tensor, "*b d d"]:
    r"""$e^M$ for matrices of norm at most `cap`: $(\sum_{k \le 12} (M/2^s)^k/k!)^{2^s}$."""
    squarings = max(0, math.ceil(math.log2(max(cap, 1e-12) / SCALED)))
    M = matrix.double() / 2**squarings
    one = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    M2 = M @ M
    M3 = M2 @ M
    # Paterson and Stockmeyer: a polynomial of degree 12 in four blocks of M^3, five products.
    c = [1 / math.factorial(k) for k in range(TERMS + 1)]
    total: Tensor = c[12] * M3
    for block in (9, 6, 3, 0):
        total = total + c[block] * one + c[block + 1] * M + c[block + 2] * M2
        if block:
            total = total @ M3
    for _ in range(squarings):
        total = total @ total
    return total


LARGEST = 1e4
"""Norms beyond this are scaled as if they were this: their exponentials overflow anyway."""


def matrix_exponential(matrix: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
    """$e^M$ of matrices of any norm, in their type, to rounding; waits for the norm."""
    if not matrix.numel():
        return matrix.clone()
    norm = float(matrix.detach().abs().sum(-2).max())
    # twice the norm: one more squaring, and the remainder of the series is below rounding
    cap = 2 * min(norm, LARGEST) if norm >= 0 else 1.0
    return exponential(matrix, cap).to(matrix.dtype)


ROOTS, STEPS, NEAR = 40, 60, 0.1
"""Square roots at most, steps of each at most, and how near to 1 they go."""


def matrix_logarithm(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"] | None:
    r"""The real principal logarithm, $2^k \ln M^{1/2^k}$; None where there is none.

    There is one unless an eigenvalue is zero or a negative number. Square roots by the iteration of
    Denman and Beavers (1976), which needs no eigenvectors: a translation has too few of them.
    """
    one = torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    root, k = matrix.double(), 0
    while float((root - one).abs().sum(0).max()) > NEAR:
        found = _square_root(root, one)
        if found is None or k == ROOTS:
            return None
        root, k = found, k + 1
    E, power = root - one, root - one
    total = E.clone()
    for j in range(2, 18):  # the remainder is below 0.1^18 / 18
        power = power @ E
        total = total - (-1) ** j * power / j
    log: Tensor = total * 2**k
    return log


def _square_root(matrix: Float[Tensor, "d d"], one: Float[Tensor, "d d"]) -> Tensor | None:
    """Y and Z tend to the root and to its inverse."""
    Y: Tensor = matrix
    Z: Tensor = one
    for _ in range(STEPS):
        back_Y, bad_Y = torch.linalg.inv_ex(Y)
        back_Z, bad_Z = torch.linalg.inv_ex(Z)
        if bool(bad_Y) or bool(bad_Z):
            return None
        Y, Z, before = (Y + back_Z) / 2, (Z + back_Y) / 2, Y
        if float((Y - before).abs().max()) < 1e-15 * max(1.0, float(Y.abs().max())):
            break
    wrong = float((Y @ Y - matrix).abs().max())
    root: Tensor = Y
    return root if wrong < 1e-10 * max(1.0, float(matrix.abs().max())) else None


POLYNOMIALS = (
    (8.3837, -24.7659, 18.3571),
    (4.0434, -3.0114, 0.5695),
    (3.5056, -2.6267, 0.5257),
    (2.4901, -1.8343, 0.4368),
    (1.9178, -1.2968, 0.3797),
)
"""Coefficients (a, b, c), first to last."""
ROOM = 1.01
"""Singular values start below 1 by so much: products may be rounded to few digits."""
SIZES = ((16, 256), (64, 256), (64, 1024), (256, 1024))
"""Rows and columns that matrices are filled up to; larger ones stay as they are."""


def polar_factors(
    blocks: Sequence[Float[Tensor, "_ _ _"]], fill: bool | None = None
) -> list[Float[Tensor, "_ _ _"]]:
    """The polar factor of every matrix blocks[t][k]; of a matrix of zeros it is zero.

    Args:
        blocks: matrices [k, o, i], any number of sizes; all on one device, of one type.
        fill: whether matrices of different sizes are filled up; None for "on a GPU".

    Returns:
        As many of the same shapes.
    """
    fill = bool(blocks) and blocks[0].is_cuda if fill is None else fill
    wide = [block.mT if block.shape[1] > block.shape[2] else block for block in blocks]
    alike: dict[tuple[int, int], list[int]] = {}
    for number, block in enumerate(wide):
        rows, columns = block.shape[1:]
        alike.setdefault(_common_size(rows, columns, fill), []).append(number)
    groups = [
        partial(_of_group, [wide[number] for number in numbers], size)
        for size, numbers in alike.items()
    ]
    factors = [factor for group in run_on_streams(groups, wide) for factor in group]
    order = [number for numbers in alike.values() for number in numbers]
    found = dict(zip(order, factors, strict=True))
    return [
        found[number].mT if block.shape[1] > block.shape[2] else found[number]
        for number, block in enumerate(blocks)
    ]


def _of_group(
    wide: Sequence[Float[Tensor, "_ _ _"]], size: tuple[int, int]
) -> list[Float[Tensor, "_ _ _"]]:
    """Polar factors of wide matrices that are filled up to one size."""
    together = _orthogonalised(_packed(wide, size)).split([len(block) for block in wide])
    sizes = [block.shape[1:] for block in wide]
    return [part[:, :r, :c] for part, (r, c) in zip(together, sizes, strict=True)]


def _common_size(rows: int, columns: int, fill: bool) -> tuple[int, int]:
    """What a wide matrix is filled up to."""
    if rows == 1 and fill:
        return 1, max(columns, SIZES[-1][1])
    fitting = [(r, c) for r, c in SIZES if rows <= r and columns <= c]
    return fitting[0] if fill and fitting else (rows, columns)


def _packed(
    wide: Sequence[Float[Tensor, "_ _ _"]], size: tuple[int, int]
) -> Float[Tensor, "k rows columns"]:
    """All of them in one tensor, filled up with zeros."""
    if len({block.shape[1:] for block in wide}) == 1:
        return torch.cat(list(wide))
    together = wide[0].new_zeros(sum(map(len, wide)), *size)
    for part, block in zip(together.split([len(b) for b in wide]), wide, strict=True):
        part[:, : block.shape[1], : block.shape[2]] = block
    return together


def _orthogonalised(X: Float[Tensor, "k r c"]) -> Float[Tensor, "k r c"]:
    """Polar factors of wide matrices, of any scale: squares of small numbers would be zero."""
    tiny = torch.finfo(X.dtype).tiny
    X = X / X.abs().amax((1, 2), keepdim=True).clamp_min(tiny)
    norm: Tensor = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True).clamp_min(tiny)
    if X.shape[1] == 1:
        return X / norm
    X = X / (ROOM * norm)
    for a, b, c in POLYNOMIALS:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X
