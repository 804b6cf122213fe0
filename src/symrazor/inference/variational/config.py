"""Options of a `Variational` network, and the posteriors that they give to its weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from symrazor.core.prior import PriorGroups
from symrazor.core.validation import check_at_least, check_choice, replace_options
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
PriorUpdate = Literal["collapsed", "closed-form", "gradient", "fixed"]
NoiseUpdate = Literal["closed-form", "gradient", "fixed"]


@dataclass(frozen=True)
class VariationalConfig:
    r"""Options of a `Variational` network.

    Args:
        posterior: "matrix-normal", "block", "diagonal", "low-rank", "full", "point", or a class; or
            a mapping from patterns of parameter names to one of these or to a posterior object.
        scale: starting standard deviation of the weights, relative to the RMS of each tensor.
        prior_update: how precisions move. "collapsed": to the optimum $1/v^*$ at every step, so
            that the bound is that of the best prior; "closed-form": the fraction `damping` of the
            way; "gradient": with the optimiser, like any parameter; "fixed": not at all.
        noise_update: how the noise of a Gaussian likelihood moves. "closed-form": its variance
            moves the fraction `damping` of the way to the expected squared error of each batch;
            "gradient"; "fixed".
        prior_precision: starting precision, for all groups or by group name.
        prior_groups: "path" (the tensors of a path together, any other tensor alone), "tensor",
            "scalar", "layer", "diagonal" or a mapping name -> glob patterns, of tensors with a
            posterior.
        draws: samples of the weights per training step.
        antithetic: sample in pairs of opposite deviation.
        local: use local reparameterisation where it is exact.
        damping: see above; 1 for "closed-form" is "collapsed".
        burn_in: calls of `bound` before precisions move in closed form. For a posterior that has
            learned nothing yet the best prior is around zero, from which it may not come back.
        seed: seed of the samples.
    """

    posterior: PosteriorSpec | Mapping[str, PosteriorSpec] = "matrix-normal"
    scale: float = 0.1
    prior_update: PriorUpdate = "collapsed"
    noise_update: NoiseUpdate = "gradient"
    prior_precision: float | Mapping[str, float] = 1.0
    prior_groups: PriorGroups = "path"
    draws: int = 2
    antithetic: bool = True
    local: bool = True
    damping: float = 0.1
    burn_in: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("prior_update", self.prior_update, PriorUpdate)
        check_choice("noise_update", self.noise_update, NoiseUpdate)
        check_at_least(self, 1, "draws")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be above 0 and at most 1, got {self.damping}.")
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}.")

    def change(self, **changes: Any) -> "VariationalConfig":
        """Return a copy with some fields replaced; unknown fields raise ValueError."""
        return replace_options(self, changes)


def assign_posteriors(
    theta: Mapping[str, nn.Parameter], config: VariationalConfig
) -> dict[str, GaussianPosterior]:
    """Return a posterior for every tensor, whose mean is the parameter itself.

    Raise ValueError for a pattern without a parameter, a parameter without a pattern, an unknown
    name, or a posterior of another shape.
    """
    chosen = config.posterior
    patterns = chosen if isinstance(chosen, Mapping) else {"*": chosen}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in theta):
            raise ValueError(
                f"No parameter of the model matches {pattern!r} in posterior=.... Parameters: "
                f"{', '.join(theta)}."
            )
    posteriors = {}
    for name, parameter in theta.items():
        spec = next((s for pattern, s in patterns.items() if fnmatchcase(name, pattern)), None)
        if spec is None:
            raise ValueError(
                f"posterior=... has no pattern for {name!r}. Add one, or '*': 'point' at the end "
                "for point estimates of all other weights."
            )
        if patterns is not chosen and spec in MATRIX_POSTERIORS and parameter.dim() < 2:
            spec = "diagonal"
        posteriors[name] = _make_posterior(name, parameter, spec, config.scale)
    return posteriors


def _make_posterior(
    name: str, parameter: nn.Parameter, spec: PosteriorSpec, scale: float
) -> GaussianPosterior:
    if isinstance(spec, str):
        if spec not in POSTERIORS:
            names = ", ".join(repr(known) for known in POSTERIORS)
            raise ValueError(f"Unknown posterior {spec!r} for {name!r}. Use one of {names}.")
        spec = POSTERIORS[spec]
    if not isinstance(spec, GaussianPosterior):
        rms = float(parameter.detach().double().square().mean().sqrt())
        size = rms if rms > 0 and math.isfinite(rms) else 1.0
        spec = spec(parameter.shape, scale=scale * size, mean=parameter)
    if spec.mean.shape != parameter.shape:
        raise ValueError(
            f"The posterior of {name!r} must have shape {list(parameter.shape)}, got "
            f"{list(spec.mean.shape)}."
        )
    spec.to(device=parameter.device, dtype=parameter.dtype)
    spec.mean = parameter
    return spec
