"""Options of a `Razor`, and the prior that it starts with."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from torch import nn

from symrazor.core.parameters import weights
from symrazor.core.prior import GaussianPrior, PriorGroups
from symrazor.core.validation import check_types
from symrazor.curvature.task import Method
from symrazor.curvature.weight_sharing import Layer
from symrazor.layers.relaxed import free_groups, path_groups
from symrazor.linalg.blocks import per_weight_precision_error

FREE_PRECISION = 30.0
"""Default starting precision of free paths beside an equivariant one."""


@dataclass(frozen=True)
class RazorConfig(Method):
    """How a `Razor` estimates the evidence and updates the hyperparameters.

    Args:
        structure: "kron", "diag", "block" or "full" curvature.
        estimator: "exact", "mc" or "empirical".
        samples: probes per datum for "mc".
        probe: "spectral" or "label", for "mc".
        flavour: "expand" or "reduce", for "kron".
        blocks: "own" or "averaged" output factors of block-wise layers, for "kron".
        copies: "reduce" or "expand" over copies of a datum (see `Augmented`), for "kron".
        update: "mackay" (fixed point) or "adam".
        prior_precision: starting precision, for all groups or by group name.
        free_precision: starting precision of free paths beside an equivariant one, where
            `prior_precision` is one number and groups are "path". None for 30, unless `fit` starts
            near the symmetric network (see `FitConfig`).
        prior_groups: "path" (the tensors of a path together, any other tensor alone), "tensor",
            "scalar", "layer", "diagonal" or a mapping name -> glob patterns.
        temperature: T of the tempered likelihood p^(1/T).
        damping: fraction of the way to the fixed point that an update takes, in log precision.
        inner_steps: updates of the precisions per estimate.
        lr: learning rate of Adam in log precisions and hyperparameters.
        burn_in: training steps (calls of penalty or shrink_) before the first update.
        pieces: number of parts of a batch that are processed one after the other if the network has
            hyperparameters. The gradient in them then needs no more memory than a training step.
        seed: seed of the "mc" estimator.
    """

    update: Literal["mackay", "adam"] = "mackay"
    prior_precision: float | Mapping[str, float] = 1.0
    free_precision: float | None = None
    prior_groups: PriorGroups = "path"
    temperature: float = 1.0
    damping: float = 0.5
    inner_steps: int = 5
    lr: float = 0.1
    burn_in: int = 0
    pieces: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        super().__post_init__()
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be above 0 and at most 1, got {self.damping}.")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}.")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr of the razor must be positive and finite, got {self.lr}.")
        if self.free_precision is not None and not self.has_free_precision:
            other = "prior_groups" if self.prior_groups != "path" else "prior_precision"
            raise ValueError(
                f"free_precision={self.free_precision} conflicts with {other}="
                f"{getattr(self, other)!r}, which sets the precision of every group. Give free "
                "paths their precision in prior_precision={group: precision, ...} and omit "
                "free_precision."
            )
        for name, least in (("pieces", 1), ("inner_steps", 0), ("burn_in", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")

    @property
    def has_free_precision(self) -> bool:
        """Whether free paths start with `free_precision` instead of `prior_precision`."""
        return self.prior_groups == "path" and not isinstance(self.prior_precision, Mapping)

    @property
    def method(self) -> Method:
        """The options of the curvature."""
        return Method(**{f.name: getattr(self, f.name) for f in fields(Method)})


def starting_prior(model: nn.Module, config: RazorConfig) -> GaussianPrior:
    """Return the prior of a config, with `free_precision` for free paths where it applies."""
    if config.prior_groups != "path":
        return GaussianPrior(weights(model), config.prior_precision, config.prior_groups)
    groups, precision = path_groups(model), config.prior_precision
    if not isinstance(precision, Mapping):
        free = FREE_PRECISION if config.free_precision is None else config.free_precision
        names = free_groups(model)
        precision = {group: free if group in names else precision for group in groups}
    return GaussianPrior(weights(model), precision, groups)


def check_no_kronecker(layers: Iterable[Layer]) -> None:
    """Check that no layer has a Kronecker block, which needs one precision per tensor.

    Raises:
        ValueError: names a weight with a Kronecker block.
    """
    for layer in layers:
        if layer.weight is not None and not layer.form.dense:
            raise per_weight_precision_error(layer.weight)
