"""Options of a training, and of a discovery."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from symrazor.dynamics.likelihoods import NoiseKind, Target
from symrazor.dynamics.mechanics import IntegratorName, integrator_by_name

Objective = Literal["elbo", "likelihood"]


@dataclass(frozen=True)
class TrainConfig:
    """How a (symmetrised) Hamiltonian network is trained.

    Args:
        steps: of the optimiser.
        minutes: stop after this time even if there are steps left; the learning rate falls by
            the share of time or steps that is used up, whichever is larger.
        batch_size: transitions for each step; None for all of them.
        draws: R, of the weights, for each step.
        flows: S, for each draw of the weights.
        late_flows: factor on S in the last quarter, where the learned quantities settle.
        lr: of posterior, biases and noise.
        spread_lr: of the logarithms of posterior scales, relative to `lr`. They have a long way to
            go, from a tenth of the prior's scale to all of it for a weight that is not needed, and
            until they have arrived the divergence says little.
        conserved_lr: of the conserved quantities.
        burn_in: share of the steps before the conserved quantities move: a network that has seen
            no data tells nothing about symmetry.
        clip: largest norm of the gradient of each of the two groups.
        integrator: by name; the same is used to predict.
        substeps: of the integrator between two data.
        target: "rollout" or "derivative".
        noise: variance of the data.
        noise_kind: "fixed", "learned" or "closed".
        noise_hold: share of the steps for which noise in closed form stays at `noise`. The
            residuals of a network that has seen few data are no noise: taken for it, they make the
            data count for little, and the network learns slowly.
        objective: "elbo", or "likelihood" for the control without a posterior.
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
        integrator_by_name(self.integrator)
        for name in ("steps", "draws", "flows", "late_flows", "substeps", "record"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        for name in ("lr", "spread_lr", "conserved_lr", "clip", "noise"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        for name in ("burn_in", "noise_hold"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected a {name} share in [0, 1), got {getattr(self, name)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"expected batch_size >= 1 or None, got {self.batch_size}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"expected minutes > 0 or None, got {self.minutes}")
        if self.target not in ("rollout", "derivative"):
            raise ValueError(f"expected target rollout or derivative, got {self.target!r}")
        if self.objective not in ("elbo", "likelihood"):
            raise ValueError(f"expected objective elbo or likelihood, got {self.objective!r}")

    def change(self, **changes: Any) -> "TrainConfig":
        """A copy with other values."""
        return replace(self, **changes)


@dataclass(frozen=True)
class DiscoverConfig:
    """How conserved quantities are looked for in a user's trajectories.

    Args:
        minutes: time to spend, about.
        seed: of weights, draws and the split.
        positions: the states are positions; velocities by finite differences stand for momenta.
        device: where to train.
        steps: most steps of each training, if there is time left.
        count: most quantities to be proposed; None for more than any usual system has.
        resume: directory for checkpoints; a run that was stopped goes on from there.

    Raises:
        ValueError: options that cannot be.
    """

    minutes: float = 5.0
    seed: int = 0
    positions: bool = False
    device: str = "cpu"
    steps: int = 20_000
    count: int | None = None
    resume: str | Path | None = None

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"expected minutes > 0, got {self.minutes}")
        if self.steps < 1:
            raise ValueError(f"expected steps >= 1, got {self.steps}")
        if self.count is not None and self.count < 1:
            raise ValueError(f"expected at least one quantity on offer, got count={self.count}")
        try:
            there = torch.device(self.device).type != "cuda" or torch.cuda.is_available()
        except RuntimeError:
            there = False
        if not there:
            raise ValueError(
                f"expected a device that is there, got {self.device!r}; do leave out device="
            )

    def change(self, **changes: Any) -> "DiscoverConfig":
        """A copy with other values.

        Raises:
            ValueError: an option that is not there.
        """
        known = [f.name for f in fields(self)]
        wrong = sorted(set(changes) - set(known))
        if wrong:
            raise ValueError(f"expected options among {', '.join(known)}, got {', '.join(wrong)}")
        return replace(self, **changes)
