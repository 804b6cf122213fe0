"""What is compared: networks with different structure, and how their symmetry is put in words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from symrazor.groups import Group

if TYPE_CHECKING:
    from symrazor.symmetry.reading import Reading


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
        says: name and reading of the candidate that the verdict is about -> a sentence on its
            symmetry, where `kept` and `broken` are not enough.
        groups: by name, those that permute the places of the data: what they change of the outputs
            is measured for every candidate, and features of vectors, which they exchange, are
            scaled alike.
    """

    structures: Sequence[Structure]
    learned: str = ""
    kept: str = ""
    broken: str = ""
    simplest: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)
    says: "Callable[[str, Reading], str] | None" = None
    groups: Mapping[str, Group] = field(default_factory=dict)

    def label(self, name: str) -> str:
        """What a verdict calls a candidate."""
        return next(s.label for s in self.structures if s.name == name)
