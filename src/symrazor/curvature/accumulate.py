"""Sums over data, by the tensor that they belong to and by their kind, and how they add up."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.processes import all_gather, all_gather_text, all_reduce_, is_distributed
from symrazor.core.errors import CurvatureError, DivergenceError
from symrazor.linalg.factor import ROWS_PER_FEATURE, Factor, Symmetric

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
            settle(total.sums, methodcaller("prepared_for", expected / total.n))
        total = part if total is None else total.absorb(part)
        del part  # before the next one is made
    return total


def settle(sums: Statistics, settled: Callable[[Factor], Factor] = Factor.multiplied) -> None:
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


Entry = dict[str, Any]
"""One sum as it is announced: its keys, its shape, for a factor the number of rows."""


def over_processes(collect: Callable[[], Batch | None], device: torch.device) -> Batch:
    """What all processes have collected.

    An error in one of them is an error in all of them, and none waits for the others.

    Args:
        collect: the sums over this process's own data; None for no data.
        device: where the sums are.

    Raises:
        ValueError: no data anywhere, or an error in another process.
        DivergenceError, CurvatureError: the same in another process.
    """
    if not is_distributed():
        own = collect()
        if own is None:
            raise ValueError("expected at least one batch, got an empty loader")
        return own
    failed: Exception | None = None
    try:
        own = collect()
    except Exception as error:
        own, failed = None, error
    announced = _announce(own, failed)
    if failed is not None:
        raise failed
    return _total(own, announced, device)


def _announce(own: Batch | None, failed: Exception | None) -> list[dict[str, Any]]:
    """Tell the others what this process has, and hear what they have."""
    mine = {
        "error": None if failed is None else f"{type(failed).__name__}: {failed}",
        "n": 0 if own is None else own.n,
        "sums": [] if own is None else _entries(own.sums),
    }
    found: list[dict[str, Any]] = [json.loads(text) for text in all_gather_text(json.dumps(mine))]
    errors = {rank: said["error"] for rank, said in enumerate(found) if said["error"] is not None}
    if errors and failed is None:
        rank, error = next(iter(errors.items()))
        kind = _ALIKE.get(error.partition(":")[0], ValueError)
        raise kind(f"expected sums from every process, got an error in {rank}: {error}")
    return found


_ALIKE: dict[str, type[Exception]] = {c.__name__: c for c in (DivergenceError, CurvatureError)}
"""What a training may go on after: all processes have to see it, to go on alike."""


def _entries(sums: Statistics) -> list[Entry]:
    """A description of every sum; keys of one and the same factor stand together."""
    by_object: dict[int, Entry] = {}
    for key, value in sums.items():
        if id(value) in by_object:
            by_object[id(value)]["keys"].append(list(key))
        elif isinstance(value, Factor):
            by_object[id(value)] = {
                "keys": [list(key)],
                "shape": [value.blocks, value.features],
                "rows": value.size if value.is_rows else None,
                "dtype": str(value.dtype).removeprefix("torch."),
            }
        else:
            by_object[id(value)] = {"keys": [list(key)], "shape": list(value.shape)}
    return list(by_object.values())


def _total(
    own: Batch | None, announced: Sequence[Mapping[str, Any]], device: torch.device
) -> Batch:
    n = sum(said["n"] for said in announced)
    if n == 0:
        raise ValueError("expected at least one batch in some process, got empty loaders in all")
    mine = {} if own is None else own.sums
    log_likelihood = torch.zeros((), dtype=torch.float64, device=device)
    if own is not None:
        log_likelihood += own.log_likelihood.to(device)
    sums: Statistics = {}
    plain: list[Tensor] = [log_likelihood]
    for keys, entries in _by_keys(announced).items():
        value, known = mine.get(keys[0]), next(entry for entry in entries if entry is not None)
        total: Tensor | Factor
        if "rows" in known:
            assert value is None or isinstance(value, Factor)
            total = _factor(value, known, entries, device)
            plain += [] if total.total is None else total.total.panels
        else:
            assert value is None or isinstance(value, Tensor)
            total = _tensor(value, known["shape"], device)
            plain.append(total)
        sums |= dict.fromkeys(keys, total)
    all_reduce_(plain)
    return Batch(log_likelihood, n, sums)


def _by_keys(announced: Sequence[Mapping[str, Any]]) -> dict[tuple[Key, ...], list[Entry | None]]:
    """Keys of one sum -> its entry in every process, None where it has none."""
    every = [
        {tuple((a, b) for a, b in entry["keys"]): entry for entry in said["sums"]}
        for said in announced
    ]
    names = list(dict.fromkeys(keys for found in every for keys in found))
    return {keys: [found.get(keys) for found in every] for keys in names}


def _tensor(own: Tensor | None, shape: Sequence[int], device: torch.device) -> Tensor:
    total = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
    return total if own is None else total.copy_(own)


def _factor(
    own: Factor | None, known: Entry, entries: Sequence[Entry | None], device: torch.device
) -> Factor:
    """The rows of all processes; or this one's matrix, still to be added up."""
    blocks, features = known["shape"]
    rows = [0 if entry is None else entry["rows"] for entry in entries]
    if None not in rows and sum(rows) < ROWS_PER_FEATURE * features:
        dtype = getattr(torch, known["dtype"])
        mine = torch.zeros(0, blocks, features, dtype=dtype, device=device)
        return Factor(all_gather(mine if own is None else own.rows, rows))
    if own is None:
        return Factor([], Symmetric.zeros(blocks, features, device))
    return Factor([], own.outer_products)
