r"""Select among trials of models with different conserved quantities.

The cost of a trial is $-\mathrm{ELBO}$ plus the cost of free coefficients. It is
estimated from draws of the weights and has a standard error. Two costs within
`TIE_STANDARD_ERRORS` of their combined error are a tie. (Errors are combined as if independent.
They are positively correlated, because all trials use the same draws, so ties are declared rather
too often than too rarely.)

Integer coefficients are a separate candidate. They are rejected if learned coefficients of the same
number of quantities have a lower cost, charge included. If the two tie in short trials, the groups
of both are trained in full.

Among the other trials with the same number of quantities, the full group wins a tie against flows
of finite length: only the average over the full group has the symmetry exactly. Learned
coefficients also have a group.

Among different numbers of quantities, a tie goes to integer coefficients that are closed under the
Poisson bracket: the bracket of two conserved quantities is conserved, so a span that is not closed
is incomplete. Otherwise, and against no quantities at all, the lowest cost wins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from symrazor.dynamics.algebra import CLOSURE_TOLERANCE, GroupOrbits, closure, generators
from symrazor.dynamics.conserved import FixedSpan
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.trained import Record, Trained

TIE_STANDARD_ERRORS = 3.0
"""Two costs within this many standard errors of their difference are a tie."""
MAX_DEFICIT_PER_DATUM = 0.2
"""Nats per datum by which a trial may lose to no quantities and still be trained in full."""


@dataclass
class Trial:
    r"""A candidate model and its cost.

    Args:
        cost: $-\mathrm{ELBO}$ plus the cost of free coefficients, in nats; infinite if it diverged.
        model: the candidate.
        trained: the result, None if it diverged.
        error: standard error of the cost.
    """

    cost: float
    model: SymmetrisedNetwork
    trained: Trained | None
    error: float = 0.0

    @property
    def count(self) -> int:
        """Number of conserved quantities."""
        return 0 if self.model.conserved is None else self.model.conserved.count

    @property
    def is_rounded(self) -> bool:
        """Whether the coefficients are integers, or halves."""
        return self.model.conserved is not None and self.model.conserved.rounded

    @property
    def has_group(self) -> bool:
        """Whether the network is averaged over a full group."""
        return isinstance(self.model.conserved, GroupOrbits)

    @property
    def is_closed(self) -> bool:
        """Whether it has quantities with integer coefficients that are closed under brackets."""
        conserved = self.model.conserved
        if not isinstance(conserved, FixedSpan):
            return False
        basis = generators(conserved.A_basis, conserved.b_basis)
        return closure(basis).outside <= CLOSURE_TOLERANCE

    def ties_with(self, other: "Trial") -> bool:
        """Return whether the difference of two costs is within their standard errors."""
        if self.cost == other.cost:
            return True
        gap = abs(self.cost - other.cost)
        return gap < math.inf and gap <= TIE_STANDARD_ERRORS * math.hypot(self.error, other.error)

    def to_record(self) -> Record:
        """Return plain numbers; only costs of trials with equal "steps" are comparable."""
        return {
            "quantities": self.count,
            "rounded": float(self.is_rounded),
            "group": float(self.has_group),
            "steps": 0 if self.trained is None else self.trained.config.steps,
            "cost": self.cost,
            "error": self.error,
        }


def select_trial(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the lowest cost, or the preferred one among ties (see the module)."""
    trials = [trial for trial in trials if is_supported(trial, trials)]
    best = min(trials, key=lambda t: t.cost)
    tied = [t for t in trials if t.ties_with(best)]
    if best.count and not best.is_closed and any(t.is_closed for t in tied):
        best = min((t for t in tied if t.is_closed), key=lambda t: t.cost)
        tied = [t for t in tied if t.ties_with(best)]
    return min((t for t in tied if t.count == best.count), key=lambda t: (not t.has_group, t.cost))


def is_supported(trial: Trial, trials: Sequence[Trial]) -> bool:
    """Return False for rounded coefficients if learned ones of as many quantities cost less."""
    estimates = [t for t in trials if t.count == trial.count and not t.is_rounded]
    return not trial.is_rounded or all(trial.cost <= t.cost for t in estimates)


def finalist(trials: Sequence[Trial], winner: Trial, n_data: int) -> Trial | None:
    """Return the trial whose quantities are trained in full, or None.

    It is the winner, or the best trial with quantities if it loses narrowly to a network without: a
    network with flows takes more steps to reach its bound, so short trials favour no quantities.
    All trials must have equally many steps.
    """
    if winner.count:
        return winner
    others = [t for t in trials if t.count and t.trained is not None]
    if not others:
        return None
    best = select_trial(others)
    return best if best.cost - winner.cost < MAX_DEFICIT_PER_DATUM * n_data else None


def rounded_rival(trials: Sequence[Trial], candidate: Trial) -> Trial | None:
    """Return the best trial with as many rounded quantities if it ties with the candidate."""
    rivals = [t for t in trials if t.count == candidate.count and t.is_rounded and t.trained]
    best = min(rivals, key=lambda t: t.cost, default=candidate)
    return best if best is not candidate and best.ties_with(candidate) else None
