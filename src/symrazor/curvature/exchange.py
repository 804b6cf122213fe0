"""Sums over the data of all processes: what each has found, added up in float64.

A factor travels in the smaller of its two forms. While the rows of all processes are together still
clearly fewer than the features they are gathered; else their matrices are added up.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.processes import exchange, gather, sum_, together
from symrazor.core.errors import CurvatureError, DivergenceError
from symrazor.curvature.sums import Batch, Key, Statistics
from symrazor.linalg.factor import ENOUGH, Factor
from symrazor.linalg.symmetric import Symmetric

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
    if not together():
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
    found: list[dict[str, Any]] = [json.loads(text) for text in exchange(json.dumps(mine))]
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
                "rows": value.size if value.small else None,
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
    sum_(plain)
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
    if None not in rows and sum(rows) < ENOUGH * features:
        dtype = getattr(torch, known["dtype"])
        mine = torch.zeros(0, blocks, features, dtype=dtype, device=device)
        return Factor(gather(mine if own is None else own.rows, rows))
    if own is None:
        return Factor([], Symmetric.zeros(blocks, features, device))
    return Factor([], own.squared)
