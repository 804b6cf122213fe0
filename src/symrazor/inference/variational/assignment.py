"""Which posterior each weight tensor gets: one for all, or by patterns of parameter names."""

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from symrazor.inference.variational.gaussian import GaussianPosterior, Point
from symrazor.inference.variational.posteriors import (
    BlockCholesky,
    Diagonal,
    Full,
    LowRank,
    MatrixNormal,
)

Make = Callable[..., GaussianPosterior]
Kind = str | Make | GaussianPosterior
"""A name, a class (or function of shape, scale and mean), or a posterior that is ready."""

NAMES: dict[str, Make] = {
    "matrix-normal": MatrixNormal,
    "block": BlockCholesky,
    "diagonal": Diagonal,
    "low-rank": LowRank,
    "full": Full,
    "point": Point,
}
MATRICES = {"matrix-normal", "block"}
"""Where one of these is asked for all tensors, vectors get a diagonal posterior."""


def assign(
    theta: Mapping[str, nn.Parameter], posterior: Kind | Mapping[str, Kind], scale: float
) -> dict[str, GaussianPosterior]:
    """A posterior for every tensor, whose mean is that very parameter.

    Args:
        theta: the weights, by name.
        posterior: one kind for all, or glob pattern -> kind; the first pattern that fits counts.
        scale: deviation to start with, relative to the root mean square of each tensor.

    Raises:
        ValueError: a pattern that fits no parameter, a parameter that fits no pattern, an unknown
            name, or a posterior of another shape.
    """
    patterns = posterior if isinstance(posterior, Mapping) else {"*": posterior}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in theta):
            raise ValueError(
                f"expected a posterior for a parameter of the model, got one for {pattern!r}, "
                f"which fits none of {list(theta)}"
            )
    found = {}
    for name, parameter in theta.items():
        kind = next((k for pattern, k in patterns.items() if fnmatchcase(name, pattern)), None)
        if kind is None:
            raise ValueError(
                f"expected a posterior for every weight, got none for {name!r}; add it, or "
                "'*': 'point' at the end for point estimates of all others"
            )
        if not isinstance(posterior, Mapping) and kind in MATRICES and parameter.dim() < 2:
            kind = "diagonal"
        found[name] = _make(name, parameter, kind, scale)
    return found


def _make(name: str, parameter: nn.Parameter, kind: Kind, scale: float) -> GaussianPosterior:
    if isinstance(kind, str):
        if kind not in NAMES:
            raise ValueError(f"expected a posterior among {list(NAMES)}, got {kind!r} for {name!r}")
        kind = NAMES[kind]
    if not isinstance(kind, GaussianPosterior):
        kind = kind(parameter.shape, scale=scale * _size(parameter), mean=parameter)
    if kind.mean.shape != parameter.shape:
        raise ValueError(
            f"expected a posterior of shape {list(parameter.shape)} for {name!r}, got "
            f"{list(kind.mean.shape)}"
        )
    kind.to(device=parameter.device, dtype=parameter.dtype)
    kind.mean = parameter
    return kind


def _size(parameter: Tensor) -> float:
    """Root mean square of a tensor; 1 for one that is all zero."""
    size = float(parameter.detach().double().square().mean().sqrt())
    return size if size > 0 and math.isfinite(size) else 1.0
