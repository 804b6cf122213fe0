r"""Measure the cost of layers: F-FC against a convolution, and the evidence of relaxed networks.

| comparison | goal |
|---|---|
| F-FC, forward and backward, over a 3 x 3 convolution; 20 to 20 channels, 16 x 16, N = 128 | 1.1 |
| S-CONV over CONV, and S-FC over F-FC, half as many anchors as weights; the same sizes | 1.3 |
| GCONV (p4, p4m) over CONV of as many channels, the same arithmetic; 32 to 32, 16 x 16 | 1.3 |
| a collapsed network over the CNN it was relaxed from, forward; four blocks, N = 32 | 1.05 |
| one evidence estimate of the F-FC+CONV net over that of the CONV net; width 10, N = 1000 | 2.5 |

Rows without a goal are for information: the dense path FC; a network of S-FC; the estimate with one
probe; and the growth of the estimate. A block with i features and r rows (samples x uses x columns
of the root) costs $\min(r, i)^3$ for its eigenvalues and $r\, i\, \min(r, i)$ for its products, so
that the dense path is affordable for few samples: it should grow linearly in the pixels while
r < i.

Variants are timed in turn, round after round, and medians are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.bench.evidence import METHODS, data, estimate
from symrazor.bench.measure import Runs, Timing, fresh_peak, interleave, peak_memory, write_rows
from symrazor.data import TensorLoader
from symrazor.layers import FC, FFC, SFC, Conv, GConv, Relaxed, SConv
from symrazor.layers.path import Path as LayerPath
from symrazor.symmetry.collapse import collapse
from symrazor.symmetry.relax import relax

Make = Callable[..., LayerPath]


@dataclass(frozen=True)
class Row:
    """One variant: its time relative to the first of its comparison, and its peak memory."""

    comparison: str
    variant: str
    ratio_cpu: float
    ratio_wall: float
    goal: float | None
    wall_ms: float
    peak_mb: float


@dataclass(frozen=True)
class Comparison:
    """Variants that are timed together; ratios are relative to the first one.

    Args:
        name: Name of the comparison.
        runs: Variant -> function to time.
        goals: Variant -> largest acceptable ratio.
        inner: Calls per measurement, for short runs; each has one more before it, untimed.
    """

    name: str
    runs: Runs
    goals: dict[str, float]
    inner: int = 1

    def times(self, rounds: int) -> dict[str, Timing]:
        """Return interleaved medians, in seconds per call."""
        repeated: Runs = {
            name: partial(_repeat, run, self.inner) for name, run in self.runs.items()
        }
        times = interleave(repeated, rounds, self.runs if self.inner > 1 else None)
        return {n: Timing(t.cpu / self.inner, t.wall / self.inner) for n, t in times.items()}


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def forward_backward(
    layer: nn.Module, x: Tensor, out_shape: Sequence[int] | None = None
) -> Callable[[], object]:
    """Return a forward pass with the gradients of input and weights."""
    x = x.clone().requires_grad_()
    targets = [x, *layer.parameters()]
    shape = x.shape if out_shape is None else out_shape
    cotangent = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return lambda: torch.autograd.grad(layer(x), targets, cotangent)


def network(paths: Sequence[Make], alpha: int = 10, size: int = 32) -> nn.Module:
    """Return the eight-block network of ELLA section 6.2, each block the sum of some paths."""
    torch.manual_seed(0)
    channels = [3, *(alpha * m for m in (1, 2, 2, 4, 4, 8, 8, 16))]
    blocks: list[nn.Module] = []
    for c, d, stride in zip(channels[:-1], channels[1:], (1, 2, 1, 2, 1, 2, 2, 2), strict=True):
        blocks += [Relaxed([path(c, d, (size, size), stride) for path in paths]), nn.ReLU()]
        size //= stride
    head = [nn.Flatten(), nn.Linear(16 * alpha, 64 * alpha), nn.ReLU()]
    return nn.Sequential(*blocks, *head, nn.Linear(64 * alpha, 10))


def layers(batch: int = 128) -> Comparison:
    """Compare F-FC, and FC for information, with a 3 x 3 convolution."""
    torch.manual_seed(0)
    x = torch.randn(batch, 20, 16, 16)
    runs: Runs = {
        "3 x 3 convolution": forward_backward(nn.Conv2d(20, 20, 3, padding=1), x),
        "F-FC": forward_backward(FFC(20, 20, (16, 16)), x),
        "FC": forward_backward(FC(20, 20, (16, 16)), x),
    }
    return Comparison("forward+backward", runs, {"F-FC": 1.1}, inner=3)


def sparse_convolution(batch: int = 128) -> Comparison:
    """Compare S-CONV with CONV, also with a learned lengthscale."""
    torch.manual_seed(0)
    x, sizes = torch.randn(batch, 20, 16, 16), (20, 20, (16, 16))
    runs: Runs = {
        "CONV": forward_backward(Conv(*sizes), x),
        "S-CONV": forward_backward(SConv(*sizes), x),
        "S-CONV, random omega": forward_backward(SConv(*sizes, learn_omega="weight"), x),
    }
    return Comparison("forward+backward", runs, {"S-CONV": 1.3}, inner=3)


def sparse_factors(batch: int = 128) -> Comparison:
    """Compare S-FC with F-FC; also with learned lengthscales, in both forms of the basis."""
    torch.manual_seed(0)
    x, sizes = torch.randn(batch, 20, 16, 16), (20, 20, (16, 16))
    random: dict[str, Any] = {"learn_omega": "weight"}
    runs: Runs = {
        "F-FC": forward_backward(FFC(*sizes), x),
        "S-FC": forward_backward(SFC(*sizes), x),
        "S-FC, random omega, sum": forward_backward(SFC(*sizes, form="sum", **random), x),
        "S-FC, random omega, interpolate": forward_backward(SFC(*sizes, **random), x),
    }
    return Comparison("forward+backward", runs, {"S-FC": 1.3}, inner=3)


def sparse_network(batch: int = 128) -> Comparison:
    """Compare the eight-block network of S-FC with that of F-FC."""
    x = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    runs: Runs = {
        "F-FC, eight blocks": forward_backward(network([FFC]), x, (batch, 10)),
        "S-FC, eight blocks": forward_backward(network([SFC]), x, (batch, 10)),
    }
    return Comparison("forward+backward", runs, {}, inner=2)


def group_convolution(batch: int = 128) -> Comparison:
    """Compare GCONV with a convolution of as many channels, which does the same arithmetic."""
    torch.manual_seed(0)
    x, sizes = torch.randn(batch, 32, 16, 16), (32, 32, (16, 16))
    runs: Runs = {
        "CONV": forward_backward(Conv(*sizes), x),
        "GCONV p4": forward_backward(GConv(*sizes, group="p4"), x),
        "GCONV p4m": forward_backward(GConv(*sizes, group="p4m"), x),
        "GCONV p4, separable": forward_backward(GConv(*sizes, kind="separable"), x),
    }
    return Comparison("forward+backward", runs, {"GCONV p4": 1.3, "GCONV p4m": 1.3}, inner=3)


def collapsed(batch: int = 32) -> Comparison:
    """Compare a CNN written by hand with the same after it was relaxed and collapsed."""
    torch.manual_seed(0)
    channels, blocks = [3, 10, 20, 40, 80], list[nn.Module]()
    for c, d, stride in zip(channels[:-1], channels[1:], (1, 2, 1, 2), strict=True):
        blocks += [nn.Conv2d(c, d, 3, stride, padding=1), nn.ReLU()]
    cnn = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 10)).eval()
    x = torch.randn(batch, 3, 32, 32)
    plain = collapse(relax(cnn, x), x)
    runs: Runs = {"by hand": _forward(cnn, x), "collapsed": _forward(plain, x)}
    return Comparison("forward", runs, {"collapsed": 1.05}, inner=20)


def _forward(network: nn.Module, x: Tensor) -> Callable[[], object]:
    def run() -> Tensor:
        with torch.no_grad():
            y: Tensor = network(x)
        return y

    return run


def evidence(name: str = "exact", alpha: int = 10, n: int = 1000) -> Comparison:
    """Compare one estimate for the F-FC+CONV net with one for the CONV net."""
    loader = TensorLoader(*data(n), 250)
    runs: Runs = {
        "CONV": estimate(network([Conv], alpha), loader, METHODS[name]),
        "F-FC+CONV": estimate(network([FFC, Conv], alpha), loader, METHODS[name]),
    }
    goals = {"F-FC+CONV": 2.5} if name == "exact" else {}
    return Comparison(f"evidence, {name}, N={n}", runs, goals)


def growth_in_data() -> Comparison:
    """Measure a dense path with 3,072 input and 10,240 output features, for few samples."""
    model = nn.Sequential(FC(3, 10, (32, 32)), nn.Tanh(), nn.Flatten(), nn.Linear(10_240, 10))
    runs: Runs = {
        f"N={n}": estimate(model, TensorLoader(*data(n), 250), METHODS["exact"])
        for n in (8, 16, 32, 64)
    }
    return Comparison("growth with N, FC 3072 -> 10240", runs, {})


def growth_in_pixels(n: int = 16) -> Comparison:
    """Measure F-FC blocks of S = 256, 1024 and 4096 pixels, for 16 samples (at most 144 rows)."""
    runs: Runs = {}
    for size in (16, 32, 64):
        path = FFC(3, 10, (size, size))
        model = nn.Sequential(path, nn.Tanh(), nn.Flatten(), nn.Linear(10 * size**2, 10))
        x = torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))
        loader = TensorLoader(x, torch.arange(n) % 10, 250)
        runs[f"S={size**2}"] = estimate(model, loader, METHODS["exact"])
    return Comparison(f"growth with S, F-FC 3 -> 10 channels, N={n}", runs, {})


COMPARISONS: dict[str, Callable[[], Comparison]] = {
    "layers": layers,
    "sparse convolution": sparse_convolution,
    "sparse factors": sparse_factors,
    "sparse network": sparse_network,
    "group convolution": group_convolution,
    "collapsed": collapsed,
    "evidence": evidence,
    "evidence, one probe": partial(evidence, "one probe"),
    "growth in data": growth_in_data,
    "growth in pixels": growth_in_pixels,
}


def first_peak(comparison: str, variant: str, threads: int) -> float:
    """Return the `peak_memory` of one variant after a warm-up with small layers only."""
    torch.set_num_threads(threads)
    for run in layers(batch=2).runs.values():
        run()
    return peak_memory(COMPARISONS[comparison]().runs[variant])


def measure(key: str, rounds: int, threads: int) -> list[Row]:
    """Return the rows of one comparison."""
    comparison = COMPARISONS[key]()
    times = comparison.times(rounds)
    base = next(iter(times.values()))
    return [
        Row(
            comparison.name,
            variant,
            time.cpu / base.cpu,
            time.wall / base.wall,
            comparison.goals.get(variant),
            1000 * time.wall,
            fresh_peak(__name__, key, variant, threads),
        )
        for variant, time in times.items()
    ]


def main(
    rounds: int = 5,
    json_file: Path | None = None,
    threads: int = 2,
    only: Sequence[str] = tuple(COMPARISONS),
) -> list[Row]:
    """Measure, and write the rows as JSON if a file is given.

    Args:
        rounds: Interleaved repeats.
        json_file: File for the rows.
        threads: Torch threads.
        only: Keys of `COMPARISONS`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = [row for key in only for row in measure(key, rounds, threads)]
    finally:
        torch.set_num_threads(before)
    write_rows(rows, json_file)
    return rows
