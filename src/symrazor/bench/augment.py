"""Measure the cost of the evidence gradient in learned augmentation ranges, in epochs of SGD.

| comparison | goal |
|---|---|
| one estimate with its gradient in six ranges, S = 20, over an SGD epoch on all copies | 10 |
| its memory over that of one SGD step on a batch of all copies, plus the factors | 1 |

The network is the eight-convolution net of `bench.evidence` behind an affine augmentation. Both see
the same images, N samples with S copies each; a Razor splits each batch in two pieces by default.
Variants are timed in turn, and medians are compared. Memory is that of a fresh process; the factors
are counted in float64.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.bench.evidence import data, network
from symrazor.bench.measure import Runs, fresh_peak, interleave, peak_memory, write_rows
from symrazor.core.parameters import weights
from symrazor.data import TensorLoader
from symrazor.invariance import Augment, Augmented, affine
from symrazor.linalg.factor import Factor

SAMPLES = 20
GOAL = "evidence and gradient, one probe"


@dataclass(frozen=True)
class Row:
    """One variant: its time relative to the SGD epoch, and its peak memory.

    `of_batch` is the peak relative to that of the SGD epoch plus the size of the factors.
    """

    variant: str
    alpha: int
    ratio_cpu: float
    ratio_wall: float
    goal: float | None
    peak_mb: float
    of_batch: float


def variants(alpha: int, n: int, batch: int) -> Runs:
    """Return an SGD epoch, and estimates without and with the gradient in the ranges."""
    torch.manual_seed(0)
    model = Augmented(network(alpha), Augment(affine("affine", 0.1), SAMPLES)).eval()
    x, y = data(n)
    loader = TensorLoader(x, y, batch)
    methods = {
        "one probe": {"estimator": "mc"},
        "exact": {},
        "one probe, whole batches": {"estimator": "mc", "pieces": 1},
    }
    razors = {name: sr.Razor(model, "categorical", n, **method) for name, method in methods.items()}  # type: ignore[arg-type]
    runs: Runs = {"SGD epoch": lambda: _epoch(model, loader)}
    for name, razor in razors.items():
        runs[f"evidence, {name}"] = lambda razor=razor: razor.evidence(loader)  # type: ignore[misc]
        runs[f"evidence and gradient, {name}"] = lambda razor=razor: _gradient(razor, loader)  # type: ignore[misc]
    return runs


def _epoch(model: nn.Module, loader: TensorLoader) -> None:
    theta = list(weights(model).values())
    optimiser = torch.optim.SGD(theta, lr=1e-6)
    for x, y in loader:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()


def _gradient(razor: sr.Razor, loader: TensorLoader) -> object:
    state = razor.generator.get_state()
    curvature = razor._curvature(loader, None).prepare()
    razor.generator.set_state(state)
    return razor.hyper_gradient(loader, curvature)


def factors_mb(alpha: int) -> float:
    """Return the size of the Kronecker factors and dense blocks in float64, in megabytes."""
    x, y = data(2)
    razor = sr.Razor(network(alpha).eval(), "categorical", 2, estimator="mc")
    sums = razor._curvature(TensorLoader(x, y, 2), None).sums.values()
    matrices = [part.matrix if isinstance(part, Factor) else part for part in sums]
    return 8 * sum(matrix.numel() for matrix in matrices if isinstance(matrix, Tensor)) / 2**20


def first_peak(alpha: int, name: str, n: int, batch: int, threads: int) -> float:
    """Return the `peak_memory` of one variant after a warm-up on 2 samples only."""
    torch.set_num_threads(threads)
    variants(alpha, 2, 1)[name]()
    return peak_memory(variants(alpha, n, batch)[name])


def main(
    rounds: int = 3, file: Path | None = None, alpha: int = 4, n: int = 48, batch: int = 12
) -> list[Row]:
    """Measure all variants and write the rows to a file if one is given."""
    runs, threads = variants(alpha, n, batch), torch.get_num_threads()
    times = interleave(runs, rounds)
    base = times["SGD epoch"]
    peaks = {name: fresh_peak(__name__, alpha, name, n, batch, threads) for name in runs}
    allowed = peaks["SGD epoch"] + factors_mb(alpha)
    rows = [
        Row(
            name,
            alpha,
            times[name].cpu / base.cpu,
            times[name].wall / base.wall,
            10.0 if name == GOAL else None,
            peaks[name],
            peaks[name] / allowed,
        )
        for name in runs
    ]
    write_rows(rows, file)
    return rows
