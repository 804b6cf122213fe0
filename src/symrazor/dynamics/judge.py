r"""Propose conserved quantities, and let the evidence judge them.

A network that was trained without quantities shows what it nearly conserves (`nearly_conserved`).
The first m of these are a proposal wherever the rate jumps from the m-th to the next. Every
proposal is put into the average with flows about as long as the states and held there: a symmetry
of the data then costs no fit and saves weights, and anything else ruins the fit. With free lengths
the bound would also like short flows across the dynamics, which only smooth the energy: those are
not on offer. Neither is a proposal preferred that does not pay for its coefficients.
"""

import copy
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import HamiltonianNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.prune import continued, shifted
from symrazor.dynamics.simple import WithinSpan, simplified, worth
from symrazor.dynamics.start import slow_quantities, typical_size
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import Progress, Trained, train
from symrazor.dynamics.trajectories import Transitions

LENGTH = 1.0
"""Root mean square length of the flows of a proposal, relative to that of the states."""
PROPOSALS = 2
"""How many numbers of quantities are tried, beside none."""


@dataclass
class Trial:
    r"""A proposal and what the evidence said.

    Args:
        count: m, quantities proposed; 0 for none.
        rounded: whether to whole coefficients.
        cost: nats, $-\mathrm{ELBO}$ and a charge for free coefficients; infinite where it diverged.
        trained: the model.
    """

    count: int
    rounded: bool
    cost: float
    trained: Trained | None


def jumps(rates: Float[Tensor, "f"], most: int, count: int = PROPOSALS) -> list[int]:
    """The m of 1..most with the largest ratio of the next rate to the m-th, best first."""
    safe = rates.clamp_min(1e-12)
    ratio = safe[1 : most + 1] / safe[:-1][:most]
    return [int(m) + 1 for m in ratio.argsort(descending=True)[:count]]


def proposal(
    model: SymmetrisedNetwork,
    found: tuple[Tensor, Tensor, Tensor],
    m: int,
    x: Float[Tensor, "n d"],
) -> SymmetrisedNetwork:
    """The network with the first m of the slow quantities, rounded where they are nearly whole.

    Args:
        model: whose network, scale, cap and measure are taken; the network is copied.
        found: rates, A and b from `slow_quantities`.
        m: how many.
        x: states of the data.

    Raises:
        ValueError: a model without quadratic quantities.
    """
    like, times = model.conserved, model.times
    if not isinstance(like, Quadratic) or times is None:
        raise ValueError("expected a model with quadratic quantities on offer, got none")
    own = FlowTimes(m, times.measure, times.draws) if m > 1 else FlowTimes(1, "cube", "quasi")
    length = LENGTH * typical_size(x) / (like.scale * own.variance**0.5 * m**0.5)
    made = Quadratic(x.shape[1], m, scale=like.scale, norm_cap=like.norm_cap)
    with torch.no_grad():
        made.A_raw.copy_(length * found[1][:m])
        made.b.copy_(length * found[2][:m])
    network = copy.deepcopy(model.network)
    free = SymmetrisedNetwork(network, made.to(like.b).requires_grad_(False), own)
    simple = simplified(free)
    if simple is None or simple.conserved is None:
        return free
    simple.conserved.requires_grad_(False)
    return simple.to(like.b.device)


def train_and_judge(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train without quantities, try what is nearly conserved, train again with what wins.

    The burn-in share of the steps goes to the network without quantities, a half of the rest to
    each trial that starts from it. Then the quantities of the winner are looked for once more, in
    its own averaged energy, and a fresh network is trained with them for all steps.

    Args:
        model: a network and as many quadratic quantities as may be proposed, whose values are not
            used; not changed.
        data: transitions.
        config: options.
        progress: called with each record.

    Returns:
        The last training; its history and time are those of all, and `trials` says what was tried.
    """
    config = config or TrainConfig()
    fresh = copy.deepcopy(model.network)
    model = copy.deepcopy(model).to(config.device)
    parts = PROPOSALS + 3
    tell = [None if progress is None else shifted(progress, k, parts) for k in range(parts)]
    minutes = None if config.minutes is None else config.minutes / parts
    short = config.change(
        steps=max(1, round(config.burn_in * config.steps)), minutes=minutes, burn_in=0.0
    )
    first = train(SymmetrisedNetwork(model.network), data, short, tell[0])
    found = slow_quantities(SymmetrisedNetwork(model.network), data.x)
    most = min(_offered(model), len(found[0]) - 1)
    trial = short.change(steps=max(1, round((1 - config.burn_in) * config.steps / 2)))
    tries = [SymmetrisedNetwork(copy.deepcopy(model.network))]
    tries += [proposal(model, found, m, data.x) for m in jumps(found[0], most)]
    trials = [_try(m, data, trial, tell[1 + k]) for k, m in enumerate(tries)]
    best = min(trials, key=lambda t: t.cost)
    final = _again(best, model, data.x, fresh)
    last = train(final, data, config.change(minutes=minutes, burn_in=0.0), tell[-1])
    return _summed(first, trials, last)


def _offered(model: SymmetrisedNetwork) -> int:
    return 0 if model.conserved is None else model.conserved.count


def _try(
    model: SymmetrisedNetwork, data: Transitions, config: TrainConfig, tell: Progress | None
) -> Trial:
    """Train a proposal; one whose flows overflow has lost."""
    conserved = model.conserved
    count = 0 if conserved is None else conserved.count
    rounded = isinstance(conserved, WithinSpan)
    try:
        trained = train(model, data, config, tell)
    except FloatingPointError:
        return Trial(count, rounded, math.inf, None)
    cost = trained.bound["neg_elbo"] * len(data)
    if isinstance(conserved, Quadratic) and not rounded:
        cost += worth(conserved, len(data))
    return Trial(count, rounded, cost if math.isfinite(cost) else math.inf, trained)


def _again(
    best: Trial, like: SymmetrisedNetwork, x: Float[Tensor, "n d"], fresh: HamiltonianNetwork
) -> SymmetrisedNetwork:
    """A fresh network with the quantities of the winner, seen more sharply in its own energy."""
    if best.count == 0 or best.trained is None:
        return SymmetrisedNetwork(fresh)
    won = best.trained.model
    if not best.rounded:
        won = proposal(like, slow_quantities(won, x), best.count, x)
    return SymmetrisedNetwork(fresh, won.conserved, won.times)


def _summed(first: Trained, trials: list[Trial], last: Trained) -> Trained:
    """The last training, with the records and the time of all."""
    before = first
    for trial in trials:
        if trial.trained is not None:
            before = continued(before, trial.trained)
    done = continued(before, last)
    done.trials = [
        {"quantities": t.count, "rounded": float(t.rounded), "cost": t.cost} for t in trials
    ]
    return done
