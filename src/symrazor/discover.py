"""Which structure do the data ask for? Trains candidates and lets the evidence choose.

Candidates are whole networks so far: one that is equivariant to translations everywhere and pools
over positions, and a fully connected one. (Relaxed layers, which let each layer choose for itself,
are the next step.) The default data are the embedded digits, placed in one of the four quadrants
of a canvas, twice: asked for the digit, where position does not matter, and for digit and quadrant,
where it does. The images are the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from symrazor.data import Tensors, digits, on_canvas
from symrazor.fit import Fit, fit
from symrazor.options import FitConfig

CANVAS = 16
Task = Literal["digit", "quadrant"]
QUESTIONS: dict[Task, str] = {
    "digit": "Which digit is it?",
    "quadrant": "Which digit is it, and in which quadrant?",
}
CLASSES: dict[Task, int] = {"digit": 10, "quadrant": 40}


def convolutional(classes: int, width: int = 8) -> nn.Module:
    """Equivariant to (circular) translations in every layer, then a maximum over positions."""
    channels, strides = [1, width, 2 * width, 4 * width, 4 * width], [1, 2, 2, 1]
    blocks: list[nn.Module] = []
    for c_in, c_out, stride in zip(channels[:-1], channels[1:], strides, strict=True):
        blocks += [nn.Conv2d(c_in, c_out, 3, stride, 1, padding_mode="circular"), nn.ReLU()]
    pool = [nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return nn.Sequential(*blocks, *pool, nn.Linear(channels[-1], classes))


def fully_connected(classes: int, width: int = 64) -> nn.Module:
    """No symmetry at all: every pixel has weights of its own."""
    body = [nn.Flatten(), nn.Linear(CANVAS * CANVAS, width), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


CANDIDATES = {"convolutional": convolutional, "fully connected": fully_connected}


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

    @property
    def verdict(self) -> str:
        """The answer in words; a margin below 3 nats (odds of 20 to 1) is no answer."""
        best, second = self.candidates[:2]
        if self.margin < 3:
            return (
                f"The evidence does not separate {best.name} from {second.name} "
                f"({self.margin:.1f} nats)."
            )
        what = "does not matter" if best.name == "convolutional" else "matters"
        return f"Position {what}: {best.name} beats {second.name} by {self.margin:,.0f} nats."

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


DEFAULTS = FitConfig(epochs=60, batch_size=64, lr=4e-3).change(estimator="mc")
