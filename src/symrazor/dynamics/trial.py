r"""Trials of conserved quantities, and the one rule by which they are decided.

The cost of a trial is an estimate, from a number of draws of the weights, and has a standard error.
Two costs that are nearer than `ERRORS` of these together are a tie. (The errors are added as if
they were independent. Draws are the same for all, and the estimates of networks from one seed rise
and fall together, with a correlation of 0.4 for two oscillators: in doubt, a tie.) Of trials with
equally many quantities a tie goes to the more exact one: the whole group rather than flows of the
length of the states, and these with whole coefficients rather than with learned ones. There are
three reasons:

- The three have the same span, or nearly so. What differs is how far the energy is averaged, and
  only the average over the whole group has the symmetry exactly: what a shorter one leaves is seen
  in the error on new data.
- Learned coefficients and lengths can fit noise; whole coefficients and periods cannot.
- The least cost would be a coin toss: with other draws of the weights the other might win.

Between different numbers of quantities a tie goes to whole ones that close under the Poisson
bracket, if there are such: the bracket of two conserved quantities is conserved, so a span that
does not close cannot be all of the truth. (Six of the seven quantities of three bodies once won by
565 nats with an error of 634, and generate no group.) Else, and against none, the cost alone
decides: a tie is no reason to believe in more symmetry, nor in less.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from symrazor.dynamics.algebra import generators
from symrazor.dynamics.analysis import closure
from symrazor.dynamics.conserved import FixedSpan
from symrazor.dynamics.group import CLOSED, GroupOrbits
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.proposals import is_rounded
from symrazor.dynamics.trained import Record, Trained

ERRORS = 3.0
"""Standard errors within which two costs are the same."""
NARROW = 0.2
"""Nats per datum by which a proposal may lose a short trial and still be trained in full."""


@dataclass
class Trial:
    r"""A proposal and what the evidence said.

    Args:
        cost: nats, $-\mathrm{ELBO}$ and a charge for free coefficients; infinite where it diverged.
        model: what was tried.
        trained: the result, unless it diverged.
        error: standard error of the cost.
    """

    cost: float
    model: SymmetrisedNetwork
    trained: Trained | None
    error: float = 0.0

    @property
    def count(self) -> int:
        """m, quantities proposed; 0 for none."""
        return 0 if self.model.conserved is None else self.model.conserved.count

    @property
    def exactness(self) -> int:
        """2 for a whole group, 1 for whole coefficients, 0 for learned ones."""
        conserved = self.model.conserved
        return 2 if isinstance(conserved, GroupOrbits) else int(is_rounded(conserved))

    @property
    def closes(self) -> bool:
        """Whether there are quantities with whole coefficients, and their brackets are among them.

        These generate a group.
        """
        conserved = self.model.conserved
        if not isinstance(conserved, FixedSpan):
            return False
        return closure(generators(conserved.A_basis, conserved.b_basis)).outside <= CLOSED

    def ties(self, other: "Trial") -> bool:
        """Whether the errors of two costs are too large to tell them apart."""
        if self.cost == other.cost:
            return True
        gap = abs(self.cost - other.cost)
        return gap < math.inf and gap <= ERRORS * math.hypot(self.error, other.error)

    def to_record(self) -> Record:
        """Plain numbers; costs compare among trials of as many steps, 0 where it diverged."""
        return {
            "quantities": self.count,
            "rounded": float(self.exactness > 0),
            "group": float(self.exactness > 1),
            "steps": 0 if self.trained is None else self.trained.config.steps,
            "cost": self.cost,
            "error": self.error,
        }


def decide(trials: Sequence[Trial]) -> Trial:
    """The least cost, or who ties with it and is preferred, as told above."""
    best = min(trials, key=lambda t: t.cost)
    tied = [t for t in trials if t.ties(best)]
    if best.count and not best.closes and any(t.closes for t in tied):
        best = min((t for t in tied if t.closes), key=lambda t: t.cost)
        tied = [t for t in tied if t.ties(best)]
    return min((t for t in tied if t.count == best.count), key=lambda t: (-t.exactness, t.cost))


def entrant(trials: Sequence[Trial], winner: Trial, n_data: int) -> Trial | None:
    """The trial with quantities that is trained in full: the winner, or who lost narrowly to none.

    With flows a network takes more steps until its weights are worth less: short trials favour
    none.

    Args:
        trials: all of them, of one length.
        winner: `decide(trials)`.
        n_data: transitions they were trained on.
    """
    if winner.count:
        return winner
    others = [t for t in trials if t.count and t.trained is not None]
    best = decide(others) if others else None
    return best if best is not None and best.cost - winner.cost < NARROW * n_data else None


def with_whole_coefficients(trials: Sequence[Trial], winner: Trial) -> Trial:
    """The best trial of as many quantities with whole coefficients; the winner if there is none.

    Their group may be better in the end even where learned coefficients won a short trial.
    """
    whole = [t for t in trials if t.count == winner.count and t.trained and t.exactness > 0]
    return min(whole, key=lambda t: t.cost, default=winner)
