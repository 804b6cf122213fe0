"""How much training fits into the time given, from a timed first try of every candidate."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from symrazor.core.likelihood import Likelihood
from symrazor.data import Tensors
from symrazor.discovery.structures import Structure
from symrazor.training.fit import fit
from symrazor.training.options import FitConfig

Make = Callable[[], Likelihood]
TRIED = 512
"""Data of a timed try."""
SAFETY = 0.8
"""Part of the time that is planned; the rest is for what a short try does not show."""
LEAST_EPOCHS, STEPS, MOST_EPOCHS = 30, 2000, 400
"""At least so many passes, on fewer data if need be; at most as many as make `STEPS` steps.

Laplace's method belongs to a mode: weights on their way there make the network look best that fits
soonest. So passes go before data.
"""
LEAST_DATA = 500
UNSEEN, MANY = 0.2, 1000
"""Of so many data or more, this part is left out of the comparison, to be predicted."""
MEASURED = 10
"""Evidence steps in a run."""
SLOWER = 3.0
"""Short runs say little about the speed of long ones: a larger factor is not believed."""
SUBSET = 1000
"""Data of an evidence step in a run that has to fit into a time."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one candidate: per datum and pass, per datum of an evidence, and once."""

    training: float
    evidence: float
    once: float

    def loop(self, n: int, epochs: int, measured: int = MEASURED) -> float:
        """Of the passes and the evidence steps between them."""
        steps = math.ceil(epochs / often(epochs, measured))
        return n * epochs * self.training + steps * min(n, SUBSET) * self.evidence

    def total(self, n: int, epochs: int, measured: int = MEASURED) -> float:
        """Of a whole run."""
        return self.loop(n, epochs, measured) + n * self.evidence + self.once

    def seen(self, n: int, epochs: int, loop: float, after: float) -> "Cost":
        """The cost after a run: so many times what was expected, at most `SLOWER`.

        Args:
            n: data of that run.
            epochs: its passes.
            loop: seconds they took.
            after: seconds until all was measured.
        """
        factor = min(SLOWER, loop / self.loop(n, epochs))
        return Cost(factor * self.training, factor * self.evidence, after)


@dataclass(frozen=True)
class Plan:
    """So many passes over so many data.

    Args:
        epochs: passes.
        data: how many.
        seconds: name -> what each candidate should take.
        costs: name -> what that was computed from.
    """

    epochs: int
    data: int
    seconds: dict[str, float]
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Of training, for each candidate."""
        return self.epochs * math.ceil(self.data / batch_size(self.data))


def every(epochs: int) -> int:
    """Epochs between evidence steps."""
    return max(1, epochs // MEASURED)


def often(epochs: int, measured: int) -> int:
    """Epochs between evidence steps of which there are at most so many."""
    return max(1, math.ceil(epochs / measured))


def timed(config: FitConfig, epochs: int, data: int, measured: int = MEASURED) -> FitConfig:
    """Options of a run of so many passes over so many data, of which `Cost.total` is the time."""
    return replace(
        config,
        epochs=epochs,
        every=often(epochs, measured),
        subset=min(data, SUBSET),
        batch_size=batch_size(data),
    )


def batch_size(n: int) -> int:
    """A power of 2 between 16 and 128: 20 or more steps per pass."""
    return 1 << min(7, max(4, int(math.log2(max(1, n / 20)))))


def cost(structure: Structure, data: Tensors, likelihood: Make, config: FitConfig) -> Cost:
    """Time four passes over some data; every second one measures the evidence too.

    What happens only the first time (imports, threads) is not counted: the cheaper pass of each
    sort is taken.
    """
    x, y = data[0][:TRIED], data[1][:TRIED]
    tried = config.change(epochs=4, every=2, burn_in=0, progress=False)
    started = time.perf_counter()
    found = fit(structure.make(), (x, y), likelihood(), config=tried)
    whole = time.perf_counter() - started
    ends = [0.0, *(record["seconds"] for record in found.history)]
    passes = [after - before for before, after in pairwise(ends)]
    training = min(passes[0::2])
    evidence = max(min(passes[1::2]) - training, 0.0)
    once = max(whole - ends[-1] - evidence, 0.0)
    return Cost(training / len(y), evidence / len(y), once)


def plan(costs: dict[str, Cost], n: int, seconds: float) -> Plan:
    """As many passes as fit, the same for all candidates; fewer data before too few passes."""

    def total(data: int, epochs: int) -> float:
        return sum(c.total(data, epochs) for c in costs.values())

    limit = SAFETY * seconds
    least = min(n, LEAST_DATA)
    data = n if n < MANY else int((1 - UNSEEN) * n)
    while data > least and total(data, LEAST_EPOCHS) > limit:
        data = max(least, int(0.9 * data))
    most = min(MOST_EPOCHS, max(50, math.ceil(STEPS * batch_size(data) / data)))
    epochs = max((e for e in range(1, most + 1) if total(data, e) <= limit), default=1)
    each = {name: c.total(data, epochs) for name, c in costs.items()}
    return Plan(epochs, data, each, costs)


def costs_of(
    structures: Sequence[Structure], data: Tensors, likelihood: Make, config: FitConfig
) -> dict[str, Cost]:
    """Name -> cost of each candidate."""
    with torch.random.fork_rng([]):
        return {s.name: cost(s, data, likelihood, config) for s in structures}
