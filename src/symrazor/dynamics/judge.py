r"""Propose conserved quantities, and let the evidence judge them.

A network that was trained without quantities shows what it nearly conserves. The first m of these
are a proposal wherever the rate jumps from the m-th to the next (`Proposals`). Every proposal is
put into the average with flows about as long as the states and held there: a symmetry of the data
then costs no fit and saves weights, and anything else ruins the fit. With free lengths the bound
would also like short flows across the dynamics, which only smooth the energy. Nor is a proposal
taken that does not pay for its coefficients. Only then are other lengths tried for the winner,
twice as long and free.
"""

import copy
import math
from dataclasses import dataclass

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.proposals import Proposals, charge, is_rounded
from symrazor.dynamics.prune import continued, shifted
from symrazor.dynamics.simple import WithinSpan
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import Progress, Trained, train
from symrazor.dynamics.trajectories import Transitions

PROPOSALS = 2
"""How many numbers of quantities are tried, beside none."""


@dataclass
class Trial:
    r"""A proposal and what the evidence said.

    Args:
        cost: nats, $-\mathrm{ELBO}$ and a charge for free coefficients; infinite where it diverged.
        model: what was tried.
        trained: the result, unless it diverged.
    """

    cost: float
    model: SymmetrisedNetwork
    trained: Trained | None

    @property
    def count(self) -> int:
        """m, quantities proposed; 0 for none."""
        return 0 if self.model.conserved is None else self.model.conserved.count


def train_and_judge(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train without quantities, try what is nearly conserved, train again with what wins.

    The burn-in share of the steps goes to the network without quantities, half of the rest to
    each trial that starts from it: none, `PROPOSALS` proposals, and the winner with flows of twice
    the length and of free lengths. Then a fresh network is trained with the best for all steps.

    Args:
        model: a network and as many quantities as may be proposed, `Quadratic` or `Combination`,
            whose values are not used; not changed.
        data: transitions.
        config: options.
        progress: called with each record.

    Returns:
        The last training; its history and time are those of all, and `trials` says what was tried.
    """
    config = config or TrainConfig()
    parts = PROPOSALS + 5
    tell = [None if progress is None else shifted(progress, k, parts) for k in range(parts)]
    minutes = None if config.minutes is None else config.minutes / parts
    short = config.change(
        steps=max(1, round(config.burn_in * config.steps)), minutes=minutes, burn_in=0.0
    )
    offered = copy.deepcopy(model).to(config.device)
    plain = SymmetrisedNetwork(offered.network)
    first = train(plain, data, short, tell[0])
    trial = short.change(steps=max(1, round((1 - config.burn_in) * config.steps / 2)))
    found = Proposals(offered, plain, data.x)
    tries = [plain, *(found.first(m) for m in found.jumps(PROPOSALS))]
    trials = [_try(m, data, trial, tell[1 + k]) for k, m in enumerate(tries)]
    best = min(trials, key=lambda t: t.cost)
    for number in (-3, -2):
        other = _other_length(best, offered, free=number == -2)
        if other is not None:
            trials.append(_try(other, data, trial, tell[number]))
            best = min(best, trials[-1], key=lambda t: t.cost)
    final = _again(best, offered, model, data)
    last = train(final, data, config.change(minutes=minutes, burn_in=0.0), tell[-1])
    return _summed(first, trials, last)


def _try(
    model: SymmetrisedNetwork, data: Transitions, config: TrainConfig, tell: Progress | None
) -> Trial:
    """Train a proposal with a copy of its network; one whose flows overflow has lost."""
    own = SymmetrisedNetwork(copy.deepcopy(model.network), model.conserved, model.times)
    try:
        trained = train(own, data, config, tell)
    except FloatingPointError:
        return Trial(math.inf, own, None)
    cost = trained.bound["neg_elbo"] * len(data) + charge(own.conserved, len(data))
    return Trial(cost if math.isfinite(cost) else math.inf, own, trained)


def _other_length(
    best: Trial, offered: SymmetrisedNetwork, free: bool
) -> SymmetrisedNetwork | None:
    """The rounded quantities of a trial with free lengths, or with twice its lengths."""
    conserved = copy.deepcopy(best.model.conserved)
    if not isinstance(conserved, WithinSpan):
        return None
    if not free:
        conserved.mix.data.mul_(2.0)
    conserved.requires_grad_(free)
    return SymmetrisedNetwork(offered.network, conserved, best.model.times)


def _again(
    best: Trial, offered: SymmetrisedNetwork, given: SymmetrisedNetwork, data: Transitions
) -> SymmetrisedNetwork:
    """A fresh network with the winner's quantities, looked for once more if they are not whole."""
    won = best.model
    if won.conserved is not None and not is_rounded(won.conserved):
        won = Proposals(offered, won, data.x).first(best.count)
    fresh = SymmetrisedNetwork(copy.deepcopy(given.network), won.conserved, won.times)
    if fresh.conserved is not None:
        fresh.conserved.requires_grad_(False)
    return fresh


def _summed(first: Trained, trials: list[Trial], last: Trained) -> Trained:
    """The last training, with the records and the time of all."""
    before = first
    for trial in trials:
        if trial.trained is not None:
            before = continued(before, trial.trained)
    done = continued(before, last)
    done.trials = [
        {"quantities": t.count, "rounded": float(is_rounded(t.model.conserved)), "cost": t.cost}
        for t in trials
    ]
    return done
