"""How a `Variational` network works: its options, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from symrazor.core.prior import Groups
from symrazor.inference.variational.assignment import Kind


@dataclass(frozen=True)
class VariationalConfig:
    r"""Options of a `Variational` network.

    Args:
        posterior: "matrix-normal", "block", "diagonal", "low-rank", "full", "point", or a class;
            or pattern of parameter names -> one of these, or a posterior that is ready.
        scale: deviation of the weights to start with, relative to the size of each tensor.
        prior_update: how precisions move. "collapsed": to the best one, $1/v^*$, at every step, so
            that the bound is that of the best prior; "closed-form": the fraction `damping` of the
            way; "gradient": they are parameters like any other; "fixed".
        noise_update: of a Gaussian likelihood: "closed-form": its variance moves the fraction
            `damping` of the way to the expected squared error of each batch; "gradient"; "fixed".
        prior_precision: starting precision, for all groups or by group name.
        prior_groups: "path" (the tensors of a path together, any other tensor alone), "tensor",
            "scalar", "layer", "diagonal" or name -> glob patterns, of tensors with a posterior.
        draws: of the weights per training step.
        antithetic: draw in pairs of opposite deviation.
        local: use local reparameterisation where it is exact.
        damping: see above; 1 for "closed-form" is "collapsed".
        burn_in: calls of `bound` before precisions move in closed form. A posterior that knows
            nothing yet is best served by a prior around zero, from which it may not come back.
        seed: of the draws.
    """

    posterior: Kind | Mapping[str, Kind] = "matrix-normal"
    scale: float = 0.1
    prior_update: Literal["collapsed", "closed-form", "gradient", "fixed"] = "collapsed"
    noise_update: Literal["closed-form", "gradient", "fixed"] = "gradient"
    prior_precision: float | Mapping[str, float] = 1.0
    prior_groups: Groups = "path"
    draws: int = 2
    antithetic: bool = True
    local: bool = True
    damping: float = 0.1
    burn_in: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.prior_update not in ("collapsed", "closed-form", "gradient", "fixed"):
            raise ValueError(
                "expected prior_update 'collapsed', 'closed-form', 'gradient' or 'fixed', got "
                f"{self.prior_update!r}"
            )
        if self.noise_update not in ("closed-form", "gradient", "fixed"):
            raise ValueError(
                "expected noise_update 'closed-form', 'gradient' or 'fixed', got "
                f"{self.noise_update!r}"
            )
        if self.draws < 1:
            raise ValueError(f"expected at least 1 draw per step, got {self.draws}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"expected damping in (0, 1], got {self.damping}")
        if not self.scale > 0:
            raise ValueError(f"expected a positive scale, got {self.scale}")

    def change(self, **changes: Any) -> "VariationalConfig":
        """A copy with some fields replaced.

        Raises:
            ValueError: a field that it does not have.
        """
        known = sorted(self.__dataclass_fields__)
        if not set(changes) <= set(known):
            raise ValueError(
                f"expected options among {known}, got {sorted(set(changes) - set(known))}"
            )
        return replace(self, **changes)
