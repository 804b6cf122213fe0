r"""A start for conserved quantities: what the network nearly conserves already.

A random quantity is a poor start: in d variables there are d (d + 3) / 2 quadratic directions, and
the bound has to feel its way from noise to the few that matter. A network that was trained without
quantities knows more. Of all quadratic C the K with the smallest

$$ E_x \{C, H\}^2 \,/\, E_x |\nabla C|^2 $$

over the states of the data are those along whose flows the learned energy changes least. This is a
generalised eigenvalue problem. It only chooses where to start: the bound then keeps, turns or
shrinks every direction.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.invariants import feature_gradients, matrices
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import Progress, Trained, train
from symrazor.dynamics.trajectories import Transitions

REACH = 0.5
"""Root mean square length of the flows at the start, relative to that of the states."""
MOST = 4096
"""States that are looked at."""


def slowest(
    slopes: Float[Tensor, "m f d"], field: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k f"]]:
    r"""Combinations of f functions, those that a vector field changes least first.

    Args:
        slopes: gradients of the functions at m states, in float64.
        field: $J\nabla H$ there.

    Returns:
        The mean squared rates, ascending, relative to the mean square of the field; and the
        coefficients of combinations with $E|\nabla C|^2 = 1$.
    """
    field = field.double()
    size = slopes.square().sum(-1).mean(0).sqrt().clamp_min(1e-150)
    slopes = slopes / size[:, None]
    rates = (slopes * field[:, None]).sum(-1)
    metric = torch.einsum("mfd,mgd->fg", slopes, slopes) / len(slopes)
    values, vectors = torch.linalg.eigh(metric)
    keep = values > 1e-10 * values[-1]
    white = vectors[:, keep] / values[keep].sqrt()
    inner = white.mT @ (rates.mT @ rates / len(slopes)) @ white
    slow, combination = torch.linalg.eigh(inner)
    relative = slow.clamp_min(0) / field.square().sum(-1).mean()
    return relative, (white @ combination).mT / size


@torch.no_grad()
def nearly_conserved(
    field: Float[Tensor, "m d"], x: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "f"], Float[Tensor, "f d d"], Float[Tensor, "f d"]]:
    r"""All quadratic quantities, those that a vector field changes least first.

    Args:
        field: $J\nabla H$ at the states.
        x: states.

    Returns:
        The mean squared rates, ascending, relative to the mean square of the field; and A, b of
        quantities with $E|\nabla C|^2 = 1$.
    """
    rates, c = slowest(feature_gradients(x.double()), field)
    A, b = matrices(c, x.shape[1])
    return rates, A, b


@torch.no_grad()
def mean_field(
    model: SymmetrisedNetwork, x: Float[Tensor, "n d"], flows: int = 256
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m d"]]:
    """Up to `MOST` of the states, and the dynamics there of a model with mean weights, on the CPU.

    Args:
        model: its flows, if it has any, are averaged over.
        x: states of the data.
        flows: of that average.
    """
    mean = model.network.posteriors[0].mean
    x = x[:: -(-len(x) // MOST)].to(mean)
    energy = model.mean(flows, torch.Generator(mean.device).manual_seed(0))
    field = torch.cat([energy.field(part[None])[0] for part in x.split(256)])
    return x.cpu(), field.cpu()


def typical_size(x: Float[Tensor, "n d"]) -> float:
    """Root mean square length of states."""
    return float(x.square().sum(-1).mean().sqrt())


@torch.no_grad()
def informed_start(model: SymmetrisedNetwork, x: Float[Tensor, "n d"]) -> Float[Tensor, "k"]:
    """Set the quantities of a model to the K that its network nearly conserves.

    Args:
        model: with quadratic quantities and a network that has seen data; changed in place.
        x: states of the data.

    Returns:
        The relative squared rates of the K, see `nearly_conserved`.

    Raises:
        ValueError: no quadratic quantities to set.
    """
    conserved, times = model.conserved, model.times
    if not isinstance(conserved, Quadratic) or times is None or conserved.commutators:
        raise ValueError("expected a model with quadratic quantities without commutators, got none")
    states, field = mean_field(SymmetrisedNetwork(model.network), x)
    rates, A, b = nearly_conserved(field, states)
    K = min(conserved.count, len(rates))
    length = REACH * typical_size(x) / (conserved.scale * times.variance**0.5 * K**0.5)
    conserved.A_raw[:K].copy_(length * A[:K])
    if conserved.b.requires_grad:
        conserved.b[:K].copy_(length * b[:K])
    return rates[:K]


def warm_start(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train the network without quantities for the burn-in share, then set an informed start.

    Steps without flows are several times cheaper than those with. What is left to do is
    `train(model, data, after_warm_start(config))`.

    Args:
        model: with quadratic quantities; changed in place.
        data: transitions.
        config: of the whole training.
        progress: called with each record.
    """
    config = config or TrainConfig()
    share = config.burn_in
    minutes = None if config.minutes is None else share * config.minutes
    part = config.change(steps=max(1, round(share * config.steps)), minutes=minutes, burn_in=0.0)
    plain = train(SymmetrisedNetwork(model.network), data, part, progress)
    informed_start(model.to(config.device), data.x)
    return plain


def after_warm_start(config: TrainConfig) -> TrainConfig:
    """What is left of a training after its warm start."""
    share = 1 - config.burn_in
    minutes = None if config.minutes is None else share * config.minutes
    return config.change(steps=max(1, round(share * config.steps)), minutes=minutes, burn_in=0.0)
