"""Eigenvalues of positive semi-definite matrices in float64: robust, checked, free of noise."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.errors import CurvatureError

T = TypeVar("T")
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
    matrix: Float[Tensor, "*k d d"], name: str, resolution: float
) -> Float[Tensor, "*k d"]:
    """`eigenvalues` of what `symmetric` has made, here or on another device."""
    apart = matrix.device.type == "cpu" and matrix.dim() > 2 and matrix.shape[-1] >= ALONE
    if apart:
        found = [_without_noise(_values(one, name), name, resolution) for one in matrix]
        return torch.stack(found)
    return _without_noise(_values(matrix, name), name, resolution)


def _values(matrix: Float[Tensor, "*k d d"], name: str) -> Float[Tensor, "*k d"]:
    """Eigenvalues of a symmetric matrix; a zero on its diagonal is a zero row, and left out."""
    values: Tensor
    if not matrix.requires_grad and matrix.dim() == 2:
        live = matrix.diagonal().nonzero().squeeze(1)
        if len(live) < len(matrix):
            values = matrix.new_zeros(len(matrix))
            if len(live):
                part = matrix.index_select(0, live).index_select(1, live)
                values[-len(live) :] = _robust(torch.linalg.eigvalsh, part, name)
            return values
    values = _robust(torch.linalg.eigvalsh, matrix, name)
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


def _without_noise(values: Tensor, name: str, resolution: float) -> Tensor:
    """Zero what rounding made: negative eigenvalues, and positive ones no larger than those."""
    _check_psd(values, name, resolution)
    fixed = values.detach()
    noise = (-2 * fixed.amin(-1, keepdim=True)).clamp(min=_underflow(resolution))
    floor = resolution * fixed.amax(-1, keepdim=True)
    return torch.where(values > torch.maximum(noise, floor), values, 0.0)


def _underflow(resolution: float) -> float:
    """Below this, numbers of that arithmetic lose digits: a dead layer's factors are such noise."""
    kind = torch.finfo(torch.float32 if resolution > 1e-10 else torch.float64)
    return kind.tiny / kind.eps


def _check_psd(values: Tensor, name: str, resolution: float) -> None:
    if values.numel() == 0:
        return
    low, high = float(values.detach().min()), float(values.detach().max())
    rounding = 16 * values.shape[-1] * max(resolution * high, _underflow(resolution))
    if low < -rounding:
        raise CurvatureError(
            f"expected a positive semi-definite factor for {name}, got an eigenvalue {low:.3e} "
            f"beside the largest {high:.3e}"
        )
