"""A trained model: its bound, and what it predicts."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.likelihoods import Noise, predict
from symrazor.dynamics.mechanics import integrator_by_name
from symrazor.dynamics.trajectories import Transitions
from symrazor.inference.variational.posteriors import collapsed_kl

Record = dict[str, float]
BOUND = 1 << 19
"""States times flows times draws from which a bound is estimated, if they can be so few."""
CHUNK = 1 << 17
"""States times flows times draws that are worked on at once outside training."""


@dataclass
class Trained:
    """A trained model and how it got there.

    Args:
        model: the (symmetrised) network.
        noise: of the data.
        config: of the training.
        history: a record every so many steps.
        seconds: of training.
        skipped: steps without a finite gradient.
        bound: "nll", "kl" and "neg_elbo", each per datum, of the training data at the end, and the
            standard "error" of their estimate.
        trials: of `train_and_select`: how many quantities were tried, and what they cost in nats.
        plain: of `train_and_select`, where a trial is returned: the one without quantities.
    """

    model: SymmetrisedNetwork
    noise: Noise
    config: TrainConfig
    history: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    skipped: int = 0
    bound: dict[str, float] = field(default_factory=dict)
    trials: list[Record] = field(default_factory=list)
    plain: "Trained | None" = None


def divergence(model: SymmetrisedNetwork) -> Tensor:
    """Sum of the collapsed divergences of all layers, in float64."""
    return torch.stack([collapsed_kl(q) for q in model.network.posteriors]).sum()


@torch.no_grad()
def bound(trained: Trained, data: Transitions, draws: int | None = None) -> dict[str, float]:
    """The bound per datum with many draws: "nll", "kl", their sum "neg_elbo", and its "error".

    Args:
        trained: the model.
        data: it was trained on.
        draws: from the posterior; 16 to 256, fewer for more data, and an eighth of it, at least
            4, where flows have to be solved for.
    """
    if draws is None:
        flows = 1 if trained.model.conserved is None else 2 * trained.config.flows
        draws = max(16, min(256, BOUND // (len(data) * flows)))
        if not isinstance(trained.model.conserved, Quadratic | None):
            draws = max(4, draws // 8)
    total = torch.zeros(draws, dtype=torch.float64)
    for piece, predicted in predictions(trained, data, draws=draws, seed=trained.config.seed + 1):
        total += trained.noise.nll(predicted, piece).sum(1, dtype=torch.float64).cpu()
    each = total / len(data)
    pairs = each[: draws // 2 * 2].view(-1, 2).mean(1) if draws > 3 else each  # they are opposite
    nll, error = float(each.mean()), float(pairs.std(correction=0)) / len(pairs) ** 0.5
    kl = 0.0
    if trained.config.objective == "elbo":
        kl = float(divergence(trained.model)) / len(data)
    return {"nll": nll, "kl": kl, "neg_elbo": nll + kl, "error": error}


@torch.no_grad()
def predictions(
    trained: Trained,
    data: Transitions,
    draws: int = 64,
    seed: int = 0,
    mean_weights: bool = False,
    flows: int | None = None,
) -> Iterator[tuple[Transitions, Tensor]]:
    """Pieces of the data, and the predicted states [R, N, H, 2n] of each, by the same draws.

    Args:
        trained: the model.
        data: where to start and how long to go.
        draws: R, from the posterior.
        seed: of draws and flows.
        mean_weights: one prediction with the mean weights instead.
        flows: S; twice the training's by default.
    """
    model, config = trained.model, trained.config
    mean = model.network.posteriors[0].mean
    data = data.to(mean.device, mean.dtype)
    flows = flows or 2 * config.flows
    draws = 1 if mean_weights else draws
    generator = torch.Generator(mean.device).manual_seed(seed)
    energy = model.mean(flows, generator) if mean_weights else model.draw(draws, flows, generator)
    size = max(1, CHUNK // (draws * flows if model.conserved is not None else draws))
    for index in torch.arange(len(data), device=mean.device).split(size):
        piece = data.at(index)
        integrator = integrator_by_name(config.integrator)
        predicted = predict(energy.field, piece, draws, integrator, config.substeps, config.target)
        yield piece, predicted
