"""Sums over data, by the tensor that they belong to and by their kind, and how they add up."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import methodcaller

from torch import Tensor

from symrazor.linalg.factor import Factor

Key = tuple[str, str]
Statistics = dict[Key, Tensor | Factor]


@dataclass
class Batch:
    """What one batch contributes: its log likelihood, its size and its sums."""

    log_likelihood: Tensor
    n: int
    sums: Statistics

    def absorb(self, other: "Batch") -> "Batch":
        """Two batches as one, in the memory of the first; neither is to be used any more."""
        return Batch(
            self.log_likelihood + other.log_likelihood,
            self.n + other.n,
            absorb(self.sums, other.sums),
        )


Task = Callable[[], Batch]


def add(sums: Statistics, key: Key, value: Tensor | Factor) -> None:
    """Add to the sum of this key, if there is one."""
    sums[key] = _plus(sums[key], value) if key in sums else value


def _plus(left: Tensor | Factor, right: Tensor | Factor) -> Tensor | Factor:
    if isinstance(left, Factor) and isinstance(right, Factor):
        return left + right
    assert isinstance(left, Tensor) and isinstance(right, Tensor)
    return left + right


def add_batches(parts: Iterable[Batch], expected: int | None = None) -> Batch | None:
    """Sum of contributions, which are used up; None if there is none.

    Args:
        parts: of one batch after the other, the one with its size first.
        expected: how many data they have, where that is known: factors that become matrices are
            multiplied out after the first batch, and no rows wait for the next ones.
    """
    total: Batch | None = None
    batches = 0
    for part in parts:
        batches += part.n > 0
        if total is not None and part.n and batches == 2 and expected is not None:
            settle(total.sums, methodcaller("for_more", expected / total.n))
        total = part if total is None else total.absorb(part)
        del part  # before the next one is made
    return total


def settle(sums: Statistics, settled: Callable[[Factor], Factor] = Factor.settled) -> None:
    """Multiply rows that still wait: now, and not once for every block by some other thread.

    Or do something else to every factor; two keys of one factor stay two keys of one factor.
    """
    factors = {id(value): value for value in sums.values() if isinstance(value, Factor)}
    done = {name: settled(factor) for name, factor in factors.items()}
    for key, value in sums.items():
        if isinstance(value, Factor):
            sums[key] = done[id(value)]


def absorb(left: Statistics, right: Statistics) -> Statistics:
    """Sum of statistics, key by key; two keys of one factor stay two keys of one factor."""
    total = {**left, **right}
    held = Counter(map(id, left.values()))
    pairs: dict[tuple[int, int], list[Key]] = {}
    for key, value in right.items():
        if key in left:
            pairs.setdefault((id(left[key]), id(value)), []).append(key)
    for (own, _), keys in pairs.items():
        mine, theirs = left[keys[0]], right[keys[0]]
        if isinstance(mine, Factor) and isinstance(theirs, Factor) and held[own] == len(keys):
            found: Tensor | Factor = mine.absorb(theirs)
        else:  # another key still needs it as it is
            found = _plus(mine, theirs)
        total |= dict.fromkeys(keys, found)
    return total
