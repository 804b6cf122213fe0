r"""Gaussian likelihoods of trajectories under a Hamiltonian.

- rollout: the state after each of H steps from an initial state,
  $N(y_h \mid \hat x_h, \sigma^2 I)$; H = 1 is the one-step likelihood of Noether's razor.
- derivative: the velocity, $N(\dot x \mid J\nabla H(x), \sigma^2 I)$.

Time steps may be irregular, and missing states are left out.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.mechanics import Field, Integrator, advance
from symrazor.dynamics.trajectories import Trajectories, Transitions

Target = Literal["rollout", "derivative"]
NoiseKind = Literal["fixed", "learned", "closed"]


def rollout(
    field: Field,
    data: Transitions,
    draws: int,
    integrator: Integrator,
    substeps: int = 1,
) -> Float[Tensor, "r n h d"]:
    """Predict the state at every step of every window, for each of R draws of the weights."""
    x = data.x.expand(draws, *data.x.shape)
    states = []
    for gap in data.gaps.unbind(dim=1):
        x = advance(integrator, field, x, gap[:, None], substeps)
        states.append(x)
    return torch.stack(states, dim=2)


def velocities(data: Trajectories, velocity: Tensor | None = None) -> Transitions:
    """Return states and their velocities, the data of derivative matching.

    Args:
        data: the trajectories.
        velocity: measured velocities [B, T, 2n]. By default second-order central differences on
            the (possibly irregular) times, which leave out the first and the last state.

    Raises:
        ValueError: no state has a velocity.
    """
    states, times, observed = data.states, data.times, data.observed
    if velocity is None:
        before, after = times.diff(dim=1)[:, :-1, None], times.diff(dim=1)[:, 1:, None]
        steps = states.diff(dim=1)
        velocity = steps[:, :-1] / before * after + steps[:, 1:] / after * before
        velocity = velocity / (before + after)
        observed = observed[:, 1:-1] & observed[:, :-2] & observed[:, 2:]
        states = states[:, 1:-1]
    use = observed.flatten() & torch.isfinite(velocity).all(-1).flatten()
    if not use.any():
        raise ValueError("No three consecutive states are observed: there is no velocity to learn.")
    x, y = states.flatten(0, 1)[use], velocity.flatten(0, 1)[use]
    ones = torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
    return Transitions(x, y[:, None], ones, ones)


class Noise(nn.Module):
    r"""Observation noise with one variance $\sigma^2$ for all entries of a state.

    Args:
        variance: initial variance.
        kind: "fixed", "learned" by gradient, or "closed": a running mean of the squared residuals,
            $\sigma^2 \leftarrow (1 - r)\sigma^2 + r \overline{|y - \hat x|^2}$.
        rate: r.
        floor: smallest variance.
    """

    rate: Tensor

    def __init__(
        self,
        variance: float = 1e-3,
        kind: NoiseKind = "fixed",
        rate: float = 0.05,
        floor: float = 1e-9,
    ) -> None:
        super().__init__()
        if kind not in ("fixed", "learned", "closed"):
            raise ValueError(f"kind of noise must be fixed, learned or closed, got {kind!r}.")
        if not variance > 0:
            raise ValueError(f"The noise variance must be positive, got {variance}.")
        self.kind, self.closed_form_rate, self.floor = kind, rate, floor
        self.register_buffer("rate", torch.tensor(rate), persistent=False)
        start = torch.tensor(math.log(variance))
        self.log_variance = nn.Parameter(start, requires_grad=kind == "learned")

    @property
    def variance(self) -> Tensor:
        r"""The variance $\sigma^2$."""
        return self.log_variance.exp().clamp_min(self.floor)

    def hold(self, frozen: bool) -> None:
        """Freeze a closed-form variance, or let it move again."""
        if self.kind == "closed":  # the rate is a tensor because CUDA graphs replay its value
            self.rate.fill_(0.0 if frozen else self.closed_form_rate)

    def nll(self, predicted: Float[Tensor, "r n h d"], data: Transitions) -> Float[Tensor, "r n"]:
        """Return the negative log-likelihood of each datum, with all constants."""
        error = (predicted - data.y).square().sum(-1)
        constant = predicted.shape[-1] * torch.log(2 * math.pi * self.variance)
        per_state = 0.5 * (error / self.variance + constant)
        return (per_state * data.observed).sum(-1)

    @torch.no_grad()
    def observe(self, predicted: Float[Tensor, "r n h d"], data: Transitions) -> None:
        """Update a closed-form variance with the residuals of a batch."""
        if self.kind == "closed":
            error = (predicted - data.y).square().mean(-1) * data.observed
            mean = error.sum((1, 2)).mean() / data.observed.sum()
            new = (1 - self.rate) * self.variance + self.rate * torch.nan_to_num(mean, 0.0, 0.0)
            moved = new.clamp_min(self.floor).log()
            self.log_variance.copy_(torch.where(self.rate > 0, moved, self.log_variance))


def predict(
    field: Field,
    data: Transitions,
    draws: int,
    integrator: Integrator,
    substeps: int,
    target: Target,
) -> Float[Tensor, "r n h d"]:
    """Predict the target of the data, states or velocities, for each draw of the weights."""
    if target == "derivative":
        return field(data.x.expand(draws, *data.x.shape)).unsqueeze(2)
    return rollout(field, data, draws, integrator, substeps)
