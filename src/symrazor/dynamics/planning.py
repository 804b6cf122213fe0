"""How many steps each training of a judged run takes."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.training import seconds_per_step
from symrazor.dynamics.trajectories import Transitions

FIRST_LOOK = 2
"""How many numbers of quantities are tried that the network without quantities proposes."""
PROPOSALS = FIRST_LOOK + 1
"""How many are tried in all, beside none: one more after a look at the winner."""
TRIALS = 3
"""Of a number of quantities at most: rounded, free, and rounded after that."""
SLACK = 0.75
"""Share of the time that is planned: what is not steps takes time too."""
FIRST, TRYING = 0.2, 0.4
"""Shares of the time for the network without quantities, and for the trials."""


@dataclass(frozen=True)
class Plan:
    """Steps of the training without quantities, of a trial, and of each of the last trainings."""

    first: int
    trial: int
    last: int

    def within(self, seconds: float, each: float, trainings: int, most: int) -> "Plan":
        """The same with as many last steps as fit into the seconds, at least those of a trial."""
        fit = int(SLACK * seconds / (trainings * each))
        return replace(self, last=max(self.trial, min(most, fit)))


def kept(journal: Journal | None, name: str, make: Callable[[], Plan]) -> Plan:
    """A plan, the same one after the run was stopped: it depends on how fast the machine was."""
    if journal is None:
        return make()
    return Plan(*journal.remember(name, lambda: list(astuple(make()))))


def planned(model: SymmetrisedNetwork, data: Transitions, config: TrainConfig) -> Plan:
    """By shares of the steps; with a time, by shares of it, and no more than that."""
    share, steps = config.burn_in, config.steps
    plan = Plan(max(1, round(share * steps)), max(1, round((1 - share) / 2 * steps)), max(1, steps))
    if config.minutes is None:
        return plan
    plain = seconds_per_step(SymmetrisedNetwork(model.network), data, config)
    flows = seconds_per_step(model, data, config)
    seconds = SLACK * 60 * config.minutes
    first = int(FIRST * seconds / plain)
    trial = int(TRYING * seconds / (plain + PROPOSALS * TRIALS * flows))
    last = int((1 - FIRST - TRYING) * seconds / (2 * flows))
    return Plan(
        max(1, min(plan.first, first)),
        max(1, min(plan.trial, trial)),
        max(1, min(plan.last, last)),
    )
