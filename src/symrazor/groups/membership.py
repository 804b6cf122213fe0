"""Whether a matrix belongs to a group with continuous generators."""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.groups.closure import TOLERANCE
from symrazor.groups.lie import LieAlgebra
from symrazor.linalg.matrix_functions import matrix_logarithm


def in_continuous(
    lie: LieAlgebra, discrete: Float[Tensor, "m n n"], matrix: Float[Tensor, "n n"], name: str
) -> bool:
    """Membership in SO(n) or O(n), or in exponentials by the principal logarithm.

    Args:
        lie: continuous generators.
        discrete: the others.
        matrix: finite numbers in float64.
        name: of the group.

    Raises:
        ValueError: an element that this cannot tell.
    """
    n = len(matrix)
    turns = bool((lie.generators == -lie.generators.mT).all()) and lie.dim == n * (n - 1) // 2
    if turns and all(_is_orthogonal(m) for m in discrete):
        reflecting = any(float(torch.det(m)) < 0 for m in discrete)
        return _is_orthogonal(matrix) and (float(torch.det(matrix)) > 0 or reflecting)
    log = matrix_logarithm(matrix)
    if log is not None:
        coefficients, apart = lie.coordinates(log)
        close = float(apart) < 10 * TOLERANCE * max(1.0, float(log.norm()))
        near = (lie.exp(coefficients) - matrix).abs() < 1e3 * TOLERANCE
        if close and bool(near.all()):
            return True
    raise ValueError(
        f"expected a group whose elements can be told, got the continuous {name}; "
        "subgroups of finite groups, of permutations and of SO(n) and O(n) are known"
    )


def _is_orthogonal(matrix: Float[Tensor, "n n"]) -> bool:
    unit = torch.eye(len(matrix), dtype=torch.float64)
    return bool(((matrix.T @ matrix - unit).abs() < 10 * TOLERANCE).all())
