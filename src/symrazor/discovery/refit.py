"""After the comparison: which network gets the rest of the time, and how many passes that makes."""

import math
from dataclasses import dataclass, field

from symrazor.discovery.answer import Answer, Candidate, separated
from symrazor.discovery.budget import LEAST_DATA, SUBSET, Cost, batch_size
from symrazor.discovery.conditional_evidence import better, foremost
from symrazor.inference.razor import Razor

COMPARING, AT_MOST = 1 / 3, 0.55
"""Part of the time in which the candidates are compared; and where that makes too few steps."""
FEW = 400
"""Training steps below which a comparison comes too early, and a verdict says so."""
SAFETY = 0.95
"""Part of the rest that is planned; the cost is known from the comparison."""
FEWEST = 3
"""Passes below which fewer data are used."""
STEPS, MOST_EPOCHS = 10_000, 1000
"""Passes at most: as many as make `STEPS` steps, but 100 in any case, and never more than these."""

MEASURED, LEAST_MEASURED, MEASURING = 20, 6, 0.2
"""Evidence steps of the longer training: the prior has to keep up with the weights.

So many, if they take no more than this part of the time; but so many in any case.
"""
WORTH = 15
"""No precision starts above one for every so many data, or its weights would not learn."""

RISING = 0.25
"""A gap of which so much was made good at the last evidence step alone is not settled yet."""


@dataclass(frozen=True)
class Longer:
    """A network, its passes and its data, and the prior that it starts with.

    Args:
        name: of the structure.
        epochs: passes.
        data: how many.
        measured: evidence steps.
        precisions: prior group -> precision; without any, those of a new network.
    """

    name: str
    epochs: int
    data: int
    measured: int = MEASURED
    precisions: dict[str, float] = field(default_factory=dict)

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

    The one with the highest evidence, unless another one predicts training data that neither has
    seen clearly better (`unseen.foremost`). Where that is the relaxed one and all its layers kept
    their symmetry, or where it cannot be told from the one that has the symmetry built in, the
    latter. Where the comparison came too early, only these two are considered.
    """
    learned, simplest = found.family.learned, found.family.simplest
    known = [c for c in found.candidates if not early or c.name in (learned, simplest)]
    best = foremost(known or found.candidates)
    if best.name != learned or simplest not in [c.name for c in known]:
        return best.name
    layers = [layer for layer in best.fit.reading.layers if layer.relaxed]
    kept = found.symmetric and all(layer.kind == "equivariant" for layer in layers)
    plain = found.named(simplest)
    near = not separated(best, plain) and not better(best, plain)
    return simplest if kept or (near and (found.symmetric or early)) else best.name


def learned_precisions(razor: Razor, n: int) -> dict[str, float]:
    """Where the prior of a training on n data starts that follows another one.

    A precision says how large weights are, whatever the number of data; one worth more than every
    `WORTH`-th datum would not let weights learn what they have to.
    """
    found = razor.prior.precisions
    return {name: min(float(value), n / WORTH) for name, value in found.items()}


def longer_plan(name: str, cost: Cost, n: int, seconds: float) -> Longer | None:
    """As many passes as fit; fewer data if not even three fit; None if not one pass fits."""
    limit = SAFETY * seconds
    each = max(min(n, SUBSET) * cost.evidence, 1e-9)
    measured = max(LEAST_MEASURED, int(min(MEASURED, MEASURING * limit / each)))
    data = n
    while data > min(n, LEAST_DATA) and cost.total(data, FEWEST, measured) > limit:
        data = max(min(n, LEAST_DATA), int(0.9 * data))
    most = min(MOST_EPOCHS, max(100, math.ceil(STEPS * batch_size(data) / data)))
    epochs = max(
        (e for e in range(1, most + 1) if cost.total(data, e, measured) <= limit), default=0
    )
    return Longer(name, epochs, data, measured) if epochs else None
