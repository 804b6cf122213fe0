r"""Selection of conserved quantities by the evidence.

`train_and_select` proceeds as follows.

1. Train a network without conserved quantities.
2. Propose the first m quantities that it changes least, at the two counts m with the largest gaps
   between consecutive rates (`Proposals`).
3. Train a short trial with each proposal, and one without. Flows are about as long as the states:
   at that length a symmetry of the data costs no fit and saves weights, and anything else ruins the
   fit. (With free flow lengths the bound also rewards short flows across the dynamics, which only
   smooth the energy.) The span of a proposal is learned (`FreeSpan`) and pays for its coefficients;
   a nearby span with integer coefficients is tried too, and pays nothing.
4. Propose one more count from the dynamics of the best trial.
5. Train fresh networks in full: with the selected quantities, and with the group that they generate
   if they are closed under the Poisson bracket (`symrazor.dynamics.algebra`).
6. Select among these (`symrazor.dynamics.trials`).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch

from symrazor.dynamics.algebra import full_group, generators
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.proposals import Proposals, coefficient_cost, round_quantities
from symrazor.dynamics.trained import Record, Trained
from symrazor.dynamics.training import Progress, seconds_per_step, train
from symrazor.dynamics.trajectories import Transitions
from symrazor.dynamics.trials import Trial, finalist, rounded_rival, select_trial
from symrazor.training.loop import clock

INITIAL_PROPOSALS = 2
"""Counts of quantities proposed by the network without quantities."""
PROPOSALS = INITIAL_PROPOSALS + 1
"""Counts of quantities that are tried: one more is proposed by the best trial."""
TRIALS_PER_PROPOSAL = 3
"""Trials per count, at most: rounded, learned, and rounded after learning."""
PLANNED_TIME_FRACTION = 0.75
"""Fraction of the time that is planned; the rest is for everything but training steps."""
FIRST_TIME_FRACTION, TRIALS_TIME_FRACTION = 0.2, 0.4
"""Fractions of the planned time for the network without quantities and for all trials."""


def train_and_select(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> Trained:
    """Train a Hamiltonian network with the conserved quantities that the evidence selects.

    The burn-in fraction of the steps goes to the network without quantities, and half of the rest
    to each trial. The final networks are trained for all steps. With `minutes`, the steps are
    reduced to fit.

    Args:
        model: a network, and as many quantities (`Quadratic` or `Combination`) as may be proposed;
            their values are not used. Not changed.
        data: transitions.
        config: options.
        progress: called with each record.
        journal: keeps checkpoints; the same call continues an interrupted run.

    Returns:
        The best of the final networks, or the best trial if there was no time for more. History
        and time include all trainings; `trials` lists the candidates.

    Raises:
        FloatingPointError: no training of the selected model succeeded.
    """
    config = config or TrainConfig()
    started = clock.now() - (journal.seconds if journal else 0.0)
    plan = _journalled(journal, "plan", lambda: plan_steps(model, data, config))
    report = _ProgressReport(progress, plan.total)
    untimed = config.change(minutes=None, burn_in=0.0)
    template = copy.deepcopy(model).to(config.device)
    plain = SymmetrisedNetwork(template.network)
    first = train(plain, data, untimed.change(steps=plan.first), report.stage(plan.first), journal)
    proposals = Proposals(template, plain, data.x)
    trials = _TrialRunner(data, untimed.change(steps=plan.trial), report, journal)
    trials.run(plain)
    for m in proposals.best_counts(INITIAL_PROPOSALS):
        trials.run_proposal(proposals.model_with(m))
    _propose_from_winner(trials, template)
    winner = select_trial(trials.done)
    report.done = report.total - 2 * plan.last  # some trials may not have taken place
    candidate = finalist(trials.done, winner, len(data))
    models = [] if candidate is None else _final_models(trials.done, candidate, model, data)
    if winner.count == 0:
        models.append(SymmetrisedNetwork(model.network))
    timed = (candidate or winner).trained  # its speed tells how many final steps fit
    if config.minutes is not None and timed is not None:
        seconds_left = 60 * config.minutes - (clock.now() - started)
        per_step = timed.seconds / plan.trial
        fits = int(PLANNED_TIME_FRACTION * seconds_left / (len(models) * per_step))
        final_plan = plan._replace(last=max(plan.trial, min(config.steps, fits)))
        plan = _journalled(journal, "last", lambda: final_plan)
    finals = _TrialRunner(data, untimed.change(steps=plan.last), report, journal)
    for number, final in enumerate(models):
        finals.run(final, (report.total - report.done) / (len(models) - number))
    return _combine(first, trials.done, finals.done, winner)


@dataclass
class _ProgressReport:
    """Maps the progress of several trainings to one fraction; `total` in steps."""

    progress: Progress | None
    total: float
    done: float = 0.0

    def stage(self, width: float) -> Progress | None:
        """Return the callback of the next training, which covers `width` steps of the total."""
        start, self.done = self.done, self.done + width
        callback = self.progress
        if callback is None:
            return None

        def report(record: Record) -> None:
            share = (start + width * record["share"]) / self.total
            callback(record | {"share": min(1.0, share)})

        return report


@dataclass
class _TrialRunner:
    """Trains candidates with the same options, each with a copy of its network."""

    data: Transitions
    config: TrainConfig
    report: _ProgressReport
    journal: Journal | None = None
    done: list[Trial] = field(default_factory=list)

    def run(self, model: SymmetrisedNetwork, width: float | None = None) -> Trial:
        """Train one candidate; a training that diverges has infinite cost."""
        candidate = SymmetrisedNetwork(copy.deepcopy(model.network), model.conserved, model.times)
        progress = self.report.stage(self.config.steps if width is None else width)
        n = len(self.data)
        trial = Trial(math.inf, candidate, None)
        try:
            trained = train(candidate, self.data, self.config, progress, self.journal)
            cost = trained.bound["neg_elbo"] * n + coefficient_cost(candidate.conserved, n)
            cost = cost if math.isfinite(cost) else math.inf
            trial = Trial(cost, candidate, trained, trained.bound["error"] * n)
        except FloatingPointError:
            pass
        self.done.append(trial)
        return trial

    def run_proposal(self, free: SymmetrisedNetwork) -> None:
        """Try a proposal rounded, learned, and rounded again after learning."""
        rounded = round_quantities(free)
        if rounded is not None:
            self.run(rounded)
        if rounded is not None and not isinstance(free.conserved, Quadratic):
            return  # numerically integrated flows are expensive: one trial is enough
        learned = self.run(free)
        rounded_after = None if learned.trained is None else round_quantities(learned.model)
        if rounded_after is not None and not _same_span(rounded_after, rounded):
            self.run(SymmetrisedNetwork(free.network, rounded_after.conserved, rounded_after.times))


def _propose_from_winner(trials: _TrialRunner, template: SymmetrisedNetwork) -> None:
    """Try one more count, proposed by the dynamics of the best trial so far.

    These are closer to the truth than those of the first network, so further conserved quantities
    stand out. Left out for numerically integrated flows, whose trials are expensive.
    """
    if not isinstance(template.conserved, Quadratic):
        return
    winner = select_trial(trials.done)
    proposals = Proposals(template, winner.model, trials.data.x)
    m = proposals.next_count(winner.count, {trial.count for trial in trials.done})
    if m is not None:
        trials.run_proposal(proposals.model_with(m))


def _same_span(model: SymmetrisedNetwork, other: SymmetrisedNetwork | None) -> bool:
    """Return whether two models have quantities with the same span."""
    if other is None:
        return False
    a, b = model.conserved, other.conserved
    if not isinstance(a, Quadratic) or not isinstance(b, Quadratic):
        return True
    stacked = torch.cat([generators(q.A, q.b).flatten(1) for q in (a, b)])
    return int(torch.linalg.matrix_rank(stacked, rtol=1e-5)) == a.count


def _final_models(
    trials: Sequence[Trial], candidate: Trial, initial: SymmetrisedNetwork, data: Transitions
) -> list[SymmetrisedNetwork]:
    """Return fresh networks with the quantities of a trial, and with the group they generate.

    If integer and learned coefficients tie in the trials, the groups of both are trained in full.
    """
    models = [_with_frozen_quantities(candidate, initial)]
    for trial in (candidate, rounded_rival(trials, candidate)):
        if trial is not None:
            group = full_group(_with_frozen_quantities(trial, initial), data.x)
            if group is not None:
                models.append(SymmetrisedNetwork(initial.network, *group))
    return models


def _with_frozen_quantities(trial: Trial, initial: SymmetrisedNetwork) -> SymmetrisedNetwork:
    """Return the initial network with the quantities of a trial, which are frozen."""
    conserved = trial.model.conserved
    if conserved is not None:
        conserved.requires_grad_(False)
    return SymmetrisedNetwork(initial.network, conserved, trial.model.times)


def _combine(first: Trained, trials: list[Trial], finals: list[Trial], winner: Trial) -> Trained:
    """Return the best of the final networks and the winning trial, with the history of all."""
    best = select_trial((*finals, winner))
    if best.trained is None:
        raise FloatingPointError(
            f"All {len(finals)} trainings with {best.count} conserved quantities diverged. Lower "
            "lr, or scale the states to about 1."
        )
    if best is winner:
        best.trained.plain = trials[0].trained
    others = [t.trained for t in (*trials, *finals) if t is not best and t.trained is not None]
    result = reduce(_append_history, [first, *others, best.trained])
    result.trials = [t.to_record() for t in (*trials, *finals)]
    return result


def _append_history(first: Trained, second: Trained) -> Trained:
    """Return the second training with the history and time of both; records are not changed."""
    last = first.history[-1]
    later = [
        {**record, **{key: record[key] + last[key] for key in ("step", "seconds")}}
        for record in second.history
    ]
    second.history = first.history + later
    second.seconds += first.seconds
    second.skipped += first.skipped
    return second


class Plan(NamedTuple):
    """Number of steps of the network without quantities, of each trial, of each final network."""

    first: int
    trial: int
    last: int

    @property
    def total(self) -> int:
        """Steps of all trainings, at most."""
        trials = 1 + PROPOSALS * TRIALS_PER_PROPOSAL
        return self.first + self.trial * trials + 2 * self.last


def plan_steps(model: SymmetrisedNetwork, data: Transitions, config: TrainConfig) -> Plan:
    """Divide the steps among the trainings; with `minutes`, take no more than fit in the time."""
    burn_in, steps = config.burn_in, config.steps
    plan = Plan(round(burn_in * steps), round((1 - burn_in) / 2 * steps), steps)
    if config.minutes is not None:
        plain = seconds_per_step(SymmetrisedNetwork(model.network), data, config)
        flows = seconds_per_step(model, data, config)
        seconds = PLANNED_TIME_FRACTION * 60 * config.minutes
        trials_cost = plain + PROPOSALS * TRIALS_PER_PROPOSAL * flows
        last_fraction = 1 - FIRST_TIME_FRACTION - TRIALS_TIME_FRACTION
        plan = Plan(
            min(plan.first, int(FIRST_TIME_FRACTION * seconds / plain)),
            min(plan.trial, int(TRIALS_TIME_FRACTION * seconds / trials_cost)),
            min(plan.last, int(last_fraction * seconds / (2 * flows))),
        )
    return Plan(*(max(1, steps) for steps in plan))


def _journalled(journal: Journal | None, name: str, make: Callable[[], Plan]) -> Plan:
    """Return a plan, which a resumed run repeats although the machine's speed may differ."""
    if journal is None:
        return make()
    return Plan(*journal.remember(name, lambda: list(make())))
