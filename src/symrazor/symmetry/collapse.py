r"""A plain network out of a relaxed one: without the paths that the evidence switched off.

A path's share is its part of its layer's effective parameters, $\gamma_p / \sum_q \gamma_q$. Paths
with a share below a threshold are dropped, the others are merged where they can be
(`symrazor.layers.plain`), and what is left is made of torch.nn modules and torch.fx graphs: it
loads and runs without this library.
"""

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from symrazor.core.parameters import Hyper, weights
from symrazor.curvature.estimate import Loader
from symrazor.curvature.tape import Input, call
from symrazor.inference.razor import Razor
from symrazor.invariance.averaged_network import Augmented
from symrazor.layers.path import is_real, is_symrazor_module
from symrazor.layers.plain import Rewriter
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.reading import Reading

Report = dict[str, Any]
Shares = Mapping[str, Sequence[float | None]]
"""Layer name -> share of each path in the layer's effective parameters; None for a frozen path."""

Dropped = dict[str, set[int]]
"""Layer name -> paths to drop."""

PROGRESS_BAR_DELAY_SECONDS = 2.0
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
        if time.perf_counter() - start > PROGRESS_BAR_DELAY_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


THRESHOLD = 0.01
"""Share below which a path is dropped, unless another one is given."""


def collapse(
    model: nn.Module,
    example_input: Input,
    *,
    shares: Shares | Reading | None = None,
    threshold: float | Literal["evidence"] | None = None,
    razor: Razor | None = None,
    loader: Loader | None = None,
) -> nn.Module:
    """The network without the paths that the evidence switched off, as plain torch modules.

    Layers of this library are replaced: a convolution at stride 1 is a bare nn.Conv1d to 3d, a
    dense path an nn.Linear, adaptive subsampling and factored paths are torch.fx graphs. Several
    paths of a layer are merged where that costs no more. Convolutions with adaptive subsampling
    choose which pixels to keep from their own output, so they cannot be merged with other paths.
    Modules of your own classes stay; they must not reach into the layers they call.

    Args:
        model: with relaxed layers; it is not changed.
        example_input: a batch as the model takes it; the report is measured on it.
        shares: of each path of each relaxed layer, or a reading. Without any, only paths whose
            output is zero for every input are dropped. These are always dropped.
        threshold: drop the paths with a smaller share, but never all of a layer; None for 0.01.
            "evidence" tries every threshold that makes a difference, none included, and takes the
            one after which the Laplace evidence, with weights and precisions as they are, is
            highest.
        razor: of the model, for "evidence".
        loader: the training data, for "evidence".

    Returns:
        A copy in eval mode. Its attribute `collapse_report` is a dictionary ready for JSON: what
        became of each path; parameters, FLOPs and latency before and after; relative change of the
        outputs; how the threshold was chosen. `collapse_table` prints it.

    Raises:
        ValueError: no relaxed layers, shares that do not match them, a threshold without shares,
            or layers of this library that cannot be written in plain torch.
    """
    before = copy.deepcopy(_checked(model)).eval()
    relaxed = {name: m for name, m in before.named_modules() if isinstance(m, Relaxed)}
    if threshold == "evidence":
        razor, loader = _training_of(model, razor, loader)
        if shares is None:
            shares = path_shares(model, razor.evidence(loader).effective_parameters)
        known = match_shares(shares, relaxed)
        choice = choose_by_evidence(before, relaxed, known, razor, loader)
    else:
        choice = _as_given(threshold, shares)
        known = match_shares(shares, relaxed)
    rewriter = Rewriter(before, example_input, dropped_paths(relaxed, known, choice.value or 0.0))
    plain = _rewritten(before, rewriter)
    plain.collapse_report = {  # type: ignore[assignment]
        "layers": [
            _fates(name, layer, known[name], rewriter.terms[name])
            for name, layer in relaxed.items()
        ],
        "threshold": asdict(choice),
        **compare(before, plain, example_input),
    }
    return plain


def collapse_table(plain: nn.Module) -> str:
    """The report of a collapsed network, for the terminal."""
    report = getattr(plain, "collapse_report", None)
    if not isinstance(report, dict):
        raise ValueError(f"expected a network made by collapse, got {type(plain).__name__}")
    return _table(report)


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "expected a module whose layers can be replaced, got a torch.compile'd one; pass the "
            "module it was made from"
        )
    if any(isinstance(m, Augmented) for m in model.modules()):
        raise ValueError(
            "expected a network of one pass over each datum, got an Augmented one; do: "
            "collapse(model.network, x), which takes data as they are, or model.network itself if "
            "its layers are plain"
        )
    if not any(is_symrazor_module(m) and not isinstance(m, Hyper) for m in model.modules()):
        raise ValueError(
            f"expected a model with relaxed layers, got {type(model).__name__} without any layer "
            "of symrazor.layers; it is a plain network already"
        )
    return model


def _training_of(
    model: nn.Module, razor: Razor | None, loader: Loader | None
) -> tuple[Razor, Loader]:
    """Both, if they can measure the evidence of this model."""
    if razor is None or loader is None or razor.model is not model:
        raise ValueError(
            "expected a razor of this very model and a loader with its training data for "
            'threshold="evidence", got something else; pass both, or a number as threshold'
        )
    return razor, loader


def _as_given(threshold: float | None, shares: Shares | Reading | None) -> Choice:
    """A threshold that is not searched for."""
    number = THRESHOLD if threshold is None else threshold
    if not is_real(number) or not 0 <= number <= 1:
        raise ValueError(f'expected a threshold from 0 to 1 or "evidence", got {threshold!r}')
    if threshold is not None and shares is None:
        raise ValueError(f"expected shares for the threshold {threshold}, got none; pass shares=")
    by = "by default" if threshold is None else "as given"
    return Choice(None if shares is None else float(number), by)


def _rewritten(before: nn.Module, rewriter: Rewriter) -> nn.Module:
    """A copy in plain torch, in eval mode, that can have attributes."""
    plain = rewriter.rewrite(copy.deepcopy(before), "")
    left = sorted({type(m).__name__ for m in plain.modules() if is_symrazor_module(m)})
    if left:
        raise ValueError(f"expected layers that can be written in plain torch, got {left}")
    if isinstance(plain, torch.fx.GraphModule):  # copies of a graph lose their attributes
        plain = nn.Sequential(plain)
    return plain.eval()


def _fates(
    name: str, layer: Relaxed, shares: Sequence[float | None], terms: list[list[int]]
) -> Report:
    """What became of each path of a layer; `terms` are the paths of each term that is left."""
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


FEWEST_REPEATS = 5


def batch_length(x: Input) -> int:
    """Number of data in an input."""
    return len(next(part for part in tree_leaves(x) if isinstance(part, Tensor)))


def parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def flops(model: nn.Module, x: Input) -> int:
    """Floating-point operations of one datum: products and sums of matrices and convolutions."""
    with FlopCounterMode(display=False) as counter:
        call(model, x)
    return int(counter.get_total_flops()) // batch_length(x)


@torch.no_grad()
def latencies(models: list[nn.Module], x: Input, seconds: float = 0.3) -> list[float]:
    """Median time of a forward pass in seconds, of several models in turn.

    In turn, so that a busy machine slows all of them alike; each pass comes after another one of
    the same model, which finds the caches as the other models left them and does not count. Each
    runs at least a few times, and as often as fits into the given time.
    """
    found: list[list[float]] = [[] for _ in models]
    end = time.perf_counter() + seconds
    while len(found[-1]) < FEWEST_REPEATS or time.perf_counter() < end:
        for model, times in zip(models, found, strict=True):
            call(model, x)
            _wait()
            start = time.perf_counter()
            call(model, x)
            _wait()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in found]


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def change(before: Tensor, after: Tensor) -> dict[str, float]:
    r"""Relative change of outputs [n, ...].

    "rms" is $\mathrm{rms}(f' - f) / \mathrm{rms}(f)$ over all data, "largest" the largest
    $\mathrm{rms}(f'_n - f_n) / \mathrm{rms}(f)$ of one datum.
    """
    scale = float(before.double().square().mean().sqrt()) or 1.0
    squares = (after.double() - before.double()).square().reshape(len(before), -1).mean(1)
    return {
        "rms": float(squares.mean().sqrt()) / scale,
        "largest": float(squares.max().sqrt()) / scale,
    }


@torch.no_grad()
def compare(before: nn.Module, after: nn.Module, x: Input) -> Report:
    """Change of the outputs, and parameters, FLOPs and latency of both, on one input."""
    slow, fast = latencies([before, after], x)
    return {
        "data": batch_length(x),
        "change": change(call(before, x), call(after, x)),
        "parameters": {"before": parameters(before), "after": parameters(after)},
        "flops": {"before": flops(before, x), "after": flops(after, x)},
        "latency_ms": {"before": 1e3 * slow, "after": 1e3 * fast},
    }


def _table(report: Report) -> str:
    """A collapse report for the terminal."""
    width = max([5, *(len(layer["name"]) for layer in report["layers"])])
    lines = [f"{'layer':<{width}}  {'path':<12}{'share':>8}   fate"] if report["layers"] else []
    for layer in report["layers"]:
        for path in layer["paths"]:
            share = "" if path["share"] is None else f"{100 * path['share']:.1f} %"
            name = f"{layer['name']:<{width}}  {path['path']:<12}"
            lines.append(f"{name}{share:>8}   {path['fate']}")
    lines.append(f"{'':<26}{'before':>14}{'after':>14}")
    for key, title, form in (
        ("parameters", "parameters", ",d"),
        ("flops", "FLOPs per datum", ",d"),
        ("latency_ms", f"ms for {report['data']} data", ",.3f"),
    ):
        pair = report[key]
        lines.append(f"{title:<26}{pair['before']:>14{form}}{pair['after']:>14{form}}")
    moved = report["change"]
    lines.append(
        f"outputs change by {moved['rms']:.1e} (rms; {moved['largest']:.1e} for one datum)"
    )
    return "\n".join([*lines, _threshold(report["threshold"])])


def _threshold(chosen: Report) -> str:
    """How the paths to drop were chosen, in words."""
    if chosen["value"] is None:
        return "only paths with zero output were dropped: no shares were given"
    text = f"threshold on shares: {chosen['value']:.3g}, {chosen['chosen_by']}"
    if chosen["candidates"]:
        full, best = chosen["candidates"][0], max(c["log_evidence"] for c in chosen["candidates"])
        text += f": {full['log_evidence']:,.1f} with all paths, {best:,.1f} with those kept"
    return text
