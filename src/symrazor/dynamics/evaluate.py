"""How well a trained model predicts: new data, long rollouts, energy."""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.likelihoods import rollout
from symrazor.dynamics.mechanics import Scalar, integrator_by_name
from symrazor.dynamics.trained import Trained, predictions
from symrazor.dynamics.trajectories import Transitions


@torch.no_grad()
def mean_squared_error(
    trained: Trained,
    data: Transitions,
    draws: int = 32,
    mean_weights: bool = False,
    flows: int | None = None,
) -> float:
    """Of the predicted states, averaged over the posterior before they are compared.

    Args:
        trained: the model.
        data: clean transitions.
        draws: from the posterior.
        mean_weights: predict with the mean weights instead.
        flows: of the average over flows; twice the training's by default.
    """
    total, count = 0.0, 0.0
    for piece, states in predictions(trained, data, draws, 0, mean_weights, flows):
        error = (states.double().mean(0) - piece.y).square().mean(-1) * piece.observed
        total += float(error.sum())
        count += float(piece.observed.sum())
    return total / count


@torch.no_grad()
def relative_drift(
    energy: Scalar, states: Float[Tensor, "b t d"]
) -> tuple[float, Float[Tensor, "b"]]:
    """Largest change of a quantity along trajectories over its spread; and of each of them."""
    values = energy(states.double())
    change = (values - values[:, :1]).abs().amax(1)
    spread = values.std().clamp_min(1e-12)
    return float(change.max() / spread), change / spread


@torch.no_grad()
def long_rollout(
    trained: Trained,
    start: Float[Tensor, "b d"],
    dt: float,
    steps: int,
    draws: int = 16,
    mean_weights: bool = False,
) -> Float[Tensor, "b t d"]:
    """Trajectories that go on and on, the start included.

    Args:
        trained: the model.
        start: initial states.
        dt: time between two states.
        steps: how many.
        draws: from the posterior, whose trajectories are averaged; an average drifts even where
            each of them conserves the energy, because their phases part.
        mean_weights: one trajectory with the mean weights instead.

    Raises:
        ValueError: no states [b, 2n], or no step.
    """
    if start.ndim != 2 or steps < 1:
        got = f"shape {list(start.shape)} and {steps} steps"
        raise ValueError(f"expected states [b, 2n] to start from and a step or more, got {got}")
    config, mean = trained.config, trained.model.network.posteriors[0].mean
    x = start.to(mean)
    gaps = torch.full((len(x), steps), dt, dtype=x.dtype, device=x.device)
    data = Transitions(x, x[:, None].expand(-1, steps, -1), gaps, torch.ones_like(gaps))
    generator = torch.Generator(mean.device).manual_seed(config.seed)
    flows, draws = 2 * config.flows, 1 if mean_weights else draws
    model = trained.model
    energy = model.mean(flows, generator) if mean_weights else model.draw(draws, flows, generator)
    states = rollout(
        energy.field, data, draws, integrator_by_name(config.integrator), config.substeps
    )
    return torch.cat([x[:, None], states.mean(0)], dim=1)
