"""Groups that convolutions can be relaxed with: translations, and what maps the grid to itself."""

from itertools import combinations
from typing import Any

from symrazor.groups import Group
from symrazor.layers.point_group import PointGroup, point_group

GROUPS = ("translation",)
TURNS = ("p2", "p4", "pm", "p2m", "p4m", "O", "Oh")
"""Groups of square and cubic grids with more than translations."""


def of_the_grid(group: Group) -> PointGroup | None:
    """A finite group of matrices that map square or cubic grids to themselves; None for others."""
    if group.permutations is not None or group.size not in (2, 3) or not group.is_discrete:
        return None
    own = point_group(group)
    return own if own.exact else None


def named(group: str | Group) -> str | Group:
    """A group of the grid by its name, if we have one, as in p4 for cyclic(4); else as it is."""
    own = None if isinstance(group, str) else of_the_grid(group)
    return group if own is None or own.name not in (*GROUPS, *TURNS) else own.name


def check_groups(groups: object) -> None:
    """Raise ValueError for what no convolution can be relaxed with.

    That is a group that is none of the grid, none at all, one that moves nothing, or two with the
    same elements: data cannot tell these apart.
    """
    wanted: list[Any] = [*groups] if isinstance(groups, list | tuple | set) else [groups]
    known = [*GROUPS, *TURNS]
    own = [group for group in wanted if isinstance(group, Group) and of_the_grid(group)]
    if not set(GROUPS) <= set(wanted) or set(wanted) - {*known, *own}:
        raise ValueError(
            f"expected groups among {known}, or finite ones of matrices that map the grid to "
            f"itself, translation in any case, got {wanted}"
        )
    others = [point_group(group) for group in dict.fromkeys(wanted) if group not in GROUPS]
    for one in others:
        if one.order == 1:
            raise ValueError(
                f"expected groups that turn or mirror the grid, got {one.name}, which leaves all "
                "as it is; do: leave it out"
            )
    for one, other in combinations(others, 2):
        if one.order == other.order and one.group.is_subgroup_of(other.group):
            raise ValueError(
                f"expected groups with different elements, got {one.name} and {other.name}, which "
                "have the same; do: leave one of them out"
            )
