r"""Which paths to drop: those with a share of the effective parameters below a threshold.

A path's share is $\gamma_p / \sum_q \gamma_q$ over the paths q of its layer. The threshold is
given, or every one that makes a difference is tried and the evidence decides.
"""

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.hyper import weights
from symrazor.curvature.estimate import Loader
from symrazor.inference.razor import Razor
from symrazor.layers.path import is_real
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.reading import Reading

Shares = Mapping[str, Sequence[float | None]]
"""Layer name -> share of each path in the layer's effective parameters; None for a frozen path."""

Dropped = dict[str, set[int]]
"""Layer name -> paths to drop."""

PATIENCE = 2.0
"""Seconds without a progress bar."""

SLACK = 1e-6
"""How far rounding may move a share out of [0, 1]."""


def path_shares(model: nn.Module, effective_parameters: Mapping[str, float]) -> Shares:
    """Share of each path of each relaxed layer in the layer's effective parameters.

    None for a path without trainable weights: the evidence has nothing to say about it.
    """
    found: dict[str, list[float | None]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Relaxed):
            continue
        prefixes = [f"{name}.paths.{i}.".removeprefix(".") for i in range(len(layer.paths))]
        gamma = [
            [g for key, g in effective_parameters.items() if key.startswith(prefix)]
            for prefix in prefixes
        ]
        total = sum(map(sum, gamma))
        even = 1 / max(1, sum(map(bool, gamma)))
        found[name] = [(sum(g) / total if total > 0 else even) if g else None for g in gamma]
    return found


def match_shares(shares: Shares | Reading | None, relaxed: Mapping[str, Relaxed]) -> Shares:
    """Shares for exactly the layers there are.

    Raises:
        ValueError: no mapping, other layers or numbers of paths, or numbers outside of [0, 1].
    """
    if shares is None:
        return {name: [None] * len(layer.paths) for name, layer in relaxed.items()}
    if isinstance(shares, Reading):
        read = {
            layer.name: [path.share if path.parameters else None for path in layer.paths]
            for layer in shares.layers
        }
        shares = {name: read[name] for name in relaxed if name in read}
    given: Any = shares
    if not isinstance(given, Mapping) or not all(
        isinstance(values, list | tuple) for values in given.values()
    ):
        raise ValueError(f"expected shares as {{layer: [share of each path]}}, got {given!r}")
    wild = {
        name: list(values)
        for name, values in shares.items()
        if not all(s is None or (is_real(s) and -SLACK <= s <= 1 + SLACK) for s in values)
    }
    if wild:
        raise ValueError(f"expected shares from 0 to 1, or None for a frozen path, got {wild}")
    sizes = {name: len(layer.paths) for name, layer in relaxed.items()}
    got = {name: len(values) for name, values in shares.items()}
    if sizes != got:
        wrong = sorted(n for n in {*sizes, *got} if sizes.get(n) != got.get(n))
        raise ValueError(
            f"expected one share for each path of the relaxed layers, {sizes}, got {got}; see the "
            f"layers {wrong}"
        )
    return shares


def dropped_paths(relaxed: Mapping[str, Relaxed], shares: Shares, threshold: float) -> Dropped:
    """Paths with zero output and paths with a share below the threshold, never all of a layer."""
    found: Dropped = {}
    for name, layer in relaxed.items():
        size = [math.inf if share is None else share for share in shares[name]]
        zero = [layer.path(i).is_zero() for i in range(len(size))]
        found[name] = {i for i, s in enumerate(size) if zero[i] or s < threshold}
        if len(found[name]) == len(size):
            found[name].remove(max(found[name], key=lambda i: (not zero[i], size[i])))
    return found


@dataclass
class Choice:
    """A threshold, and why."""

    value: float | None
    chosen_by: str
    candidates: list[dict[str, Any]] = field(default_factory=list)


class _Nothing(nn.Module):
    """In place of a path that was dropped, so that the others keep their names."""

    group = None

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


def choose_by_evidence(
    model: nn.Module, relaxed: Mapping[str, Relaxed], shares: Shares, razor: Razor, loader: Loader
) -> Choice:
    """The threshold after which the evidence is highest; of equals the largest."""
    distinct = sorted({s for values in shares.values() for s in values if s is not None})
    trials: list[tuple[float, Dropped]] = []
    for threshold in (0.0, *(math.nextafter(share, math.inf) for share in distinct)):
        drop = dropped_paths(relaxed, shares, threshold)
        if threshold == 0:
            drop = {name: set() for name in relaxed}
        if not trials or drop != trials[-1][1]:
            trials.append((threshold, drop))
    pruned = copy.deepcopy(model)  # each trial drops what the one before it did, and more
    layers = {name: pruned.get_submodule(name) for name in relaxed}
    candidates: list[dict[str, Any]] = []
    with _progress(len(trials)) as advance:
        for threshold, drop in trials:
            for name, layer in layers.items():
                assert isinstance(layer, Relaxed)
                for i in drop[name]:
                    layer.paths[i] = _Nothing()
            value = float(_same_prior(razor, pruned).evidence(loader).log_evidence)
            dropped = sum(map(len, drop.values()))
            candidates.append({"threshold": threshold, "dropped": dropped, "log_evidence": value})
            advance()
    best = max(candidates, key=lambda c: (c["log_evidence"], c["threshold"]))
    return Choice(best["threshold"], "chosen by evidence", candidates)


def _same_prior(razor: Razor, model: nn.Module) -> Razor:
    """A razor for a part of another one's weights, with the same precision for each of them."""
    groups = "diagonal" if razor.prior.diagonal else "tensor"
    config = replace(razor.config, prior_groups=groups, prior_precision=1.0, free_precision=None)
    found = Razor(model, copy.deepcopy(razor.likelihood), razor.n_data, config)
    with torch.no_grad():
        for name in weights(model):
            found.prior.log_of(name).copy_(razor.prior.log_of(name))
    return found


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar, on a terminal, if it takes a while; or silence."""
    from rich.console import Console
    from rich.progress import Progress

    start, done = time.perf_counter(), 0
    bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
    task = bar.add_task("evidence without each path", total=total)

    def advance() -> None:
        nonlocal done
        done += 1
        bar.update(task, completed=done)
        if time.perf_counter() - start > PATIENCE:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
