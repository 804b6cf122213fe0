"""Compute eigenvalues of positive semi-definite matrices in float64, checked and without noise."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.errors import CurvatureError

T = TypeVar("T")
Solver = Callable[[Tensor], Tensor]
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

MIN_ROWS_UNBATCHED = 64
"""On a CPU, matrices with at least this many rows are solved one by one to stay in the cache."""


def eigenvalues(
    matrix: Float[Tensor, "*k d d"], name: str, resolution: float
) -> Float[Tensor, "*k d"]:
    """Return the eigenvalues of positive semi-definite matrices in float64, without rounding noise.

    The most negative eigenvalue measures the noise. Eigenvalues below twice its size, or below
    machine epsilon times the largest eigenvalue, are set to zero. (A float32 product of fewer rows
    than columns has many of them, and a small prior precision would count them as information.)

    Args:
        matrix: symmetric up to rounding.
        name: the tensor that the matrix belongs to, for error messages.
        resolution: machine epsilon of the arithmetic that computed the matrix. A negative
            eigenvalue larger than this rounding error is reported, not clamped.

    Raises:
        CurvatureError: if entries are not finite or the matrix is not positive semi-definite.
    """
    return eigenvalues_of_symmetric(symmetric_part(matrix, name), name, resolution)


def eigenvalues_of_symmetric(
    matrix: Float[Tensor, "*k d d"], name: str, resolution: float, solver: Solver | None = None
) -> Float[Tensor, "*k d"]:
    """Return `eigenvalues` of the output of `symmetric_part`, by torch or another solver."""
    solver = solver or torch.linalg.eigvalsh
    on_cpu = matrix.device.type == "cpu"
    if on_cpu and matrix.dim() > 2 and matrix.shape[-1] >= MIN_ROWS_UNBATCHED:
        values = torch.stack([_solve(single, name, solver) for single in matrix])
    else:
        values = _solve(matrix, name, solver)
    return _without_noise(values, name, resolution)


def _solve(matrix: Float[Tensor, "*k d d"], name: str, solver: Solver) -> Float[Tensor, "*k d"]:
    # A zero on the diagonal of a positive semi-definite matrix means a zero row: leave it out.
    if not matrix.requires_grad and matrix.dim() == 2:
        nonzero = matrix.diagonal().nonzero().squeeze(1)
        if len(nonzero) < len(matrix):
            values = matrix.new_zeros(len(matrix))
            if len(nonzero):
                part = matrix.index_select(0, nonzero).index_select(1, nonzero)
                values[-len(nonzero) :] = _solve_robustly(solver, part, name)
            return values
    return _solve_robustly(solver, matrix, name)


def eigenvectors(
    matrix: Float[Tensor, "*k d d"], name: str, resolution: float
) -> tuple[Float[Tensor, "*k d"], Float[Tensor, "*k d d"]]:
    """Return eigenvalues as `eigenvalues` does, and the eigenvectors in columns."""
    values, vectors = _solve_robustly(torch.linalg.eigh, symmetric_part(matrix, name), name)
    return _without_noise(values, name, resolution), vectors


def symmetric_part(matrix: Tensor, name: str) -> Tensor:
    """Return the symmetric part in float64; raise CurvatureError if entries are not finite."""
    if not bool(torch.isfinite(matrix).all()):
        raise CurvatureError(
            f"The curvature factor of {name} contains NaN or infinity. The weights or activations "
            "of this layer have probably diverged: lower the learning rate."
        )
    matrix = matrix.double()
    return (matrix + matrix.mT).mul_(0.5)


def _solve_robustly(solver: Callable[[Tensor], T], matrix: Tensor, name: str) -> T:
    """Run an eigenvalue solver; if it does not converge, retry on the CPU with unit scale."""
    try:
        return solver(matrix)
    except LinAlgError as first_error:
        try:
            scale = matrix.abs().amax().clamp(min=torch.finfo(matrix.dtype).tiny)
            result = solver((matrix / scale).cpu())
        except LinAlgError:
            raise CurvatureError(
                f"The eigenvalue solver failed for the curvature factor of {name}: {first_error}"
            ) from first_error
    device = matrix.device
    if isinstance(result, Tensor):
        return result.to(device) * scale  # type: ignore[return-value]
    values, vectors = cast(tuple[Tensor, Tensor], result)
    return values.to(device) * scale, vectors.to(device)  # type: ignore[return-value]


def _without_noise(values: Float[Tensor, "*k d"], name: str, resolution: float) -> Tensor:
    """Set eigenvalues to zero that are negative, or no larger than the negative ones."""
    if values.numel() == 0:
        return values
    low, high = (end(values.detach(), -1, keepdim=True) for end in (torch.amin, torch.amax))
    _check_positive_semidefinite(low, high, values.shape[-1], name, resolution)
    noise = (-2 * low).clamp(min=_underflow(resolution))
    return torch.where(values > torch.maximum(noise, resolution * high), values, 0.0)


def _underflow(resolution: float) -> float:
    """Return the magnitude below which numbers lose digits: factors of a dead layer are there."""
    info = torch.finfo(torch.float32 if resolution > 1e-10 else torch.float64)
    return info.tiny / info.eps


def _check_positive_semidefinite(
    low: Tensor, high: Tensor, rows: int, name: str, resolution: float
) -> None:
    rounding = 16 * rows * (resolution * high).clamp(min=_underflow(resolution))
    negative = low < -rounding
    if bool(negative.any()):
        worst = int(low[negative].argmin())
        raise CurvatureError(
            f"The curvature factor of {name} is not positive semi-definite: its smallest "
            f"eigenvalue is {float(low[negative][worst]):.3e}, its largest "
            f"{float(high[negative][worst]):.3e}."
        )
