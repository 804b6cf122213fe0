"""What is compared: networks with different structure, and how their symmetry is put in words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Structure:
    """One network to train.

    Args:
        name: of the candidate, in tables and documents.
        make: builds it, with weights from torch's global random state.
        label: what a verdict calls it, with its article.
    """

    name: str
    make: Callable[[], nn.Module]
    label: str


@dataclass(frozen=True)
class Family:
    """All candidates for one kind of data.

    Args:
        structures: the networks; the first one is always trained, others if time allows.
        learned: name of the one whose structure is learned; "" if all are fixed.
        kept: sentence for a symmetry that every layer of the learned one kept.
        broken: sentence for one that some layer broke.
        simplest: name of the one that says the same with less where the symmetry is kept.
        terms: words of a reading -> what they are called for this kind of data.
    """

    structures: Sequence[Structure]
    learned: str = ""
    kept: str = ""
    broken: str = ""
    simplest: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)

    def label(self, name: str) -> str:
        """What a verdict calls a candidate."""
        return next(s.label for s in self.structures if s.name == name)
