"""Which structure do the data ask for? A network that may break its symmetry, and the evidence.

A convolutional network is relaxed: beside every convolution stands a path whose weights depend on
place, and the evidence decides layer by layer how much of it is used. Two networks with a fixed
structure are trained beside it for comparison: the convolutional one as it is, and a fully
connected one. The default data are the embedded digits, placed in one of the four quadrants of a
canvas, twice: asked for the digit, where position does not matter, and for digit and quadrant,
where it does. The images are the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from symrazor.data import Tensors, digits, on_canvas
from symrazor.fit import Fit, fit
from symrazor.options import FitConfig
from symrazor.relax import relax
from symrazor.verdict import FREE_SHARE, words

CANVAS = 16
Task = Literal["digit", "quadrant"]
QUESTIONS: dict[Task, str] = {
    "digit": "Which digit is it?",
    "quadrant": "Which digit is it, and in which quadrant?",
}
ODDS = 3.0
"""Nats below which the evidence of two networks does not separate them: odds of 20 to 1."""
CLASSES: dict[Task, int] = {"digit": 10, "quadrant": 40}


def convolutional(classes: int, width: int = 8, in_channels: int = 1) -> nn.Module:
    """Three convolutions with max pooling between them, then a maximum over positions."""
    channels = [in_channels, width, 2 * width, 4 * width]
    blocks: list[nn.Module] = []
    for c_in, c_out in pairwise(channels):
        conv = nn.Conv2d(c_in, c_out, 3, padding=1, padding_mode="circular")
        blocks += [conv, nn.ReLU(), nn.MaxPool2d(2)]
    pool = [nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return nn.Sequential(*blocks[:-1], *pool, nn.Linear(channels[-1], classes))


def relaxed(classes: int) -> nn.Module:
    """The convolutional network with a free path beside every convolution."""
    return relax(convolutional(classes), torch.zeros(2, 1, CANVAS, CANVAS))


def fully_connected(classes: int, width: int = 64, inputs: int = CANVAS**2) -> nn.Module:
    """No symmetry at all: every pixel has weights of its own."""
    body = [nn.Flatten(), nn.Linear(inputs, width), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


CANDIDATES = {
    "relaxed": relaxed,
    "convolutional": convolutional,
    "fully connected": fully_connected,
}


@dataclass(frozen=True)
class Candidate:
    """One network on one task."""

    name: str
    fit: Fit

    @property
    def log_evidence(self) -> float:
        """Natural log of the evidence."""
        return float(self.fit.evidence.log_evidence)


@dataclass(frozen=True)
class Answer:
    """All candidates of one task, best evidence first."""

    task: Task
    candidates: list[Candidate]

    @property
    def margin(self) -> float:
        """Nats between the best and the second."""
        return self.candidates[0].log_evidence - self.candidates[1].log_evidence

    def named(self, name: str) -> Candidate:
        """The candidate of a name."""
        return next(c for c in self.candidates if c.name == name)

    @property
    def verdict(self) -> str:
        """What the relaxed network learned, and the evidence of the fixed ones beside its own."""
        own = self.named("relaxed")
        learned = words(own.fit.reading.layers, None)
        against = " and ".join(
            f"{own.log_evidence - other.log_evidence:+,.0f} nats against {other.name}"
            for other in sorted(self.candidates, key=lambda c: c.log_evidence)
            if other is not own
        )
        position = "does not matter" if self.symmetric else "matters"
        text = f"Position {position}. {learned} Evidence: {against}."
        near = [c.name for c in self.candidates if abs(c.log_evidence - own.log_evidence) < ODDS]
        if len(near) > 1:
            near.remove(own.name)
            return f"{text} The evidence does not separate it from {' and '.join(near)}."
        best = self.candidates[0]
        if best is not own and best.name == "convolutional" and self.symmetric:
            text += " Strict convolutions say the same with less: take those."
        elif best is not own:
            text += f" But {best.name} has the highest evidence: do not trust the relaxed one here."
        return text

    @property
    def symmetric(self) -> bool:
        """Whether every layer of the relaxed network is left with its equivariant path alone."""
        layers = [layer for layer in self.named("relaxed").fit.reading.layers if layer.relaxed]
        return all(layer.free_share < FREE_SHARE for layer in layers)

    def to_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        rows = [{"name": c.name, "reading": c.fit.reading.to_dict()} for c in self.candidates]
        return {
            "task": self.task,
            "verdict": self.verdict,
            "margin": self.margin,
            "candidates": rows,
        }


def canvas(task: Task, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Training and test digits on a canvas; the test digits are other people's, elsewhere."""
    train = on_canvas(*digits("train"), size=CANVAS, seed=seed, task=task)
    test = on_canvas(*digits("test"), size=CANVAS, seed=seed + 1, task=task)
    return train, test


def answer(task: Task, config: FitConfig) -> Iterator[Candidate]:
    """Train the candidates of one task, one after the other."""
    train, test = canvas(task, config.seed)
    for name, make in CANDIDATES.items():
        torch.manual_seed(config.seed)
        yield Candidate(name, fit(make(CLASSES[task]), train, test=test, config=config))


def rank(task: Task, candidates: list[Candidate]) -> Answer:
    """Sort by evidence."""
    return Answer(task, sorted(candidates, key=lambda c: -c.log_evidence))


DEFAULTS = FitConfig(epochs=50, batch_size=64, lr=1e-2).change(estimator="mc")
