"""Add up the sums of several processes."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.processes import all_gather, all_gather_text, all_reduce_, world
from symrazor.core.errors import CurvatureError, DivergenceError
from symrazor.curvature.task import (
    BatchSums,
    Contributions,
    Key,
    Scheduler,
    Statistic,
    Statistics,
    Total,
)
from symrazor.data.batches import NumberedBatch
from symrazor.linalg.factor import ROWS_PER_FEATURE, Factor, Symmetric
from symrazor.linalg.jacobian_rows import BatchRows, DenseRows, JacobianRows, Rows, SharedRows


@dataclass(frozen=True)
class ProcessScheduler(Scheduler):
    """Compute the batches of this process by another scheduler and add up all processes.

    A factor is sent in the smaller of its two forms. Rows are gathered while the rows of all
    processes together are clearly fewer than the features; otherwise matrices are summed.
    """

    local: Scheduler
    device: torch.device

    def contributions(self, batches: Iterable[NumberedBatch], total: Total) -> Contributions:
        """Yield the contributions of this process."""
        yield from self.local.contributions(batches, total)

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Announce an error, so that all processes fail and none waits for another."""
        try:
            yield
        except Exception as error:
            _announce(None, error)
            raise

    def reduce(self, local: BatchSums | None) -> BatchSums:
        """Return the sums of all processes; raise the error of another process, if it failed."""
        announced = _announce(local, None)
        n = sum(entry["n"] for entry in announced)
        if n == 0:
            raise ValueError("The loaders of all processes are empty: one batch is needed.")
        log_likelihood = torch.zeros((), dtype=torch.float64, device=self.device)
        if local is not None:
            log_likelihood += local.log_likelihood.to(self.device)
        sums: Statistics = {}
        to_reduce: list[Tensor] = [log_likelihood]
        for keys, entries in _entries_by_keys(announced).items():
            value = None if local is None else local.sums.get(keys[0])
            metadata = next(entry for entry in entries if entry is not None)
            total: Statistic
            if "batches" in metadata:
                assert value is None or isinstance(value, JacobianRows)
                total = _gather_rows(value, metadata, entries, self.device)
            elif "rows" in metadata:
                assert value is None or isinstance(value, Factor)
                total = _gather_factor(value, metadata, entries, self.device)
                to_reduce += [] if total.total is None else total.total.panels
            else:
                total = torch.zeros(
                    tuple(metadata["shape"]), dtype=torch.float64, device=self.device
                )
                if value is not None:
                    assert isinstance(value, Tensor)
                    total.copy_(value)
                to_reduce.append(total)
            sums |= dict.fromkeys(keys, total)
        all_reduce_(to_reduce)
        return BatchSums(log_likelihood, n, sums)


Entry = dict[str, Any]
"""Description of one sum: its keys, its shape, and for a factor the number of rows."""
_RECOVERABLE: dict[str, type[Exception]] = {
    c.__name__: c for c in (DivergenceError, CurvatureError)
}
"""Errors that training can recover from: every process has to raise the same one."""


def _announce(local: BatchSums | None, error: Exception | None) -> list[dict[str, Any]]:
    """Send the description of this process's sums, or its error, and receive those of all."""
    message = {
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "n": 0 if local is None else local.n,
        "sums": [] if local is None else _entries(local.sums),
    }
    announced: list[dict[str, Any]] = [
        json.loads(text) for text in all_gather_text(json.dumps(message))
    ]
    errors = {rank: other["error"] for rank, other in enumerate(announced) if other["error"]}
    if errors and error is None:
        rank, text = next(iter(errors.items()))
        kind = _RECOVERABLE.get(text.partition(":")[0], ValueError)
        raise kind(f"Process {rank} failed while it computed the curvature. {text}")
    return announced


def _entries(sums: Statistics) -> list[Entry]:
    """Describe every sum; keys that share one factor are listed together."""
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
        elif isinstance(value, JacobianRows):
            by_object[id(value)] = {
                "keys": [list(key)],
                "batches": [_describe_rows(batch) for batch in value.batches],
                "dtype": str(value.tensors[0].dtype).removeprefix("torch."),
            }
        else:
            by_object[id(value)] = {"keys": [list(key)], "shape": list(value.shape)}
    return list(by_object.values())


def _entries_by_keys(
    announced: Sequence[Mapping[str, Any]],
) -> dict[tuple[Key, ...], list[Entry | None]]:
    """Map the keys of a sum to its entry in every process, None if a process has none."""
    by_process = [
        {tuple((a, b) for a, b in entry["keys"]): entry for entry in message["sums"]}
        for message in announced
    ]
    all_keys = list(dict.fromkeys(keys for entries in by_process for keys in entries))
    return {keys: [entries.get(keys) for entries in by_process] for keys in all_keys}


def _describe_rows(batch: BatchRows) -> dict[str, Any]:
    shapes = {name: [list(t.shape) for t in rows.tensors] for name, rows in batch.tensors.items()}
    about = {"n": batch.n, "c": batch.c, "labels": batch.labels, "stands_for": batch.stands_for}
    return {**about, "shapes": shapes}


def _rows_from(flat: Tensor, described: Sequence[Mapping[str, Any]]) -> Iterator[BatchRows]:
    """Cut the rows of several batches from a vector that contains all their tensors."""
    start = 0
    for batch in described:
        tensors: dict[str, Rows] = {}
        for name, shapes in batch["shapes"].items():
            factors = []
            for shape in shapes:
                stop = start + math.prod(shape)
                factors.append(flat[start:stop].reshape(shape))
                start = stop
            tensors[name] = DenseRows(*factors) if len(factors) == 1 else SharedRows(*factors)
        labels = tuple(batch["labels"])
        yield BatchRows(batch["n"], batch["c"], tensors, labels, batch["stands_for"])


def _gather_rows(
    local: JacobianRows | None,
    metadata: Entry,
    entries: Sequence[Entry | None],
    device: torch.device,
) -> JacobianRows:
    """Return the rows of all processes, by rank."""
    described = [[] if entry is None else entry["batches"] for entry in entries]
    counts = [
        sum(math.prod(s) for batch in batches for t in batch["shapes"].values() for s in t)
        for batches in described
    ]
    flat = torch.zeros(0, dtype=getattr(torch, metadata["dtype"]), device=device)
    if local is not None:
        flat = torch.cat([tensor.reshape(-1) for tensor in local.tensors])
    vectors = zip(all_gather(flat, counts), described, strict=True)
    gathered = [batch for vector, batches in vectors for batch in _rows_from(vector, batches)]
    first_local = sum(map(len, described[: world().rank]))
    return JacobianRows(gathered, first_local)


def _gather_factor(
    local: Factor | None, metadata: Entry, entries: Sequence[Entry | None], device: torch.device
) -> Factor:
    """Return the rows of all processes, or the local matrix, which is still to be reduced."""
    blocks, features = metadata["shape"]
    rows = [0 if entry is None else entry["rows"] for entry in entries]
    if None not in rows and sum(rows) < ROWS_PER_FEATURE * features:
        dtype = getattr(torch, metadata["dtype"])
        none = torch.zeros(0, blocks, features, dtype=dtype, device=device)
        return Factor(all_gather(none if local is None else local.rows, rows))
    if local is None:
        return Factor([], Symmetric.zeros(blocks, features, device))
    return Factor([], local.outer_products)
