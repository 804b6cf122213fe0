r"""What a Hamiltonian predicts, compared with what was seen.

- rollout: the state after each of H steps from a given state, $N(y_h \mid \hat x_h, \sigma^2 I)$;
  with H = 1 the one-step likelihood of the paper.
- derivative: the velocity, $N(\dot x \mid J\nabla H(x), \sigma^2 I)$.

Steps may be irregular, and states that were not seen do not count.
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
    """Predicted states at every step of every window, for each draw."""
    x = data.x.expand(draws, *data.x.shape)
    states = []
    for gap in data.gaps.unbind(dim=1):
        x = advance(integrator, field, x, gap[:, None], substeps)
        states.append(x)
    return torch.stack(states, dim=2)


def velocities(data: Trajectories, velocity: Tensor | None = None) -> Transitions:
    """Data for derivative matching: states and their velocities.

    Args:
        data: the trajectories.
        velocity: [B, T, 2n] if it was measured; else by central differences of second order on
            the (irregular) times, without the first and the last state.
    """
    states, times, seen = data.states, data.times, data.observed
    if velocity is None:
        back, ahead = times.diff(dim=1)[:, :-1, None], times.diff(dim=1)[:, 1:, None]
        steps = states.diff(dim=1)
        velocity = (steps[:, :-1] / back * ahead + steps[:, 1:] / ahead * back) / (back + ahead)
        states, seen = states[:, 1:-1], seen[:, 1:-1] & seen[:, :-2] & seen[:, 2:]
    use = seen.flatten() & torch.isfinite(velocity).all(-1).flatten()
    if not use.any():
        raise ValueError("expected three states in a row that were seen, got none")
    x, y = states.flatten(0, 1)[use], velocity.flatten(0, 1)[use]
    one = torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
    return Transitions(x, y[:, None], one, one)


class Noise(nn.Module):
    r"""Normal noise of one variance $\sigma^2$.

    Args:
        variance: to start with, or for good.
        kind: "fixed", "learned" (by gradient) or "closed": the mean squared residual of recent
            batches, $\sigma^2 \leftarrow (1 - r)\sigma^2 + r \overline{|y - \hat x|^2}$.
        rate: r.
        floor: least variance.
    """

    rate: Tensor

    def __init__(
        self,
        variance: float = 1e-3,
        kind: NoiseKind = "fixed",
        rate: float = 0.05,
        floor: float = 1e-9,
    ) -> None:
        """Start at `variance`."""
        super().__init__()
        if kind not in ("fixed", "learned", "closed"):
            raise ValueError(f"expected fixed, learned or closed noise, got {kind!r}")
        if not variance > 0:
            raise ValueError(f"expected a positive variance, got {variance}")
        self.kind, self.pace, self.floor = kind, rate, floor
        self.register_buffer("rate", torch.tensor(rate), persistent=False)
        start = torch.tensor(math.log(variance))
        self.log_variance = nn.Parameter(start, requires_grad=kind == "learned")

    @property
    def variance(self) -> Tensor:
        r"""$\sigma^2$."""
        return self.log_variance.exp().clamp_min(self.floor)

    def hold(self, held: bool) -> None:
        """Let a closed-form variance stay as it is for now, or move again."""
        if self.kind == "closed":  # a tensor: steps may be recorded on a GPU
            self.rate.fill_(0.0 if held else self.pace)

    def nll(self, predicted: Float[Tensor, "r n h d"], data: Transitions) -> Float[Tensor, "r n"]:
        """Negative log-likelihood of each datum, all constants included."""
        error = (predicted - data.y).square().sum(-1)
        constant = predicted.shape[-1] * torch.log(2 * math.pi * self.variance)
        each = 0.5 * (error / self.variance + constant)
        return (each * data.observed).sum(-1)

    @torch.no_grad()
    def observe(self, predicted: Float[Tensor, "r n h d"], data: Transitions) -> None:
        """Move a closed-form variance towards the residuals of a batch."""
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
    """What the target of the data should be, for each draw."""
    if target == "derivative":
        return field(data.x.expand(draws, *data.x.shape)).unsqueeze(2)
    return rollout(field, data, draws, integrator, substeps)
