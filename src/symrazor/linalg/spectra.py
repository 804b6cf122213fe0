"""Eigenvalues of positive semi-definite matrices in float64: robust, checked, free of noise."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.errors import CurvatureError

T = TypeVar("T")
Routine = Callable[[Tensor], Tensor]
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


ALONE = 64
"""On a CPU, matrices of this size are worked on one by one: together they leave the cache."""


def eigenvalues(
    matrix: Float[Tensor, "*k d d"], name: str, resolution: float
) -> Float[Tensor, "*k d"]:
    """Eigenvalues of positive semi-definite matrices in float64, without rounding noise.

    The most negative one tells how large the noise is: whatever is not above twice its size, or
    not above machine epsilon times the largest, is zero. (A product in float32 of fewer rows than
    columns has many such eigenvalues, and a small prior precision would take them for information.)

    Args:
        matrix: symmetric up to rounding.
        name: what to call it in an error.
        resolution: machine epsilon of the arithmetic that made the matrix; a negative eigenvalue
            beyond what that explains is an error, not something to clamp away.

    Raises:
        CurvatureError: entries that are not finite, or a matrix that is not PSD.
    """
    return of_symmetric(symmetric(matrix, name), name, resolution)


def of_symmetric(
    matrix: Float[Tensor, "*k d d"],
    name: str,
    resolution: float,
    routine: Routine | None = None,
) -> Float[Tensor, "*k d"]:
    """`eigenvalues` of what `symmetric` has made, on any device, by torch or another routine."""
    routine = routine or torch.linalg.eigvalsh
    apart = matrix.device.type == "cpu" and matrix.dim() > 2 and matrix.shape[-1] >= ALONE
    if apart:
        values = torch.stack([_values(one, name, routine) for one in matrix])
    else:
        values = _values(matrix, name, routine)
    return _without_noise(values, name, resolution)


def _values(matrix: Float[Tensor, "*k d d"], name: str, routine: Routine) -> Float[Tensor, "*k d"]:
    """Eigenvalues of a symmetric matrix; a zero on its diagonal is a zero row, and left out."""
    values: Tensor
    if not matrix.requires_grad and matrix.dim() == 2:
        live = matrix.diagonal().nonzero().squeeze(1)
        if len(live) < len(matrix):
            values = matrix.new_zeros(len(matrix))
            if len(live):
                part = matrix.index_select(0, live).index_select(1, live)
                values[-len(live) :] = _robust(routine, part, name)
            return values
    values = _robust(routine, matrix, name)
    return values


def eigenvectors(
    matrix: Float[Tensor, "*k d d"], name: str, resolution: float
) -> tuple[Float[Tensor, "*k d"], Float[Tensor, "*k d d"]]:
    """Eigenvalues clamped at zero, and eigenvectors; see `eigenvalues`."""
    values, vectors = _robust(torch.linalg.eigh, symmetric(matrix, name), name)
    return _without_noise(values, name, resolution), vectors


def symmetric(matrix: Tensor, name: str) -> Tensor:
    """The symmetric part in float64; raises CurvatureError for entries that are not finite."""
    if not bool(torch.isfinite(matrix).all()):
        raise CurvatureError(
            f"expected a finite curvature factor for {name}, got NaN or infinity; the weights or "
            "activations of this layer have probably diverged (lower the learning rate)"
        )
    matrix = matrix.double()
    return (matrix + matrix.mT).mul_(0.5)


def _robust(routine: Callable[[Tensor], T], matrix: Tensor, name: str) -> T:
    """Run an eigenvalue routine; where it fails, again on the CPU, then with unit scale."""
    try:
        return routine(matrix)
    except LinAlgError as first:
        try:
            scale = matrix.abs().amax().clamp(min=torch.finfo(matrix.dtype).tiny)
            result = routine((matrix / scale).cpu())
        except LinAlgError:
            raise CurvatureError(
                f"the eigenvalues of the factor of {name} failed: {first}"
            ) from first
    where = matrix.device
    if isinstance(result, Tensor):
        return result.to(where) * scale  # type: ignore[return-value]
    values, vectors = cast(tuple[Tensor, Tensor], result)
    return values.to(where) * scale, vectors.to(where)  # type: ignore[return-value]


def _without_noise(values: Float[Tensor, "*k d"], name: str, resolution: float) -> Tensor:
    """Zero what rounding made: negative eigenvalues, and positive ones no larger than those."""
    if values.numel() == 0:
        return values
    low, high = (end(values.detach(), -1, keepdim=True) for end in (torch.amin, torch.amax))
    _check_psd(low, high, values.shape[-1], name, resolution)
    noise = (-2 * low).clamp(min=_underflow(resolution))
    return torch.where(values > torch.maximum(noise, resolution * high), values, 0.0)


def _underflow(resolution: float) -> float:
    """Below this, numbers of that arithmetic lose digits: a dead layer's factors are such noise."""
    kind = torch.finfo(torch.float32 if resolution > 1e-10 else torch.float64)
    return kind.tiny / kind.eps


def _check_psd(low: Tensor, high: Tensor, rows: int, name: str, resolution: float) -> None:
    """Each matrix by its own least and largest eigenvalue."""
    rounding = 16 * rows * (resolution * high).clamp(min=_underflow(resolution))
    bad = low < -rounding
    if bool(bad.any()):
        worst = int(low[bad].argmin())
        raise CurvatureError(
            f"expected a positive semi-definite factor for {name}, got an eigenvalue "
            f"{float(low[bad][worst]):.3e} beside the largest {float(high[bad][worst]):.3e}"
        )
