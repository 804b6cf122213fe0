"""Put learned widths of transformations in words.

The learned width of a transformation counts as open from `MIN_OPEN_WIDTH` and as full invariance
from `FULL_WIDTH`. A width below `MIN_OPEN_WIDTH` is reported as "no evidence for invariance"; it
never means that the transformation changes the label.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from symrazor.core.validation import join_names
from symrazor.invariance.averaged_network import MIN_WIDTH, Augmented

MIN_OPEN_WIDTH: dict[str, float] = {
    "degrees": 5.0,
    "pixels": 0.5,
    "half-widths": 0.05,
    "factor": 1.1,
    "probability": 0.25,
    "probability of 1/4": 0.125,
    "deviations": 0.05,
    "steps": 0.5,
}
"""Unit -> smallest width that is reported as an invariance; other units: any width above 0.

Full invariance to a flip has probability 0.5, to quarter turns 0.25 each; the thresholds are half
of these. The other thresholds are barely visible to a person: images that are never transformed
still give widths slightly above 0.
"""
FULL_WIDTH: dict[str, float] = {"degrees": 170.0, "probability": 0.45, "probability of 1/4": 0.22}
"""Unit -> width from which the network counts as invariant to the whole group."""
_NOUNS = {
    "rotation": "rotations",
    "x-translation": "horizontal shifts",
    "y-translation": "vertical shifts",
    "x-scale": "horizontal scaling",
    "y-scale": "vertical scaling",
    "x-rotation": "rotations about x",
    "y-rotation": "rotations about y",
    "z-rotation": "rotations about z",
    "left-right flip": "left-right flips",
    "up-down flip": "up-down flips",
    "scale": "scaling",
    "brightness": "changes of brightness",
    "contrast": "changes of contrast",
    "saturation": "changes of saturation",
    "time shift": "time shifts",
    "time scale": "changes of speed",
}
"""Generator -> its name in a sentence; other generators keep their name."""


@dataclass(frozen=True)
class Invariance:
    """The learned width of one transformation.

    Args:
        width: largest transformation in either direction, or probability of a discrete element.
        unit: degrees, pixels, half-widths, factor, probability, or the unit of the data.
    """

    width: float
    unit: str

    @property
    def open(self) -> bool:
        """Return whether the width is large enough to be reported as an invariance."""
        return self.width >= MIN_OPEN_WIDTH.get(self.unit, 2 * MIN_WIDTH)

    def __str__(self) -> str:
        amount = f"{self.width:.3g}"
        return f"factor {amount}" if self.unit == "factor" else f"{amount} {self.unit}".strip()


def invariances_of(model: nn.Module, shape: Sequence[int]) -> dict[str, Invariance]:
    """Return the learned widths of all `Augmented` networks in a model, by generator.

    The shape of one input converts widths to pixels.
    """
    invariances: dict[str, Invariance] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, Augmented):
            prefix = f"{module_name}: " if module_name else ""
            for label, width in module.invariances(shape).items():
                match = re.fullmatch(r"(.*) \(([^()]*)\)", label)  # such as "rotation (degrees)"
                name, unit = match.groups() if match else (label, "")
                unit = {"px": "pixels"}.get(unit, unit)
                invariances[prefix + name] = Invariance(width, unit)
    return invariances


def invariance_sentence(invariances: Mapping[str, Invariance]) -> str:
    """Return sentences such as "Invariant to rotations up to 34 degrees."."""
    known = {
        name: entry
        for name, entry in invariances.items()
        if math.isfinite(entry.width) and entry.unit != "share"
    }
    opened = [_phrase(name, entry) for name, entry in known.items() if entry.open]
    closed = [_noun(name) for name, entry in known.items() if not entry.open]
    sentences = [f"Invariant to {join_names(opened)}."] if opened else []
    if closed:
        sentences.append(f"No evidence for invariance to {join_names(closed, 'or')}.")
    return " ".join(sentences)


def _phrase(name: str, entry: Invariance) -> str:
    """Return a transformation with its range, as in "rotations up to 34 degrees"."""
    noun = _noun(name)
    if entry.width >= FULL_WIDTH.get(entry.unit, math.inf):
        return noun if "probability" in entry.unit else f"all {noun}"
    if "probability" in entry.unit:
        return f"{noun} (probability {entry.width:.2g})"
    amount = f"{entry.width:.0f}" if entry.width >= 10 else f"{entry.width:.2g}"
    if entry.unit == "factor":
        return f"{noun} by factors up to {amount}"
    return f"{noun} up to {amount} {entry.unit}".rstrip()


def _noun(name: str) -> str:
    """Return the plural of a generator; a prefix such as "mode 1: " stays in front."""
    prefix, colon, generator = name.rpartition(": ")
    plural = generator.replace("turn by", "rotations by")  # "turn by 90 degrees"
    return prefix + colon + _NOUNS.get(generator, plural)
