"""Which transformations leave the label alone: learned widths, and what they say in words.

A width counts as open where it is at least `OPEN` of its unit, and as complete from `WHOLE` on.
Between the two, the words name the width; below, they say that the transformation matters.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from symrazor.invariance.averaged_network import Augmented
from symrazor.invariance.copies import SMALLEST

OPEN: dict[str, float] = {
    "degrees": 5.0,
    "pixels": 0.5,
    "half-widths": 0.05,
    "factor": 1.1,
    "probability": 0.25,
    "probability of 1/4": 0.125,
    "deviations": 0.05,
    "steps": 0.5,
}
"""Unit -> smallest width that is worth words; for any other unit, any that is not closed.

A probability of 0.25 is half of what full invariance to a flip takes, one of 0.125 half of what
quarter turns take. The others are small beside what a person would notice: pictures that are not
turned at all still give widths above 0.
"""

WHOLE: dict[str, float] = {"degrees": 170.0, "probability": 0.45, "probability of 1/4": 0.22}
"""Unit -> width from which on the whole group leaves the label alone."""

_NOUNS = {
    "rotation": "rotations",
    "x-translation": "shifts to the side",
    "y-translation": "shifts up and down",
    "x-scale": "stretches to the side",
    "y-scale": "stretches up and down",
    "shear": "shears",
    "x-rotation": "rotations about x",
    "y-rotation": "rotations about y",
    "z-rotation": "rotations about z",
    "left-right flip": "left-right flips",
    "up-down flip": "up-down flips",
    "turn by 90 degrees": "turns by 90 degrees",
    "turn by 180 degrees": "turns by 180 degrees",
    "turn by 270 degrees": "turns by 270 degrees",
    "scale": "changes of size",
    "brightness": "changes of brightness",
    "contrast": "changes of contrast",
    "saturation": "changes of saturation",
    "blur": "blurs",
    "noise": "amounts of noise",
    "jitter": "amounts of jitter",
    "time shift": "shifts in time",
    "time scale": "changes of speed",
}
"""Generator -> what a sentence calls its transformations; the names of others are as they are."""


@dataclass(frozen=True)
class Invariance:
    """How far a transformation may go.

    Args:
        width: largest amount to either side, or the probability of a discrete element.
        unit: degrees, pixels, half-widths, factor, probability, or that of the data.
    """

    width: float
    unit: str

    @property
    def open(self) -> bool:
        """Whether it is worth words."""
        return self.width >= OPEN.get(self.unit, 2 * SMALLEST)

    def __str__(self) -> str:
        """Width and unit."""
        amount = f"{self.width:.3g}"
        return f"factor {amount}" if self.unit == "factor" else f"{amount} {self.unit}".strip()


def invariances_of(model: nn.Module, shape: Sequence[int]) -> dict[str, Invariance]:
    """Learned widths of all `Augmented` networks in a model, by generator.

    Args:
        model: any; without an `Augmented` in it there are none.
        shape: of one datum, for widths in pixels.
    """
    found: dict[str, Invariance] = {}
    for place, module in model.named_modules():
        if isinstance(module, Augmented):
            own = module.invariances(shape)
            prefix = f"{place}: " if place else ""
            found |= {prefix + name: one for name, one in map(_split, own.items())}
    return found


def shape_of(x: object) -> tuple[int, ...]:
    """Of one datum; of anything but a tensor, none."""
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else ()


def _split(item: tuple[str, float]) -> tuple[str, Invariance]:
    match = re.fullmatch(r"(.*) \(([^()]*)\)", item[0])
    name, unit = match.groups() if match else (item[0], "")
    return name, Invariance(item[1], {"px": "pixels"}.get(unit, unit))


def invariance_sentence(found: Mapping[str, Invariance]) -> str:
    """As in "Rotations up to 34 degrees leave the label alone; left-right flips do not."."""
    known = {n: one for n, one in found.items() if math.isfinite(one.width) and one.unit != "share"}
    if not known:
        return ""
    yes = [_phrase(name, one) for name, one in known.items() if one.open]
    no = [_noun(name) for name, one in known.items() if not one.open]
    if yes and no:
        text = f"{_and(yes)} leave the label alone; {_and(no)} do not"
    elif yes:
        text = f"{_and(yes)} leave the label alone"
    else:
        text = f"{_and(no)} do not leave the label alone"
    return f"{text[0].upper()}{text[1:]}."


def _phrase(name: str, one: Invariance) -> str:
    noun = _noun(name)
    if one.width >= WHOLE.get(one.unit, math.inf):
        return noun if "probability" in one.unit else f"all {noun}"
    if "probability" in one.unit:
        return f"{noun} (probability {one.width:.2g})"
    amount = f"{one.width:.0f}" if one.width >= 10 else f"{one.width:.2g}"
    if one.unit == "factor":
        return f"{noun} by factors up to {amount}"
    return f"{noun} up to {amount} {one.unit}".rstrip()


def _noun(name: str) -> str:
    """Of a generator; the part of the model or of a mixture that it belongs to stays in front."""
    place, colon, own = name.rpartition(": ")
    return place + colon + _NOUNS.get(own, own)


def _and(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
