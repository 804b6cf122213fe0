"""Which transformations of a picture leave its label alone, for the network that was chosen.

The network is trained again, averaged over turned, shifted, scaled and mirrored copies of its input
whose widths the evidence learns; and once without, on the same data for as many passes, so that the
two evidences can be compared.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from symrazor.augment import Augment, Augmented, Flips, affine
from symrazor.data import Dataset
from symrazor.discover.answer import ODDS, Answer
from symrazor.discover.budget import batch_size, costs_of, every, plan
from symrazor.discover.run import Asked, Options, Tell
from symrazor.discover.structures import Structure
from symrazor.fit import Fit, fit
from symrazor.invariances import sentence
from symrazor.options import FitConfig

SHARE = 0.35
"""Part of the time that goes to the widths."""
SAMPLES = 4
"""Copies of each picture, before mirrored ones double them: few, to be quick."""
LEAST_SIDE = 8
"""Pixels of the shorter side below which pictures are not transformed."""
START = {
    "rotation": 0.3,
    "x-translation": 0.1,
    "y-translation": 0.1,
    "x-scale": 0.1,
    "y-scale": 0.1,
}
"""Generator -> width at the start: radians, half-widths of the picture, log factors."""
FEW_DATA = 1000
"""At most so many data where the number of passes was given instead of a time."""


@dataclass(frozen=True)
class Widths:
    """Learned widths, and whether they are worth it.

    Args:
        network: name of the structure.
        averaged: the network over copies, trained.
        without: the same network, data and passes, without copies.
    """

    network: str
    averaged: Fit
    without: Fit

    @property
    def gain(self) -> float:
        """Nats of evidence for the copies."""
        with_, without = self.averaged.evidence, self.without.evidence
        return float(with_.log_evidence) - float(without.log_evidence)

    @property
    def supported(self) -> bool:
        """Whether the evidence prefers the copies by more than odds of 20 to 1."""
        return self.gain >= ODDS

    @property
    def verdict(self) -> str:
        """In words, with the evidence for it."""
        compared = f"{self.gain:+,.0f} nats against the same network without copies"
        n = f"{self.averaged.razor.n_data:,} data"
        if not self.supported:
            return f"Averages over transformed pictures do not pay ({compared}, {n})."
        text = sentence(self.averaged.reading.invariances).removesuffix(".")
        return f"{text} ({compared}, {n})."

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "network": self.network,
            "verdict": self.verdict,
            "gain": self.gain,
            "supported": self.supported,
            "n": self.averaged.razor.n_data,
            "reading": self.averaged.reading.to_dict(),
        }


def wanted(data: Dataset, options: Options) -> bool:
    """Whether to learn widths: of pictures, if asked to or if there is a time to share."""
    if data.kind != "image" or min(data.x.shape[2:]) < LEAST_SIDE:
        return False
    return options.epochs is None if options.invariances is None else options.invariances


def augmentation(seed: int = 0) -> Augment:
    """All that is tried on pictures."""
    moves = affine(tuple(START), START)
    return Augment([moves, Flips((-1,), 0.1)], SAMPLES, seed)


def averaged(structure: Structure, seed: int = 0) -> Structure:
    """A structure over copies of its input."""

    def make() -> nn.Module:
        return Augmented(structure.make(), augmentation(seed))

    return Structure(f"{structure.name}, averaged", make, f"{structure.label} over copies")


def learn_widths(asked: Asked, found: Answer, options: Options, tell: Tell) -> Widths:
    """Train the network with the highest evidence again, with and without copies.

    Args:
        asked: the question.
        found: its answer so far.
        options: `minutes` is what is left for this.
        tell: is told what is going on.
    """
    plain = next(s for s in asked.family.structures if s.name == found.best.name)
    both = [averaged(plain, options.seed), plain]
    n = len(asked.train[1])
    config = FitConfig(lr=1e-2, batch_size=batch_size(n), seed=options.seed, progress=False)
    config = replace(config.change(estimator="mc"), device=options.place())
    epochs, data = _size(both, asked, options, config)
    config = replace(config, epochs=epochs, every=every(epochs), batch_size=batch_size(data))
    generator = torch.Generator().manual_seed(options.seed)
    used = torch.randperm(n, generator=generator)[:data].sort().values
    train = (asked.train[0][used], asked.train[1][used])
    started, fits = time.perf_counter(), []
    for structure in both:
        with torch.random.fork_rng([]):
            torch.manual_seed(options.seed)
            model, likelihood = structure.make(), asked.likelihood()
            fits.append(fit(model, train, likelihood, test=asked.test, config=config))
    seconds = time.perf_counter() - started
    tell(f"  widths of transformations: {data:,} data, {epochs} epochs in {seconds:.0f} s")
    return Widths(plain.name, *fits)


def _size(
    both: Sequence[Structure], asked: Asked, options: Options, config: FitConfig
) -> tuple[int, int]:
    """Passes and data."""
    n = len(asked.train[1])
    if options.epochs is not None:
        return options.epochs, min(n, FEW_DATA)
    started = time.perf_counter()
    costs = costs_of(both, asked.train, asked.likelihood, config)
    left = 60 * options.minutes - (time.perf_counter() - started)
    chosen = plan(costs, n, max(left, 1.0))
    return chosen.epochs, chosen.data
