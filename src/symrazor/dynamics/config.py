"""Options of training and of the discovery of conserved quantities."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from symrazor.core.validation import check_at_least, check_choice, replace_options
from symrazor.dynamics.mechanics import IntegratorName

Target = Literal["rollout", "derivative"]
NoiseKind = Literal["fixed", "learned", "closed"]
Objective = Literal["elbo", "likelihood"]


@dataclass(frozen=True)
class TrainConfig:
    """Options of training a (symmetrised) Hamiltonian network, checked for their range.

    Args:
        steps: optimiser steps.
        minutes: stop after this time even if steps are left. The learning rate is annealed by the
            fraction of steps or of time used, whichever is larger.
        batch_size: transitions per step; None for all of them.
        draws: R, draws of the weights per step.
        flows: S, flows per draw of the weights.
        late_flows: factor on S in the last quarter of training, where the quantities converge.
        lr: learning rate of posterior means, biases and noise.
        spread_lr: learning rate of the logarithms of the posterior scales, relative to `lr`. The
            scale of an unneeded weight has to grow from a tenth of the prior scale to all of it,
            and the divergence is meaningful only then.
        conserved_lr: learning rate of the conserved quantities.
        burn_in: fraction of the steps before the conserved quantities are updated; an untrained
            network holds no information about symmetry.
        clip: largest gradient norm of each parameter group.
        integrator: by name; also used for predictions.
        substeps: integrator steps between two data.
        target: "rollout" or "derivative".
        noise: initial noise variance.
        noise_kind: "fixed", "learned" or "closed", see `Noise`.
        noise_hold: fraction of the steps for which a closed-form variance stays at `noise`. Early
            residuals come from the untrained network; taken as noise they would down-weight the
            data and slow learning.
        objective: "elbo", or "likelihood" for the control experiment without a posterior.
        seed: of draws and batches.
        device: "cpu", "cuda", ...
        record: steps between two records of the history.
    """

    steps: int = 1200
    minutes: float | None = None
    batch_size: int | None = None
    draws: int = 4
    flows: int = 8
    late_flows: int = 1
    lr: float = 5e-3
    spread_lr: float = 8.0
    conserved_lr: float = 1e-2
    burn_in: float = 0.15
    clip: float = 100.0
    integrator: IntegratorName = "midpoint"
    substeps: int = 1
    target: Target = "rollout"
    noise: float = 1e-3
    noise_kind: NoiseKind = "fixed"
    noise_hold: float = 0.5
    objective: Objective = "elbo"
    seed: int = 0
    device: str = "cpu"
    record: int = 100

    def __post_init__(self) -> None:
        check_choice("integrator", self.integrator, IntegratorName)
        counts = ("steps", "batch_size", "draws", "flows", "late_flows", "substeps", "record")
        check_at_least(self, 1, *counts)
        for name in ("minutes", "lr", "spread_lr", "conserved_lr", "clip", "noise"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        for name in ("burn_in", "noise_hold"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        check_choice("target", self.target, Target)
        check_choice("noise_kind", self.noise_kind, NoiseKind)
        check_choice("objective", self.objective, Objective)

    def change(self, **changes: Any) -> "TrainConfig":
        """Return a copy with some options changed; unknown options raise ValueError."""
        return replace_options(self, changes)


@dataclass(frozen=True)
class DiscoverConfig:
    """Options of `discover`, checked for their range.

    Args:
        minutes: approximate time for training a network.
        seed: of weights, draws and the split.
        positions: whether states are positions only; momenta are then finite differences.
        device: where to train.
        steps: maximum steps of each training.
        count: maximum number of quantities to propose; None for more than common systems have.
        resume: directory for checkpoints; an interrupted run continues from there.
        network: whether to train a network; None for only if the noise test cannot decide, or if no
            equations of motion fit.
    """

    minutes: float = 5.0
    seed: int = 0
    positions: bool = False
    device: str = "cpu"
    steps: int = 20_000
    count: int | None = None
    resume: str | Path | None = None
    network: bool | None = None

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes must be positive, got {self.minutes}.")
        check_at_least(self, 1, "steps", "count")
        try:
            available = torch.device(self.device).type != "cuda" or torch.cuda.is_available()
        except RuntimeError:
            available = False
        if not available:
            raise ValueError(
                f"Device {self.device!r} is not available. Omit device= to use the CPU."
            )

    def change(self, **changes: Any) -> "DiscoverConfig":
        """Return a copy with some options changed; unknown options raise ValueError."""
        return replace_options(self, changes)
