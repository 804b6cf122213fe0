r"""Collapse a relaxed network to a plain one, without the paths that the evidence switched off.

The share of a path is its part of its layer's effective parameters, $\gamma_p / \sum_q \gamma_q$.
Paths with a share below a threshold are dropped, and the others are merged if possible
(`symrazor.layers.merging`). The threshold is given, or the evidence chooses it. The result consists
of torch.nn modules and torch.fx graphs: it loads and runs without this library.
"""

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from symrazor.accelerate.torch_internals import is_compiled, tree_leaves
from symrazor.core.parameters import Hyper, weights
from symrazor.data.batches import Input, Loader, call
from symrazor.inference.razor import Razor
from symrazor.invariance.averaged_network import Augmented
from symrazor.layers.merging import Rewriter
from symrazor.layers.path import is_real, is_symrazor_module
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.reading import Reading, path_names

Report = dict[str, Any]
Shares = Mapping[str, Sequence[float | None]]
"""Layer name -> share of each path in the layer's effective parameters; None for a frozen path."""
Dropped = dict[str, set[int]]
"""Layer name -> paths to drop."""
PROGRESS_BAR_DELAY_SECONDS = 2.0
"""Time before a progress bar appears."""
ROUNDING_TOLERANCE = 1e-6
"""Amount by which rounding may move a share out of [0, 1]."""
DEFAULT_THRESHOLD = 0.01
"""Default share below which a path is dropped."""
MIN_TIMED_PASSES = 5
"""Minimal number of forward passes that are timed per model."""


@dataclass
class Choice:
    """A threshold and how it was chosen."""

    value: float | None
    chosen_by: str
    candidates: list[dict[str, Any]] = field(default_factory=list)


def collapse(
    model: nn.Module,
    example_input: Input,
    *,
    shares: Shares | Reading | None = None,
    threshold: float | Literal["evidence"] | None = None,
    razor: Razor | None = None,
    loader: Loader | None = None,
    structure: str | None = None,
) -> nn.Module:
    """Return the network as plain torch modules, without the paths that the evidence switched off.

    Layers of this library are replaced. A convolution at stride 1 becomes an nn.Conv1d to
    nn.Conv3d, a dense path an nn.Linear; adaptive subsampling and factored paths become torch.fx
    graphs. Paths of a layer are merged if that does not increase the cost. Convolutions with
    adaptive subsampling choose the pixels to keep from their own output, so they cannot be merged
    with other paths. Other modules stay; they must not access the insides of the layers they call.

    Args:
        model: a network with relaxed layers; it is not changed.
        example_input: a batch of inputs, on which the report is measured.
        shares: share of each path of each relaxed layer, or a reading. Without shares, only paths
            whose output is zero for every input are dropped; these are always dropped.
        threshold: paths with a smaller share are dropped, but never all paths of a layer; None for
            0.01. "evidence" tries every threshold that changes the result and takes the one with
            the highest Laplace evidence, at the current weights and precisions.
        razor: the razor of the model, for "evidence".
        loader: the training data, for "evidence".
        structure: structure of the curvature, for "evidence"; None for that of the razor.

    Returns:
        A copy in eval mode. Its attribute `collapse_report` is a JSON-ready dictionary with the
        fate of each path; parameters, FLOPs and latency before and after; the relative change of
        the outputs; and how the threshold was chosen. `collapse_table` prints it.

    Raises:
        ValueError: if the model has no relaxed layers, the shares do not match them, a threshold is
            given without shares, or a layer cannot be written in plain torch.
    """
    _check_model(model)
    before = copy.deepcopy(model).eval()
    relaxed = {name: m for name, m in before.named_modules() if isinstance(m, Relaxed)}
    if threshold == "evidence":
        if razor is None or loader is None or razor.model is not model:
            raise ValueError(
                'threshold="evidence" needs razor=, the razor of this model, and loader=, its '
                "training data. Pass both, or a number as threshold."
            )
        if shares is None:
            evidence = razor.evidence(loader, structure=structure)
            shares = path_shares(model, evidence.effective_parameters)
        layer_shares = match_shares(shares, relaxed)
        choice = choose_by_evidence(before, relaxed, layer_shares, razor, loader, structure)
    else:
        choice = _fixed_threshold(threshold, shares)
        layer_shares = match_shares(shares, relaxed)
    rewriter = Rewriter(
        before, example_input, dropped_paths(relaxed, layer_shares, choice.value or 0.0)
    )
    plain = rewriter.rewrite(copy.deepcopy(before), "").eval()
    remaining = sorted({type(m).__name__ for m in plain.modules() if is_symrazor_module(m)})
    if remaining:
        raise ValueError(f"These layers cannot be written in plain torch: {remaining}.")
    if isinstance(plain, torch.fx.GraphModule):  # a copied GraphModule loses its attributes
        plain = nn.Sequential(plain).eval()
    plain.collapse_report = {  # type: ignore[assignment]
        "layers": [
            _layer_report(name, layer, layer_shares[name], rewriter.terms[name])
            for name, layer in relaxed.items()
        ],
        "threshold": asdict(choice),
        **compare(before, plain, example_input),
    }
    return plain


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if is_compiled(model):
        raise ValueError(
            "The layers of a compiled module cannot be replaced. Pass the module that was given to "
            "torch.compile."
        )
    if any(isinstance(m, Augmented) for m in model.modules()):
        raise ValueError(
            "An Augmented network averages over transformed copies and cannot be collapsed. Use "
            "collapse(model.network, x), or model.network itself if its layers are plain."
        )
    if not any(is_symrazor_module(m) and not isinstance(m, Hyper) for m in model.modules()):
        raise ValueError(
            f"This {type(model).__name__} is a plain network already: it has no layers of "
            "symrazor.layers to collapse."
        )


def _fixed_threshold(threshold: float | None, shares: Shares | Reading | None) -> Choice:
    number = DEFAULT_THRESHOLD if threshold is None else threshold
    if not is_real(number) or not 0 <= number <= 1:
        raise ValueError(f'threshold must be between 0 and 1 or "evidence", got {threshold!r}.')
    if threshold is not None and shares is None:
        raise ValueError(f"A threshold of {threshold} needs the shares of the paths. Pass shares=.")
    chosen_by = "by default" if threshold is None else "as given"
    return Choice(None if shares is None else float(number), chosen_by)


def _layer_report(
    name: str, layer: Relaxed, shares: Sequence[float | None], terms: list[list[int]]
) -> Report:
    """Describe what became of each path of a layer; `terms` lists the paths of each kept term."""
    together = {i: len(term) for term in terms for i in term}
    fates = {0: "dropped", 1: "kept"}
    return {
        "name": name,
        "paths": [
            {
                "path": layer.path(i).label,
                "group": layer.path(i).group,
                "share": share,
                "fate": fates.get(together.get(i, 0), "merged"),
            }
            for i, share in enumerate(shares)
        ],
        "terms": terms,
    }


def path_shares(model: nn.Module, effective_parameters: Mapping[str, float]) -> Shares:
    """Return the share of each path of each relaxed layer in the layer's effective parameters.

    The share is None for a path without trainable weights, which has no evidence.
    """
    shares: dict[str, list[float | None]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Relaxed):
            continue
        gamma = [
            [g for key, g in effective_parameters.items() if key.startswith(f"{path}.")]
            for path in path_names(name, layer)
        ]
        total = sum(map(sum, gamma))
        equal_share = 1 / max(1, sum(map(bool, gamma)))
        shares[name] = [
            (sum(g) / total if total > 0 else equal_share) if g else None for g in gamma
        ]
    return shares


def match_shares(shares: Shares | Reading | None, relaxed: Mapping[str, Relaxed]) -> Shares:
    """Return shares for exactly the given layers; ValueError if they do not match."""
    if shares is None:
        return {name: [None] * len(layer.paths) for name, layer in relaxed.items()}
    if isinstance(shares, Reading):
        by_name = {
            layer.name: [path.share if path.parameters else None for path in layer.paths]
            for layer in shares.layers
        }
        shares = {name: by_name[name] for name in relaxed if name in by_name}
    value: Any = shares
    if not isinstance(value, Mapping) or not all(
        isinstance(values, list | tuple) for values in value.values()
    ):
        raise ValueError(f"shares must be {{layer name: [share of each path]}}, got {value!r}.")
    out_of_range = {
        name: list(values) for name, values in shares.items() if not all(map(_is_share, values))
    }
    if out_of_range:
        raise ValueError(
            f"shares must be between 0 and 1, or None for a frozen path, got {out_of_range}."
        )
    sizes = {name: len(layer.paths) for name, layer in relaxed.items()}
    got = {name: len(values) for name, values in shares.items()}
    if sizes != got:
        wrong = sorted(n for n in {*sizes, *got} if sizes.get(n) != got.get(n))
        raise ValueError(
            f"shares must have one entry for each path of each relaxed layer. Layers {wrong}: the "
            f"model has {sizes} paths, shares has {got} entries."
        )
    return shares


def _is_share(value: float | None) -> bool:
    return value is None or (is_real(value) and abs(value - 0.5) <= 0.5 + ROUNDING_TOLERANCE)


def dropped_paths(relaxed: Mapping[str, Relaxed], shares: Shares, threshold: float) -> Dropped:
    """Return paths with zero output or a share below the threshold, but never all of a layer."""
    dropped: Dropped = {}
    for name, layer in relaxed.items():
        sizes = [math.inf if share is None else share for share in shares[name]]
        is_zero = [layer.path(i).is_zero() for i in range(len(sizes))]
        dropped[name] = {i for i, s in enumerate(sizes) if is_zero[i] or s < threshold}
        if len(dropped[name]) == len(sizes):
            dropped[name].remove(max(dropped[name], key=lambda i: (not is_zero[i], sizes[i])))
    return dropped


class _DroppedPath(nn.Module):
    """Takes the place of a dropped path, so that the other paths keep their names."""

    group = None

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


def choose_by_evidence(
    model: nn.Module,
    relaxed: Mapping[str, Relaxed],
    shares: Shares,
    razor: Razor,
    loader: Loader,
    structure: str | None = None,
) -> Choice:
    """Return the threshold with the highest evidence, the largest one of equals."""
    distinct = sorted({s for values in shares.values() for s in values if s is not None})
    trials: list[tuple[float, Dropped]] = [(0.0, {name: set() for name in relaxed})]
    for threshold in (math.nextafter(share, math.inf) for share in distinct):
        drop = dropped_paths(relaxed, shares, threshold)
        if drop != trials[-1][1]:
            trials.append((threshold, drop))
    pruned = copy.deepcopy(model)  # every trial drops the paths of the previous trial, and more
    layers = {name: pruned.get_submodule(name) for name in relaxed}
    candidates: list[dict[str, Any]] = []
    with _progress(len(trials)) as advance:
        for threshold, drop in trials:
            for name, layer in layers.items():
                assert isinstance(layer, Relaxed)
                for i in drop[name]:
                    layer.paths[i] = _DroppedPath()
            prior, likelihood = (
                razor.prior.restrict(weights(pruned)),
                copy.deepcopy(razor.likelihood),
            )
            trial = Razor(pruned, likelihood, razor.n_data, razor.config, prior)
            value = float(trial.evidence(loader, structure=structure).log_evidence)
            dropped = sum(map(len, drop.values()))
            candidates.append({"threshold": threshold, "dropped": dropped, "log_evidence": value})
            advance()
    best = max(candidates, key=lambda c: (c["log_evidence"], c["threshold"]))
    return Choice(best["threshold"], "chosen by evidence", candidates)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal if the work takes a while."""
    from rich.console import Console
    from rich.progress import Progress

    start = time.perf_counter()
    bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
    task = bar.add_task("evidence without each path", total=total)

    def advance() -> None:
        bar.advance(task)
        if time.perf_counter() - start > PROGRESS_BAR_DELAY_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


def batch_length(x: Input) -> int:
    """Return the number of inputs in a batch."""
    return len(next(part for part in tree_leaves(x) if isinstance(part, Tensor)))


@torch.no_grad()
def flops(model: nn.Module, x: Input) -> int:
    """Return the floating-point operations per input of matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        call(model, x)
    return int(counter.get_total_flops()) // batch_length(x)


@torch.no_grad()
def latencies(models: list[nn.Module], x: Input, seconds: float = 0.3) -> list[float]:
    """Return the median time of a forward pass in seconds, for several models.

    The models take turns, so that a busy machine slows all of them equally. Each timed pass follows
    an untimed one of the same model, which fills the caches. Every model runs at least
    `MIN_TIMED_PASSES` times, and for `seconds` in total.
    """
    durations: list[list[float]] = [[] for _ in models]
    end = time.perf_counter() + seconds
    while len(durations[-1]) < MIN_TIMED_PASSES or time.perf_counter() < end:
        for model, times in zip(models, durations, strict=True):
            call(model, x)
            _wait()
            start = time.perf_counter()
            call(model, x)
            _wait()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in durations]


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def change(before: Tensor, after: Tensor) -> dict[str, float]:
    r"""Return the relative change of outputs [n, ...].

    "rms" is $\mathrm{rms}(f' - f) / \mathrm{rms}(f)$ over all inputs, "largest" the largest
    $\mathrm{rms}(f'_n - f_n) / \mathrm{rms}(f)$ of a single input.
    """
    scale = float(before.double().square().mean().sqrt()) or 1.0
    squares = (after.double() - before.double()).square().reshape(len(before), -1).mean(1)
    return {
        "rms": float(squares.mean().sqrt()) / scale,
        "largest": float(squares.max().sqrt()) / scale,
    }


@torch.no_grad()
def compare(before: nn.Module, after: nn.Module, x: Input) -> Report:
    """Return the change of the outputs, and parameters, FLOPs and latency of both models."""
    models = {"before": before, "after": after}
    seconds = zip(models, latencies([before, after], x), strict=True)
    return {
        "data": batch_length(x),
        "change": change(call(before, x), call(after, x)),
        "parameters": {k: sum(p.numel() for p in m.parameters()) for k, m in models.items()},
        "flops": {k: flops(m, x) for k, m in models.items()},
        "latency_ms": {k: 1e3 * duration for k, duration in seconds},
    }
