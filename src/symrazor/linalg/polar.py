r"""Polar factors of many small matrices, by matrix products alone.

The polar factor of X with singular values $\sigma$ and vectors U, V is $U V^\top$: the same with
every $\sigma$ at 1. An odd polynomial of X, $p(X) = a X + b X X^\top X + c (X X^\top)^2 X$, has the
same vectors and the singular values $p(\sigma)$. Five of them in a row take every $\sigma$ between
0.003 and 1 to within 0.6 % of 1. Each is the best of its degree on what the one before leaves: it
minimises the largest $|1 - p(\sigma)|$ there. So the same work, without a look at any value, does
for every matrix; singular values below 0.003 of the norm end between 0 and 1.

On a GPU products of small matrices wait for their launch. So matrices of about the same size are
filled up with zeros there, which change no polar factor, and multiplied together; elsewhere, those
of the same size. The polar factor of one row is the row at length 1, without any products.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.accelerate.streams import side_by_side

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
    factors = [factor for group in side_by_side(groups, wide) for factor in group]
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
