"""Which transformations of a picture leave its label alone, for the network that was chosen.

The network is trained again, averaged over turned, shifted, scaled and mirrored copies of its input
whose widths the evidence learns; and once without, on the same data for as many passes, so that the
two evidences can be compared.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from symrazor.core.files import write_atomically
from symrazor.core.likelihood import Categorical
from symrazor.data import Dataset
from symrazor.discovery.answer import ODDS, Answer
from symrazor.discovery.budget import SAFETY, SUBSET, batch_size, costs_of
from symrazor.discovery.question import Asked, Options, Tell, some
from symrazor.discovery.structures import Structure
from symrazor.invariance.averaged_network import Augmented, Average
from symrazor.invariance.copies import Augment
from symrazor.invariance.transformation import Flips, affine
from symrazor.symmetry.invariances import invariance_sentence
from symrazor.training.fit import Fit, fit
from symrazor.training.options import FitConfig

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
LEAST_DATA, MOST_DATA = 300, 2000
"""Fewer data say little about widths; with more, more passes are worth more."""
LEAST_EPOCHS, MOST_EPOCHS = 20, 60
STEPS = 20
"""Evidence steps in a run."""
LEAST_STEPS = 10
"""With fewer, the widths are still where they started, and the verdict is silent about them."""
TRIED = 128
"""Data of the timed try."""


NO_TIME = "There was no time to learn which transformations leave the label alone."


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
    def settled(self) -> bool:
        """Whether the widths had steps enough to go somewhere."""
        return sum("log_evidence" in record for record in self.averaged.history) >= LEAST_STEPS

    @property
    def supported(self) -> bool:
        """Whether the evidence prefers the copies by more than odds of 20 to 1."""
        return self.settled and self.gain >= ODDS

    @property
    def verdict(self) -> str:
        """In words, with the evidence for it."""
        compared = f"{self.gain:+,.0f} nats against the same network without copies"
        n = f"{self.averaged.razor.n_data:,} data"
        if not self.settled:
            return NO_TIME
        if not self.supported:
            return f"Averages over transformed pictures do not pay ({compared}, {n})."
        text = invariance_sentence(self.averaged.reading.invariances).removesuffix(".")
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


def averaged(structure: Structure, seed: int = 0, average: Average = "joint") -> Structure:
    """A structure over copies of its input."""

    def make() -> nn.Module:
        return Augmented(structure.make(), augmentation(seed), average=average)

    return Structure(f"{structure.name}, averaged", make, f"{structure.label} over copies")


def learn_widths(asked: Asked, found: Answer, options: Options, tell: Tell) -> Answer:
    """Train the network that was chosen again, with and without copies.

    Args:
        asked: the question.
        found: its answer so far.
        options: `minutes` is what is left for this; with `out`, what was stopped is taken up.
        tell: is told what is going on.

    Returns:
        The answer with its widths, or with a note that there was no time for them.
    """
    n = len(asked.train[1])
    config = FitConfig(lr=1e-2, batch_size=batch_size(n), seed=options.seed, progress=False)
    config = replace(config.change(estimator="mc"), device=options.place())
    size = _kept_size(asked, found.choice.name, options, config)
    if size is None:
        return replace(found, notes=(*found.notes, NO_TIME))
    config = replace(config, epochs=size.epochs, every=max(1, size.epochs // STEPS))
    config = replace(config, batch_size=batch_size(size.data), subset=min(size.data, SUBSET))
    used = some(n, size.data, options.seed)
    train = (asked.train[0][used], asked.train[1][used])
    folder = options.work(asked.name)
    started, fits = time.perf_counter(), []
    for place, structure in zip(
        ("widths", "no-widths"), _both(asked, size.name, options.seed), strict=True
    ):
        with torch.random.fork_rng([]):
            torch.manual_seed(options.seed)
            model, likelihood = structure.make(), asked.likelihood()
            own = replace(config, resume=folder and folder / place)
            fits.append(fit(model, train, likelihood, test=asked.test, config=own))
    seconds = time.perf_counter() - started
    tell(
        f"  widths of transformations: {size.data:,} data, {size.epochs} epochs in {seconds:.0f} s"
    )
    return replace(found, widths=Widths(size.name, *fits))


def _both(asked: Asked, name: str, seed: int) -> list[Structure]:
    """The network over copies, and as it is."""
    plain = next(s for s in asked.family.structures if s.name == name)
    classes = isinstance(asked.likelihood(), Categorical)
    return [averaged(plain, seed, "joint" if classes else "outputs"), plain]


@dataclass(frozen=True)
class Size:
    """A network, its passes and its data."""

    name: str
    epochs: int
    data: int


def _kept_size(asked: Asked, name: str, options: Options, config: FitConfig) -> Size | None:
    """As it was begun before, or as it is planned now; None if there is no time."""
    folder = options.work(asked.name)
    file = folder and folder / "widths.json"
    if file is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Size(**json.loads(file.read_text()))
    planned = _size(_both(asked, name, options.seed), asked, options, config)
    if planned is None:
        return None
    size = Size(name, *planned)
    if file is not None:
        write_atomically(file, json.dumps(asdict(size)).encode())
    return size


def _size(
    both: Sequence[Structure], asked: Asked, options: Options, config: FitConfig
) -> tuple[int, int] | None:
    """Passes and data: the most data for which the least number of passes fits; None if none do."""
    n = min(len(asked.train[1]), MOST_DATA)
    if options.epochs is not None:
        return options.epochs, n
    started = time.perf_counter()
    few = (asked.train[0][:TRIED], asked.train[1][:TRIED])
    costs = costs_of(both, few, asked.likelihood, config).values()
    left = SAFETY * (60 * options.minutes - (time.perf_counter() - started))
    data = n
    while True:
        epochs = _most(lambda e, d=data: sum(c.total(d, e, STEPS) for c in costs) <= left)  # type: ignore[misc]
        if epochs >= LEAST_EPOCHS:
            return epochs, data
        if data <= LEAST_DATA:
            return None
        data = max(min(n, LEAST_DATA), int(0.8 * data))


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number of passes that fits."""
    return max((e for e in range(1, MOST_EPOCHS + 1) if fits(e)), default=0)
