r"""Exponentials of many small matrices: scaling and squaring in float64, with fixed work.

`torch.linalg.matrix_exp` chooses its work by the norm of each matrix, which stops a GPU to look.
Here a bound of the norm is given, so the number of squarings is known and nothing waits. And it
takes too few terms for a single matrix in float64 of norm 0.02 to 0.05, which costs 1e-12 to 2e-10.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

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
