"""Kind of data -> the networks that are compared on them; a new kind is one file and one line."""

from collections.abc import Callable, Sequence

from symrazor.data import Dataset
from symrazor.discover import maps, sets, vectors
from symrazor.discover.structures import Family

CANDIDATES: dict[str, Callable[[Dataset, Sequence[str] | None], Family]] = {
    "image": maps.candidates,
    "volume": maps.candidates,
    "series": maps.candidates,
    "set": sets.candidates,
    "vector": vectors.candidates,
}


def candidates(data: Dataset, groups: Sequence[str] | None = None) -> Family:
    """The networks to compare on some data.

    Args:
        data: of any kind but trajectories.
        groups: symmetries to relax; None for what the kind has.
    """
    return CANDIDATES[data.kind](data, groups)
