"""Options of a `Variational` network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from symrazor.core.prior import PriorGroups
from symrazor.core.validation import check_choice, replace_options
from symrazor.inference.variational.assignment import PosteriorSpec

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
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1, got {self.draws}.")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be above 0 and at most 1, got {self.damping}.")
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}.")

    def change(self, **changes: Any) -> "VariationalConfig":
        """Return a copy with some fields replaced; unknown fields raise ValueError."""
        return replace_options(self, changes)
