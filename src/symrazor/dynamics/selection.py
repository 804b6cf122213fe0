r"""Propose conserved quantities, and let the evidence judge them.

A network that was trained without quantities shows what it nearly conserves. The first m of these
are a proposal where the rate jumps from the m-th to the next (`Proposals`), at the two steepest
jumps; then the winner so far is looked at for one more. Every proposal is put into the average with
flows about as long as the states, and trained at that length: a symmetry of the data then costs no
fit and saves weights, and anything else ruins the fit. With free lengths the bound would also like
short flows across the dynamics, which only smooth the energy. The span of a proposal is learned
(`FreeSpan`) and pays for its coefficients; it is also tried with whole ones, which are free of
charge, where it is near such. Then a fresh network is trained with the winner, and where its
quantities, made whole, close under the bracket another one with the group that they generate
(`symrazor.dynamics.group`); the evidence chooses again, by the same rule as among the trials
(`symrazor.dynamics.trial`).
"""

import copy
import math
import time
from dataclasses import dataclass, field

import torch

from symrazor.dynamics.algebra import generators
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.group import full_group
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.planning import FIRST_LOOK, PROPOSALS, TRIALS, kept, planned
from symrazor.dynamics.proposals import Proposals, charge, rounded
from symrazor.dynamics.trained import Trained
from symrazor.dynamics.training import Progress, train
from symrazor.dynamics.trajectories import Transitions
from symrazor.dynamics.trial import Trial, decide, entrant, with_whole_coefficients


def train_and_select(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> Trained:
    """Train without quantities, try what is nearly conserved, train again with what wins.

    The burn-in share of the steps goes to the network without quantities, half of the rest to
    each trial that starts from it: none, and up to three for each of `PROPOSALS` numbers of
    quantities, the last of which the winner among the others proposes. Then fresh networks are
    trained for all steps: with the best, and with the whole group that it generates, if it does;
    without, if that was best, and with who lost narrowly.
    With `minutes`, there are as many steps as fit.

    Args:
        model: a network and as many quantities as may be proposed, `Quadratic` or `Combination`,
            whose values are not used; not changed.
        data: transitions.
        config: options.
        progress: called with each record.
        journal: keeps checkpoints; the same call with it goes on where the last one was stopped.

    Returns:
        The best of the last trainings, or the trial that won where time was too short for more; its
        history and time are those of all, and `trials` says what was tried.
    """
    config = config or TrainConfig()
    started = time.monotonic() - (journal.seconds if journal else 0.0)
    plan = kept(journal, "plan", lambda: planned(model, data, config))
    told = _Told(progress, plan.first + plan.trial * (1 + PROPOSALS * TRIALS) + 2 * plan.last)
    whole = config.change(minutes=None, burn_in=0.0)
    offered = copy.deepcopy(model).to(config.device)
    plain = SymmetrisedNetwork(offered.network)
    first = train(plain, data, whole.change(steps=plan.first), told.next(plan.first), journal)
    found = Proposals(offered, plain, data.x)
    tried = _Trials(data, whole.change(steps=plan.trial), told, journal)
    tried.run(plain)
    for m in found.jumps(FIRST_LOOK):
        tried.propose(found.first(m))
    _look_again(tried, offered)
    winner = decide(tried.trials)
    told.skip_to(told.total - 2 * plan.last)
    enters = entrant(tried.trials, winner, len(data))
    last = [] if enters is None else _with_and_group(tried.trials, enters, model, data)
    if winner.count == 0:
        last.append(SymmetrisedNetwork(model.network))
    slowest = (enters or winner).trained
    if config.minutes is not None and slowest is not None:
        left = 60 * config.minutes - (time.monotonic() - started)
        each, now = slowest.seconds / plan.trial, plan
        plan = kept(journal, "last", lambda: now.within(left, each, len(last), config.steps))
    final = _Trials(data, whole.change(steps=plan.last), told, journal)
    for one in last:
        final.run(one, (told.total - told.done) / (len(last) - len(final.trials)))
    return _summed(first, tried.trials, final.trials, winner)


@dataclass
class _Told:
    """Progress over trainings of which not all may take place; `total` in steps."""

    progress: Progress | None
    total: float
    done: float = 0.0

    def next(self, width: float) -> Progress | None:
        """What the next training of so many steps calls."""
        start, self.done = self.done, self.done + width
        tell = self.progress
        if tell is None:
            return None
        return lambda r: tell(r | {"share": min(1.0, (start + width * r["share"]) / self.total)})

    def skip_to(self, done: float) -> None:
        """Leave out what does not take place."""
        self.done = done


@dataclass
class _Trials:
    """Trains proposals alike, each with a copy of its network."""

    data: Transitions
    config: TrainConfig
    told: _Told
    journal: Journal | None = None
    trials: list[Trial] = field(default_factory=list)

    def run(self, model: SymmetrisedNetwork, width: float | None = None) -> Trial:
        """Train one; flows that overflow have lost."""
        own = SymmetrisedNetwork(copy.deepcopy(model.network), model.conserved, model.times)
        tell = self.told.next(self.config.steps if width is None else width)
        n = len(self.data)
        try:
            trained = train(own, self.data, self.config, tell, self.journal)
        except FloatingPointError:
            self.trials.append(Trial(math.inf, own, None))
            return self.trials[-1]
        cost = trained.bound["neg_elbo"] * n + charge(own.conserved, n)
        cost = cost if math.isfinite(cost) else math.inf
        self.trials.append(Trial(cost, own, trained, trained.bound["error"] * n))
        return self.trials[-1]

    def propose(self, free: SymmetrisedNetwork) -> None:
        """Try quantities with whole coefficients, with learned ones, and those made whole."""
        whole = rounded(free)
        if whole is not None:
            self.run(whole)
        if whole is not None and not isinstance(free.conserved, Quadratic):
            return  # flows that are solved for: one trial is dear enough
        learned = self.run(free)
        again = None if learned.trained is None else rounded(learned.model)
        if again is not None and not _same(again, whole):
            self.run(SymmetrisedNetwork(free.network, again.conserved, again.times))


def _look_again(tried: _Trials, offered: SymmetrisedNetwork) -> None:
    """Try one more number of quantities: where the rates of the winner jump.

    With some of the quantities, or more steps, its dynamics are nearer to the truth than those of
    the network without any, and what is left to find stands out. Not where flows are solved for:
    trials of those are dear.
    """
    winner = decide(tried.trials)
    if not isinstance(offered.conserved, Quadratic):
        return
    found = Proposals(offered, winner.model, tried.data.x)
    m = found.beyond(winner.count, {trial.count for trial in tried.trials})
    if m is not None:
        tried.propose(found.first(m))


def _same(one: SymmetrisedNetwork, other: SymmetrisedNetwork | None) -> bool:
    """Whether two models have quantities with the same span."""
    if other is None:
        return False
    a, b = one.conserved, other.conserved
    if not isinstance(a, Quadratic) or not isinstance(b, Quadratic):
        return True
    both = torch.cat([generators(q.A, q.b).flatten(1) for q in (a, b)])
    return int(torch.linalg.matrix_rank(both, rtol=1e-5)) == a.count


def _with_and_group(
    trials: list[Trial], enters: Trial, given: SymmetrisedNetwork, data: Transitions
) -> list[SymmetrisedNetwork]:
    """Fresh networks with the quantities of a trial, and with the group that they generate."""
    whole = with_whole_coefficients(trials, enters)
    group = full_group(_held(whole, given), data.x)
    held = [_held(enters, given)]
    return held if group is None else [*held, SymmetrisedNetwork(given.network, *group)]


def _held(best: Trial, given: SymmetrisedNetwork) -> SymmetrisedNetwork:
    """A fresh network with the winner's quantities, held as they are."""
    won = best.model
    if won.conserved is not None:
        won.conserved.requires_grad_(False)
    return SymmetrisedNetwork(given.network, won.conserved, won.times)


def _summed(first: Trained, trials: list[Trial], finals: list[Trial], winner: Trial) -> Trained:
    """The best of the last trainings and the trial that won, with the records and time of all.

    Raises:
        FloatingPointError: none of them came to an end.
    """
    best = decide((*finals, winner))
    if best.trained is None:
        raise FloatingPointError(
            f"expected finite gradients with {best.count} quantities, got none in {len(finals)} "
            "trainings; do lower lr, or scale the states to about 1"
        )
    records = [t.to_record() for t in (*trials, *finals)]
    if best is winner:
        best.trained.plain = trials[0].trained
    done = first
    for trial in (*(t for t in (*trials, *finals) if t is not best), best):
        if trial.trained is not None:
            done = _continued(done, trial.trained)
    done.trials = records
    return done


def _continued(first: Trained, second: Trained) -> Trained:
    """The second training with the history and the time of both."""
    last = first.history[-1]
    for record in second.history:
        record["step"] += last["step"]
        record["seconds"] += last["seconds"]
    second.history = first.history + second.history
    second.seconds += first.seconds
    second.skipped += first.skipped
    return second
