r"""Compute polar factors of many small matrices.

The polar factor of X with singular values $\sigma$ and vectors U, V is $U V^\top$. The polynomial
$p(X) = a X + b X X^\top X + c (X X^\top)^2 X$ has the same singular vectors and the singular values
$p(\sigma)$. Five polynomials in sequence take every $\sigma$ between 0.003 and 1 to within 0.6 % of
1. Each minimises the largest $|1 - p(\sigma)|$ on the interval that the one before leaves. So the
same products suffice for every matrix; singular values below 0.003 of the norm end between 0 and 1.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.accelerate.devices import run_on_streams

Block = Float[Tensor, "_ _ _"]
"""Matrices [k, rows, columns]."""

POLAR_POLYNOMIALS = (
    (8.3837, -24.7659, 18.3571),
    (4.0434, -3.0114, 0.5695),
    (3.5056, -2.6267, 0.5257),
    (2.4901, -1.8343, 0.4368),
    (1.9178, -1.2968, 0.3797),
)
"""Coefficients (a, b, c), in the order of application."""
NORM_MARGIN = 1.01
"""Singular values start below 1 by this factor: products may be rounded to few digits."""
PADDED_SIZES = ((16, 256), (64, 256), (64, 1024), (256, 1024))
"""Rows and columns that matrices are padded to on a GPU; larger ones are not padded."""


def polar_factors(blocks: Sequence[Block], fill: bool | None = None) -> list[Block]:
    """Return the polar factor of every matrix blocks[t][k]; that of a zero matrix is zero.

    Products of small matrices on a GPU are bound by launches. Matrices of similar size are
    therefore padded with zeros, which change no polar factor, and multiplied in one batch.
    `fill` says whether to pad; None pads on a GPU only.
    """
    fill = bool(blocks) and blocks[0].is_cuda if fill is None else fill
    wide = [block.mT if block.shape[1] > block.shape[2] else block for block in blocks]
    by_size: dict[tuple[int, int], list[int]] = {}
    for number, block in enumerate(wide):
        rows, columns = block.shape[1:]
        by_size.setdefault(_padded_size(rows, columns, fill), []).append(number)
    groups = [
        partial(_polar_factors_of_group, [wide[number] for number in numbers], size)
        for size, numbers in by_size.items()
    ]
    factors = [factor for group in run_on_streams(groups, wide) for factor in group]
    order = [number for numbers in by_size.values() for number in numbers]
    by_number = dict(zip(order, factors, strict=True))
    return [
        by_number[number].mT if block.shape[1] > block.shape[2] else by_number[number]
        for number, block in enumerate(blocks)
    ]


def _polar_factors_of_group(wide: Sequence[Block], size: tuple[int, int]) -> list[Block]:
    parts = _orthogonalise(_stack_padded(wide, size)).split([len(block) for block in wide])
    sizes = [block.shape[1:] for block in wide]
    return [part[:, :r, :c] for part, (r, c) in zip(parts, sizes, strict=True)]


def _padded_size(rows: int, columns: int, fill: bool) -> tuple[int, int]:
    if rows == 1 and fill:
        return 1, max(columns, PADDED_SIZES[-1][1])
    fitting = [(r, c) for r, c in PADDED_SIZES if rows <= r and columns <= c]
    return fitting[0] if fill and fitting else (rows, columns)


def _stack_padded(wide: Sequence[Block], size: tuple[int, int]) -> Float[Tensor, "k rows columns"]:
    if len({block.shape[1:] for block in wide}) == 1:
        return torch.cat(list(wide))
    stacked = wide[0].new_zeros(sum(map(len, wide)), *size)
    for part, block in zip(stacked.split([len(b) for b in wide]), wide, strict=True):
        part[:, : block.shape[1], : block.shape[2]] = block
    return stacked


def _orthogonalise(X: Float[Tensor, "k r c"]) -> Float[Tensor, "k r c"]:
    """Return the polar factors of wide matrices of any scale."""
    tiny = torch.finfo(X.dtype).tiny
    X = X / X.abs().amax((1, 2), keepdim=True).clamp_min(tiny)  # squares must not underflow
    norm: Tensor = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True).clamp_min(tiny)
    if X.shape[1] == 1:
        return X / norm
    X = X / (NORM_MARGIN * norm)
    for a, b, c in POLAR_POLYNOMIALS:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X
