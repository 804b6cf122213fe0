"""Choose the structure of the curvature by what the exact evidence would cost (`"auto"`).

The evidence of the full Gauss-Newton matrix is exact in this respect, and unlike Kronecker factors
it is not biased against weight sharing. It is used if its cost fits the budget below: as a matrix
over weights ("full") for few weights, else over samples and outputs ("kernel"). Otherwise two lower
bounds are computed, EKFAC and blocks of samples, and the higher one is used.
"""

from dataclasses import replace

from symrazor.curvature.estimate import AUTO, Method

MAX_FULL_WEIGHTS = 3000
"""Weights up to which the matrix over weights is used."""
MAX_KERNEL_ROWS = 6000
"""Samples times outputs up to which the matrix over them is used: at most 10 s on two CPU cores."""
MAX_KERNEL_PRODUCTS = 2e12
"""Squared rows times weights: a bound of the multiplications for all inner products of rows."""
MAX_BLOCK_PRODUCTS = 2e11
"""Multiplications for the inner products within blocks of samples."""
MIN_BLOCK = 10
"""Smallest block of samples that is worth its cost."""


def exact_method(method: Method, n_weights: int, n_rows: int) -> Method | None:
    """Return the structure of the exact matrix that is cheaper, or None if both cost too much.

    Args:
        method: other options; exact structures use the exact estimator.
        n_weights: number of weights.
        n_rows: number of samples times columns of the root of the output Hessian.
    """
    is_full_affordable = n_weights <= MAX_FULL_WEIGHTS
    if is_full_affordable and n_weights <= n_rows:
        return replace(method, structure="full", estimator="exact")
    if n_rows <= MAX_KERNEL_ROWS and n_rows**2 * n_weights <= MAX_KERNEL_PRODUCTS:
        return replace(method, structure="kernel", estimator="exact")
    return replace(method, structure="full", estimator="exact") if is_full_affordable else None


def resolve(method: Method, n_weights: int, n_data: int, n_columns: int) -> list[Method]:
    """Return the methods to try for `structure="auto"`: the exact one, or lower bounds."""
    if method.structure != AUTO:
        return [method]
    exact = exact_method(method, n_weights, n_data * n_columns)
    if exact is not None:
        return [exact]
    bounds = [replace(method, structure="ekfac")]
    block = int(MAX_BLOCK_PRODUCTS / (n_data * n_columns**2 * n_weights))
    if block >= MIN_BLOCK:
        block = min(block, n_data)
        bounds.append(replace(method, structure="kernel", block=block, estimator="exact"))
    return bounds
