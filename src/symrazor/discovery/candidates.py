"""Describe what `discover` compares: candidate networks, kinds of data and their wording.

A kind of data is one `DataKind`: its name, how it is recognised, which networks are compared, and
how the result is put in words. `register_kind` makes it known to `discover`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from symrazor.data import Dataset
from symrazor.data.datasets import register_shape
from symrazor.groups import Group
from symrazor.symmetry.reading import Reading

UserGroup = str | Group
"""A group as users pass it: its name or the group itself."""


@dataclass(frozen=True)
class Structure:
    """One candidate network.

    Args:
        name: name in tables and documents.
        make: builds the network with weights from torch's global random state.
        label: name in sentences, with its article ("a plain CNN").
    """

    name: str
    make: Callable[[], nn.Module]
    label: str


@dataclass(frozen=True)
class Wording:
    """Put the symmetry of a relaxed network in words.

    Headlines start with an adjective, as in "Translation-invariant: position does not matter.".

    Args:
        invariant: headline if every relaxed layer keeps the symmetry.
        not_invariant: headline if a layer breaks the symmetry.
        terms: regular expression -> replacement, applied to the sentence about the layers.
    """

    invariant: str
    not_invariant: str
    terms: Mapping[str, str] = field(default_factory=dict)

    def apply_terms(self, text: str) -> str:
        """Replace general terms by those of this kind of data."""
        for pattern, replacement in self.terms.items():
            text = re.sub(pattern, replacement, text)
        return text


def slug(name: str) -> str:
    """Return a name as a folder name: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


NEUTRAL = Wording(
    "Equivariant: the data support the symmetry of the layers.",
    "Not equivariant: a layer breaks the symmetry.",
)


@dataclass(frozen=True)
class Family:
    """All candidates for one data set.

    Args:
        structures: the networks; the first is always trained, the others if time allows.
        relaxed: name of the structure whose symmetry is learned; "" if all are fixed.
        built_in: name of the structure that has the symmetry of `relaxed` built in.
        wording: headlines for the relaxed structure; by default those of the kind of data.
        describe: returns a headline from the name and the reading of a candidate, where `wording`
            cannot say enough.
        groups: name -> group that permutes the positions of the data. Its equivariance error is
            measured for every candidate, and features of vectors share one scale.
        permutes_points: whether to measure the effect of permuting the points of a set.
    """

    structures: Sequence[Structure]
    relaxed: str = ""
    built_in: str = ""
    wording: Wording | None = None
    describe: Callable[[str, Reading], str] | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)
    permutes_points: bool = False

    def structure(self, name: str) -> Structure:
        """Return the structure of a name."""
        return next(structure for structure in self.structures if structure.name == name)

    def label(self, name: str) -> str:
        """Return the name of a candidate in sentences."""
        return self.structure(name).label


Candidates = Callable[[Dataset, Sequence[UserGroup] | None], Family]


@dataclass(frozen=True)
class DataKind:
    """A kind of data that `discover` accepts.

    Args:
        name: singular noun; the value of `kind` and `--kind`.
        candidates: returns the networks to compare on a data set, given the groups of the user
            (None if the user named none).
        wording: headlines for the relaxed network.
        axes: axes of the array of inputs, such as "[n, channels, time]". Inputs are standardised
            along the second axis.
        recognise: returns whether inputs x with labels y are of this kind. None if `symrazor.data`
            recognises the kind, or if it always has to be named.
    """

    name: str
    candidates: Candidates
    wording: Wording = NEUTRAL
    axes: str = ""
    recognise: Callable[[Tensor, Tensor | None], bool] | None = None


_KINDS: dict[str, DataKind] = {}


def register_kind(kind: DataKind) -> None:
    """Make a kind of data known to `discover` and to `symrazor.data`; replaces one of this name."""
    _KINDS[kind.name] = kind
    if kind.axes:
        register_shape(kind.name, kind.axes, kind.recognise)


def registered_kinds() -> tuple[str, ...]:
    """Return the names of the kinds for which there are candidates."""
    return tuple(_KINDS)


def candidates_for(data: Dataset, groups: Sequence[UserGroup] | None = None) -> Family:
    """Return the networks to compare on a data set.

    Args:
        data: data of a registered kind.
        groups: symmetries to relax; None for the default of the kind.
    """
    kind = _KINDS[data.kind]
    family = kind.candidates(data, groups)
    return family if family.wording else replace(family, wording=kind.wording)
