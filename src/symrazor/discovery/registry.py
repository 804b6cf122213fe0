"""Kind of data -> the networks that are compared on them; a new kind is one file and one line."""

from collections.abc import Callable, Sequence

from symrazor.data import Dataset
from symrazor.discovery import grids as maps
from symrazor.discovery import permutation_candidates as places
from symrazor.discovery import sets, vectors
from symrazor.discovery.structures import Family
from symrazor.discovery.user_groups import Offered, moves_places

CANDIDATES: dict[str, Callable[[Dataset, Sequence[Offered] | None], Family]] = {
    "image": maps.candidates,
    "volume": maps.candidates,
    "series": maps.candidates,
    "set": sets.candidates,
    "vector": vectors.candidates,
}


def candidates(data: Dataset, groups: Sequence[Offered] | None = None) -> Family:
    """The networks to compare on some data.

    Args:
        data: of any kind but trajectories.
        groups: symmetries to relax, of places if one of them permutes places; None for what the
            kind has.
    """
    usual = data.kind == "set" and {*(groups or ())} == {sets.GROUP}
    if groups and any(moves_places(group) for group in groups) and not usual:
        return places.candidates(data, groups)
    return CANDIDATES[data.kind](data, groups)
