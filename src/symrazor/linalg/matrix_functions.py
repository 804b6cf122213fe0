r"""Compute exponentials, logarithms and polar factors of many small matrices.

`torch.linalg.matrix_exp` chooses its work from the norm of each matrix, which makes a GPU wait for
the host. `exponential` takes a bound of the norm instead, so that the number of squarings is known
beforehand. (torch also uses too few terms for a single float64 matrix of norm 0.02 to 0.05: its
error there is 1e-12 to 2e-10.)

The polar factor of X with singular values $\sigma$ and vectors U, V is $U V^\top$. The polynomial
$p(X) = a X + b X X^\top X + c (X X^\top)^2 X$ has the same singular vectors and the singular values
$p(\sigma)$. Five polynomials in sequence take every $\sigma$ between 0.003 and 1 to within 0.6 % of
1. Each minimises the largest $|1 - p(\sigma)|$ on the interval that the one before leaves. So the
same products suffice for every matrix; singular values below 0.003 of the norm end between 0 and 1.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.accelerate.devices import run_on_streams

TAYLOR_DEGREE = 12
SCALED_NORM = 0.5
"""Norm after scaling: the remainder of the Taylor series is below 0.5^13 / 13! = 2e-14."""
MAX_NORM = 1e4
"""Larger norms are scaled as if they were this large: their exponentials overflow anyway."""
MAX_SQUARE_ROOTS = 40
"""Square roots taken by `matrix_logarithm` before it gives up."""
MAX_ROOT_STEPS = 60
"""Iterations of one square root."""
LOG_SERIES_RADIUS = 0.1
"""Distance from the identity at which the series of the logarithm starts."""
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


def exponential(matrix: Float[Tensor, "*b d d"], cap: float) -> Float[Tensor, "*b d d"]:
    r"""Return $e^M$ in float64 for norms up to `cap`: $(\sum_{k \le 12} (M/2^s)^k/k!)^{2^s}$."""
    squarings = max(0, math.ceil(math.log2(max(cap, 1e-12) / SCALED_NORM)))
    M = matrix.double() / 2**squarings
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    M2 = M @ M
    M3 = M2 @ M
    # Paterson and Stockmeyer: a polynomial of degree 12 in four blocks of M^3, five products.
    c = [1 / math.factorial(k) for k in range(TAYLOR_DEGREE + 1)]
    total: Tensor = c[12] * M3
    for block in (9, 6, 3, 0):
        total = total + c[block] * identity + c[block + 1] * M + c[block + 2] * M2
        if block:
            total = total @ M3
    for _ in range(squarings):
        total = total @ total
    return total


def matrix_exponential(matrix: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
    """Return $e^M$ of matrices of any norm, in their dtype; synchronises with the device."""
    if not matrix.numel():
        return matrix.clone()
    norm = float(matrix.detach().abs().sum(-2).max())
    # Twice the norm: one more squaring, and the remainder of the series is below rounding.
    cap = 2 * min(norm, MAX_NORM) if norm >= 0 else 1.0
    return exponential(matrix, cap).to(matrix.dtype)


def matrix_logarithm(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"] | None:
    r"""Return the real principal logarithm, $2^k \ln M^{1/2^k}$, or None if there is none.

    It exists unless an eigenvalue is zero or negative. Square roots are computed by the iteration
    of Denman and Beavers (1976), which needs no eigenvectors: a translation has too few of them.
    """
    identity = torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    root, k = matrix.double(), 0
    while float((root - identity).abs().sum(0).max()) > LOG_SERIES_RADIUS:
        next_root = _square_root(root, identity)
        if next_root is None or k == MAX_SQUARE_ROOTS:
            return None
        root, k = next_root, k + 1
    E, power = root - identity, root - identity
    total = E.clone()
    for j in range(2, 18):  # the remainder is below 0.1^18 / 18
        power = power @ E
        total = total - (-1) ** j * power / j
    log: Tensor = total * 2**k
    return log


def _square_root(matrix: Float[Tensor, "d d"], identity: Float[Tensor, "d d"]) -> Tensor | None:
    """Iterate Y and Z, which converge to the root and to its inverse."""
    Y: Tensor = matrix
    Z: Tensor = identity
    for _ in range(MAX_ROOT_STEPS):
        inverse_Y, Y_is_singular = torch.linalg.inv_ex(Y)
        inverse_Z, Z_is_singular = torch.linalg.inv_ex(Z)
        if bool(Y_is_singular) or bool(Z_is_singular):
            return None
        Y, Z, previous = (Y + inverse_Z) / 2, (Z + inverse_Y) / 2, Y
        if float((Y - previous).abs().max()) < 1e-15 * max(1.0, float(Y.abs().max())):
            break
    residual = float((Y @ Y - matrix).abs().max())
    root: Tensor = Y
    return root if residual < 1e-10 * max(1.0, float(matrix.abs().max())) else None


def polar_factors(
    blocks: Sequence[Float[Tensor, "_ _ _"]], fill: bool | None = None
) -> list[Float[Tensor, "_ _ _"]]:
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


def _polar_factors_of_group(
    wide: Sequence[Float[Tensor, "_ _ _"]], size: tuple[int, int]
) -> list[Float[Tensor, "_ _ _"]]:
    parts = _orthogonalise(_stack_padded(wide, size)).split([len(block) for block in wide])
    sizes = [block.shape[1:] for block in wide]
    return [part[:, :r, :c] for part, (r, c) in zip(parts, sizes, strict=True)]


def _padded_size(rows: int, columns: int, fill: bool) -> tuple[int, int]:
    if rows == 1 and fill:
        return 1, max(columns, PADDED_SIZES[-1][1])
    fitting = [(r, c) for r, c in PADDED_SIZES if rows <= r and columns <= c]
    return fitting[0] if fill and fitting else (rows, columns)


def _stack_padded(
    wide: Sequence[Float[Tensor, "_ _ _"]], size: tuple[int, int]
) -> Float[Tensor, "k rows columns"]:
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
