r"""Torch optimisers beside a prior: how far one step goes, and what would count the prior twice."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer


def step_sizes(optimiser: Optimizer, theta: Mapping[str, nn.Parameter]) -> dict[str, float]:
    r"""Weight name -> the step size s with which `Razor.shrink_` matches the optimiser as it is.

    SGD with momentum m and dampening d moves a weight under a constant gradient g by
    $-\text{lr}\, g (1 - d) / (1 - m)$, Nesterov's form too, so $s = \text{lr} (1 - d) / (1 - m)$
    and the stationary point of the two steps together is the posterior mode. Any other optimiser
    has $s = \text{lr}$, decoupled weight decay; its stationary point is another one, see
    `symrazor.lightning`.

    Args:
        optimiser: at the learning rates that the step has just used.
        theta: the weights, by name; each in one of the optimiser's groups.
    """
    found: dict[int, float] = {}
    for group in optimiser.param_groups:
        size = float(group["lr"])
        if isinstance(optimiser, torch.optim.SGD) and group["momentum"]:
            size *= (1 - group["dampening"]) / (1 - group["momentum"])
        found |= {id(parameter): size for parameter in group["params"]}
    return {name: found[id(weight)] for name, weight in theta.items()}


def check_optimiser(
    optimiser: Optimizer, theta: Mapping[str, nn.Parameter], prior_in_loss: bool = False
) -> None:
    """Refuse an optimiser that does not move the weights towards their posterior mode.

    Args:
        optimiser: of the training.
        theta: the weights that have a prior, by name.
        prior_in_loss: the loss has the prior in it, so that closures may be called repeatedly.

    Raises:
        ValueError: a weight decay, which would be a second prior; weights that are left out; LBFGS,
            whose line search has to see the prior.
    """
    names = {id(weight): name for name, weight in theta.items()}
    for group in optimiser.param_groups:
        mine = [names.pop(id(p)) for p in group["params"] if id(p) in names]
        if mine and group.get("weight_decay", 0):
            raise ValueError(
                f"expected an optimiser without weight decay, got {group['weight_decay']} for "
                f"{mine}: the prior is the weight decay; do "
                f"{type(optimiser).__name__}(..., weight_decay=0.0)"
            )
    if names:
        raise ValueError(
            f"expected an optimiser of all trainable weights, got one without "
            f"{sorted(names.values())}; do give it these, or set requires_grad=False"
        )
    if isinstance(optimiser, torch.optim.LBFGS) and not prior_in_loss:
        raise ValueError("expected the prior in the loss with LBFGS, got it outside; do add it")
