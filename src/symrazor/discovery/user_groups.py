"""Groups as they are offered: by name, from a file, or as they are."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from symrazor.groups import Group, cyclic_permutations, dihedral_permutations, from_file, symmetric
from symrazor.groups.group_files import is_group_file

Offered = str | Group
"""Name of a group, or the group itself."""

ON_PLACES: dict[str, Callable[[int], Group]] = {
    "permutation": symmetric,
    "cyclic": cyclic_permutations,
    "dihedral": dihedral_permutations,
}
"""Name -> the group on so many places: all orders; circular shifts; those and reversals."""


def as_groups(given: object) -> tuple[Offered, ...]:
    """What a user offers: a name, a file or a group, or several of these; files are read.

    Raises:
        ValueError: none, something else, or a file without a group; names it.
        OSError: a file that cannot be read.
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not several:
        raise ValueError("expected at least one group, got none; do: name one, or leave groups out")
    found: list[Offered] = []
    for one in (str(given) if isinstance(given, Path) else given for given in several):
        if not isinstance(one, str | Group):
            raise ValueError(
                "expected groups by name, as files that end with .json, or as Groups, got "
                f"{type(one).__name__}"
            )
        found.append(from_file(str(one)) if is_group_file(one) else one)
    return tuple(found)


def moves_places(group: Offered) -> bool:
    """Whether it permutes places, rather than turning a grid."""
    return group in ON_PLACES if isinstance(group, str) else group.permutations is not None


def plain(groups: Sequence[Offered] | None) -> list[Any] | None:
    """Names and generators as JSON: two files of one name need not hold one group."""
    return None if groups is None else [_plain(group) for group in groups]


def _plain(group: Offered) -> Any:
    if isinstance(group, str):
        return group
    flows = None if group.lie is None else group.lie.generators
    parts = (group.permutations, group.matrices, flows)
    return [group.name, *(None if part is None else part.tolist() for part in parts)]
