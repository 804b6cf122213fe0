"""Give each weight tensor its variational posterior."""

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

PosteriorFactory = Callable[..., GaussianPosterior]
PosteriorSpec = str | PosteriorFactory | GaussianPosterior
"""A name, a class (or a function of shape, scale and mean), or a posterior object."""

POSTERIORS: dict[str, PosteriorFactory] = {
    "matrix-normal": MatrixNormal,
    "block": BlockCholesky,
    "diagonal": Diagonal,
    "low-rank": LowRank,
    "full": Full,
    "point": Point,
}
MATRIX_POSTERIORS = {"matrix-normal", "block"}
"""Where one of these is chosen for all tensors, vectors get a diagonal posterior."""


def assign_posteriors(
    theta: Mapping[str, nn.Parameter],
    spec: PosteriorSpec | Mapping[str, PosteriorSpec],
    scale: float,
) -> dict[str, GaussianPosterior]:
    """Return a posterior for every tensor, whose mean is the parameter itself.

    Args:
        theta: the weights, by name.
        spec: one posterior for all, or glob pattern -> posterior; the first match counts.
        scale: starting standard deviation, relative to the root mean square of each tensor.

    Raises:
        ValueError: a pattern without a parameter, a parameter without a pattern, an unknown name,
            or a posterior of another shape.
    """
    patterns = spec if isinstance(spec, Mapping) else {"*": spec}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in theta):
            raise ValueError(
                f"No parameter of the model matches {pattern!r} in posterior=.... Parameters: "
                f"{', '.join(theta)}."
            )
    posteriors = {}
    for name, parameter in theta.items():
        chosen = next((s for pattern, s in patterns.items() if fnmatchcase(name, pattern)), None)
        if chosen is None:
            raise ValueError(
                f"posterior=... has no pattern for {name!r}. Add one, or '*': 'point' at the end "
                "for point estimates of all other weights."
            )
        if not isinstance(spec, Mapping) and chosen in MATRIX_POSTERIORS and parameter.dim() < 2:
            chosen = "diagonal"
        posteriors[name] = _make(name, parameter, chosen, scale)
    return posteriors


def _make(
    name: str, parameter: nn.Parameter, spec: PosteriorSpec, scale: float
) -> GaussianPosterior:
    if isinstance(spec, str):
        if spec not in POSTERIORS:
            names = ", ".join(repr(known) for known in POSTERIORS)
            raise ValueError(f"Unknown posterior {spec!r} for {name!r}. Use one of {names}.")
        spec = POSTERIORS[spec]
    posterior = spec
    if not isinstance(posterior, GaussianPosterior):
        posterior = posterior(parameter.shape, scale=scale * _rms(parameter), mean=parameter)
    if posterior.mean.shape != parameter.shape:
        raise ValueError(
            f"The posterior of {name!r} must have shape {list(parameter.shape)}, got "
            f"{list(posterior.mean.shape)}."
        )
    posterior.to(device=parameter.device, dtype=parameter.dtype)
    posterior.mean = parameter
    return posterior


def _rms(parameter: Tensor) -> float:
    """Return the root mean square of a tensor; 1 for a tensor of zeros."""
    rms = float(parameter.detach().double().square().mean().sqrt())
    return rms if rms > 0 and math.isfinite(rms) else 1.0
