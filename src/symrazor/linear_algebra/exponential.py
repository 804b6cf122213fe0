r"""Exponentials of many small matrices: scaling and squaring in float64, with fixed work.

`torch.linalg.matrix_exp` chooses its work by the norm of each matrix, which stops a GPU to look.
Here a bound of the norm is given, so the number of squarings is known and nothing waits.
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
