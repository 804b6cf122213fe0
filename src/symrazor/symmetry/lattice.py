r"""Which of several groups a layer supports: the largest that nothing in it breaks.

A relaxed layer may hold a path for each of several groups, from free to very symmetric. A path that
commutes with a group commutes with its subgroups, too, so the sum is equivariant to H as far as the
paths whose group does not contain H are off. H is supported if the layer's measured error under H
is small; where none was measured, if those paths hold little of the layer's effective parameters.
Of the supported groups the largest are named: where the path of a bigger group explains as much as
that of a smaller one, the bigger symmetry is what was found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed

FREE_SHARE = 0.05
"""Share of effective parameters outside of a symmetry below which it counts as kept."""

SMALL_ERROR = 0.05
"""Equivariance error below which a symmetry counts as kept."""


@dataclass(frozen=True)
class Support:
    """What speaks for one group in one layer.

    Args:
        group: its name.
        outside: share of the layer's effective parameters in paths that break it.
        error: measured equivariance error, if any.
        supported: whether the layer keeps it.
        largest: whether it does, and keeps no candidate that contains it.
    """

    group: str
    outside: float
    error: float | None
    supported: bool
    largest: bool = False


def support(layer: Relaxed, shares: Sequence[float], errors: Mapping[str, float]) -> list[Support]:
    """All groups of a layer's paths, with what speaks for them.

    Args:
        layer: its paths.
        shares: of its effective parameters, path by path.
        errors: group -> measured error.
    """
    paths = [layer.path(i) for i in range(len(layer.paths))]
    by_name = {path.group: path for path in paths if path.group is not None}
    found: dict[str, Support] = {}
    for name, path in by_name.items():
        outside = sum(s for p, s in zip(paths, shares, strict=True) if not p.keeps(path))
        error = errors.get(name)
        kept = outside < FREE_SHARE if error is None else error < SMALL_ERROR
        found[name] = Support(name, outside, error, kept)
    largest = [
        name
        for name, one in found.items()
        if one.supported
        and not any(
            other.supported
            and by_name[bigger].keeps(by_name[name])
            and not _same(by_name, name, bigger)
            for bigger, other in found.items()
        )
    ]
    return [
        Support(s.group, s.outside, s.error, s.supported, s.group in largest)
        for s in found.values()
    ]


def sentence(name: str, found: Sequence[Support]) -> str:
    """Which of several groups a layer supports, in words."""
    largest = [one for one in found if one.largest]
    others = [one.group for one in found if not one.supported]
    if not largest:
        return f"Layer {name} supports none of {listed([one.group for one in found])}."
    text = f"Layer {name} supports {listed([one.group for one in largest])}"
    contained = [one.group for one in found if one.supported and not one.largest]
    if contained:
        text += f", which contains {listed(contained)}"
    return f"{text}, not {listed(others)}." if others else f"{text}."


def listed(names: Sequence[str]) -> str:
    """Names as in "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _same(by_name: Mapping[str, Path], one: str, two: str) -> bool:
    """Whether two groups contain each other."""
    return one == two or by_name[one].keeps(by_name[two])
