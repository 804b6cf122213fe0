r"""Propose conserved quantities, and let the evidence judge them.

A network that was trained without quantities shows what it nearly conserves. The first m of these
are a proposal wherever the rate jumps from the m-th to the next (`Proposals`). Every proposal is
put into the average with flows about as long as the states and held there: a symmetry of the data
then costs no fit and saves weights, and anything else ruins the fit. With free lengths the bound
would also like short flows across the dynamics, which only smooth the energy. Nor is a proposal
taken that does not pay for its coefficients. Then a fresh network is trained with the winner, and
where its quantities close under the bracket another one with the whole group that they generate
(`symrazor.dynamics.group`); the evidence chooses again.
"""

import copy
import math
from dataclasses import dataclass

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.group import GroupOrbits, whole_group
from symrazor.dynamics.proposals import Proposals, charge, is_rounded
from symrazor.dynamics.prune import continued, shifted
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import Progress, Record, Trained, train
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

    def to_record(self) -> Record:
        """Plain numbers; costs compare among trials of as many steps, 0 where it diverged."""
        conserved = self.model.conserved
        return {
            "quantities": self.count,
            "rounded": float(is_rounded(conserved)),
            "group": float(isinstance(conserved, GroupOrbits)),
            "steps": 0 if self.trained is None else self.trained.config.steps,
            "cost": self.cost,
        }


def train_and_judge(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train without quantities, try what is nearly conserved, train again with what wins.

    The burn-in share of the steps goes to the network without quantities, half of the rest to
    each trial that starts from it: none, and `PROPOSALS` proposals. Then fresh networks are trained
    for all steps: with the best, and with the whole group that it generates, if it does.

    Args:
        model: a network and as many quantities as may be proposed, `Quadratic` or `Combination`,
            whose values are not used; not changed.
        data: transitions.
        config: options.
        progress: called with each record.

    Returns:
        The best of the last trainings; its history and time are those of all, and `trials` says
        what was tried.
    """
    config = config or TrainConfig()
    parts = PROPOSALS + 4
    tell = [None if progress is None else shifted(progress, k, parts) for k in range(parts)]
    minutes = None if config.minutes is None else config.minutes / parts
    whole = config.change(minutes=minutes, burn_in=0.0)
    offered = copy.deepcopy(model).to(config.device)
    plain = SymmetrisedNetwork(offered.network)
    first = train(plain, data, _part(whole, config.burn_in), tell[0])
    found = Proposals(offered, plain, data.x)
    tries = [plain, *(found.first(m) for m in found.jumps(PROPOSALS))]
    short = _part(whole, (1 - config.burn_in) / 2)
    trials = [_try(m, data, short, tell[1 + k]) for k, m in enumerate(tries)]
    best = _again(min(trials, key=lambda t: t.cost), offered, model, data)
    group = whole_group(best, data.x)
    finals = [_try(best, data, whole, tell[-1 if group is None else -2])]
    if group is not None:
        finals.append(_try(SymmetrisedNetwork(model.network, *group), data, whole, tell[-1]))
    return _summed(first, trials, finals)


def _part(config: TrainConfig, share: float) -> TrainConfig:
    """The same for a share of the steps."""
    return config.change(steps=max(1, round(share * config.steps)))


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


def _again(
    best: Trial, offered: SymmetrisedNetwork, given: SymmetrisedNetwork, data: Transitions
) -> SymmetrisedNetwork:
    """A fresh network with the winner's quantities, looked for once more if they are not whole."""
    won = best.model
    if won.conserved is not None and not is_rounded(won.conserved):
        won = Proposals(offered, won, data.x).first(best.count)
    fresh = SymmetrisedNetwork(given.network, won.conserved, won.times)
    if fresh.conserved is not None:
        fresh.conserved.requires_grad_(False)
    return fresh


def _summed(first: Trained, trials: list[Trial], finals: list[Trial]) -> Trained:
    """The best of the last trainings, with the records and the time of all.

    Raises:
        FloatingPointError: none of them came to an end.
    """
    best = min(finals, key=lambda t: t.cost)
    if best.trained is None:
        raise FloatingPointError(
            f"expected finite gradients with {best.count} quantities, got none in {len(finals)} "
            "trainings; do lower lr, or scale the states to about 1"
        )
    done = first
    for trial in (*trials, *(t for t in finals if t is not best), best):
        if trial.trained is not None:
            done = continued(done, trial.trained)
    done.trials = [t.to_record() for t in (*trials, *finals)]
    return done
