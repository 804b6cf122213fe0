"""What a network costs, before and after: parameters, FLOPs, latency; and how far outputs moved."""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from symrazor.curvature.tape import Input, call

Report = dict[str, Any]
FEWEST_REPEATS = 5


def count(x: Input) -> int:
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
    return int(counter.get_total_flops()) // count(x)


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
        "data": count(x),
        "change": change(call(before, x), call(after, x)),
        "parameters": {"before": parameters(before), "after": parameters(after)},
        "flops": {"before": flops(before, x), "after": flops(after, x)},
        "latency_ms": {"before": 1e3 * slow, "after": 1e3 * fast},
    }


def table(report: Report) -> str:
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
