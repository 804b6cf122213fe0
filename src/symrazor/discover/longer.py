"""After the comparison: which network gets the rest of the time, and how many passes that makes."""

import math
from dataclasses import dataclass

from symrazor.discover.answer import Answer, Candidate, separated
from symrazor.discover.budget import LEAST_DATA, Cost, batch_size

COMPARING = 1 / 3
"""Part of the time in which the candidates are compared."""
SAFETY = 0.95
"""Part of the rest that is planned; the cost is known from the comparison."""
FEWEST = 3
"""Passes below which fewer data are used."""
STEPS, MOST_EPOCHS = 10_000, 1000
"""Passes at most: as many as make `STEPS` steps, but 100 in any case, and never more than these."""

RISING = 0.25
"""A gap of which so much was made good at the last evidence step alone is not settled yet."""


@dataclass(frozen=True)
class Longer:
    """A network, its passes and its data."""

    name: str
    epochs: int
    data: int

    @property
    def steps(self) -> int:
        """Of training."""
        return self.epochs * math.ceil(self.data / batch_size(self.data))


def rise(candidate: Candidate) -> float:
    """Nats that the evidence gained at its last step; 0 if it fell or was measured once."""
    values = [r["log_evidence"] for r in candidate.fit.history if "log_evidence" in r]
    return max(0.0, values[-1] - values[-2]) if len(values) > 1 else 0.0


def unsettled(found: Answer) -> Candidate | None:
    """A network that may still overtake the best one, which is neither learned nor symmetric."""
    best, names = found.best, (found.family.learned, found.family.simplest)
    behind = [c for c in found.candidates if c.name in names and best.name not in names]
    rising = [c for c in behind if rise(c) > RISING * (best.log_evidence - c.log_evidence)]
    return max(rising, key=lambda c: c.log_evidence, default=None)


def winner(found: Answer, early: bool = False) -> str:
    """Name of the structure to train on.

    The one with the highest evidence. Where that is the relaxed one and all its layers kept their
    symmetry, or where the evidence does not separate the two, the one that has the symmetry built
    in. Where the comparison came too early, only these two are considered.
    """
    learned, simplest = found.family.learned, found.family.simplest
    known = [c for c in found.candidates if not early or c.name in (learned, simplest)]
    best = (known or found.candidates)[0]
    if best.name != learned or simplest not in [c.name for c in known]:
        return best.name
    layers = [layer for layer in best.fit.reading.layers if layer.relaxed]
    kept = found.symmetric and all(layer.kind == "equivariant" for layer in layers)
    near = not separated(best, found.named(simplest))
    return simplest if kept or (near and (found.symmetric or early)) else best.name


def longer_plan(name: str, cost: Cost, n: int, seconds: float) -> Longer | None:
    """As many passes as fit; fewer data if not even three fit; None if not one pass fits."""
    limit = SAFETY * seconds
    data = n
    while data > min(n, LEAST_DATA) and cost.total(data, FEWEST) > limit:
        data = max(min(n, LEAST_DATA), int(0.9 * data))
    most = min(MOST_EPOCHS, max(100, math.ceil(STEPS * batch_size(data) / data)))
    epochs = max((e for e in range(1, most + 1) if cost.total(data, e) <= limit), default=0)
    return Longer(name, epochs, data) if epochs else None
