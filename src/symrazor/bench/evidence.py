"""Measure the cost of one evidence estimate, in epochs of plain SGD over the same data.

The network is the eight-convolution net of ELLA section 6.2 (channels 3, a, 2a, 2a, 4a, 4a, 8a, 8a,
16a; strides 1, 2, 1, 2, 1, 2, 2, 2; then 16a -> 64a -> 10). An estimate includes the factors,
float64 eigenvalues, the evidence and its gradient in all log precisions. Variants are timed in
turn, round after round, so that other load on the machine affects all of them equally, and medians
are compared.

With `--structures`, EKFAC, the kernel form, its blocks of 200 samples (all outputs, or one random
output per batch), one mini-batch of 200 samples, and the evaluation of the kernel form for new
precisions are timed, too.

Two more tables: `growth`, the cost against the number of samples and outputs; `probes`, the error
of the Monte Carlo estimators relative to the exact one.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symrazor.bench.measure import Runs, fresh_peak, interleave, peak_memory, write_rows
from symrazor.core.likelihood import Categorical, Probe
from symrazor.core.parameters import weights
from symrazor.core.prior import GaussianPrior
from symrazor.curvature.coverage import layers
from symrazor.curvature.estimate import Curvature, Method, collect_curvature
from symrazor.curvature.task import CurvatureTask
from symrazor.data import TensorLoader, digits
from symrazor.inference.evidence import Evidence, laplace_evidence

OUTPUTS = 10
Padding = Literal["zeros", "reflect", "replicate", "circular"]


@dataclass(frozen=True)
class Row:
    """One line of the result; ratios are to the plain NCHW SGD epoch of the same network."""

    net: str
    alpha: int
    padding: str
    estimator: str
    ratio_cpu: float
    ratio_wall: float
    peak_mb: float
    log_evidence: float | None


def network(
    alpha: int, padding: Padding = "zeros", outputs: int = OUTPUTS, seed: int = 0
) -> nn.Module:
    """Return the eight-convolution net for 32 x 32 colour images."""
    torch.manual_seed(seed)
    channels = [3, *(alpha * m for m in (1, 2, 2, 4, 4, 8, 8, 16))]
    blocks: list[nn.Module] = []
    for c_in, c_out, stride in zip(
        channels[:-1], channels[1:], (1, 2, 1, 2, 1, 2, 2, 2), strict=True
    ):
        blocks += [nn.Conv2d(c_in, c_out, 3, stride, 1, padding_mode=padding), nn.ReLU()]
    head = [nn.Flatten(), nn.Linear(16 * alpha, 64 * alpha), nn.ReLU()]
    return nn.Sequential(*blocks, *head, nn.Linear(64 * alpha, outputs))


def data(n: int, outputs: int = OUTPUTS) -> tuple[Tensor, Tensor]:
    """Return random images and labels; the cost does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, 32, 32, generator=generator)
    return x, torch.randint(0, outputs, (n,), generator=generator)


def sgd_epoch(model: nn.Module, loader: TensorLoader) -> Callable[[], None]:
    """Run one epoch of SGD with momentum."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)

    def run() -> None:
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()

    return run


def estimate(
    model: nn.Module, loader: TensorLoader, method: Method, n_data: int | None = None
) -> Callable[[], Evidence]:
    """Compute one evidence estimate with its gradient in the log precisions."""
    theta = weights(model)
    prior = GaussianPrior(theta, 1.0)
    generator = torch.Generator().manual_seed(0)

    def run() -> Evidence:
        task = CurvatureTask(model, layers(model), Categorical(), method, generator)
        expected = len(loader.y)
        curvature = collect_curvature(task, loader, n_data=n_data, expected=expected).prepare()
        evidence = laplace_evidence(curvature, prior, theta)
        torch.autograd.grad(evidence.log_evidence, list(prior.parameters()))
        return evidence.detach()

    return run


PROBES: tuple[Probe, ...] = ("spectral", "label")
METHODS = {
    "exact": Method(),
    "one probe": Method(estimator="mc"),
    "one sampled label": Method(estimator="mc", probe="label"),
}
STRUCTURES = {
    "exact": Method(),
    "EKFAC": Method(structure="ekfac"),
    "kernel": Method(structure="kernel"),
    "kernel, blocks of 200": Method(structure="kernel", block=200),
    "kernel, blocks of 200, one output": Method(structure="kernel", block=200, outputs="sampled"),
}
MINI_BATCH = "kernel, one mini-batch of 200"
NEW_PRECISIONS = "kernel, new precisions"


def reevaluate(model: nn.Module, loader: TensorLoader) -> Callable[[], Evidence]:
    """Compute the evidence of the kernel form and its gradient for new precisions each time."""
    theta = weights(model)
    task = CurvatureTask(model, layers(model), Categorical(), STRUCTURES["kernel"])
    computed: list[Curvature] = []
    precisions = itertools.count(1)

    def run() -> Evidence:
        if not computed:  # in the warm-up; not earlier, which would hide the memory of others
            computed.append(collect_curvature(task, loader))
        curvature, prior = computed[0], GaussianPrior(theta, 1 + 1 / next(precisions))
        evidence = laplace_evidence(curvature, prior, theta)
        torch.autograd.grad(evidence.log_evidence, list(prior.parameters()))
        return evidence.detach()

    return run


def variants(alpha: int, padding: Padding, n: int, structures: bool = False) -> Runs:
    """Return SGD epochs and all estimators, or all structures, on one network."""
    model, sgd = network(alpha, padding), network(alpha, padding)
    channels_last = network(alpha, padding).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = data(n)
    loader = TensorLoader(x, y, 250)
    loader_last = TensorLoader(x.contiguous(memory_format=torch.channels_last), y, 250)
    if structures:
        runs = {name: estimate(model, loader, method) for name, method in STRUCTURES.items()}
        small_batch = TensorLoader(x[:200], y[:200], 200)
        geometric = Method(structure="kernel", scaling="geometric")
        runs[MINI_BATCH] = estimate(model, small_batch, geometric, n)
        reevaluated = {NEW_PRECISIONS: reevaluate(model, loader)}
        return {"SGD epoch": sgd_epoch(sgd, loader), **runs, **reevaluated}
    return {
        "SGD epoch": sgd_epoch(sgd, loader),
        "SGD epoch, channels last": sgd_epoch(channels_last, loader_last),
        **{name: estimate(model, loader, method) for name, method in METHODS.items()},
    }


def first_peak(
    alpha: int, padding: Padding, name: str, n: int, threads: int, structures: bool = False
) -> float:
    """Return the `peak_memory` of one variant after a warm-up on 8 samples only."""
    torch.set_num_threads(threads)
    variants(alpha, padding, 8, structures)[name]()
    return peak_memory(variants(alpha, padding, n, structures)[name])


def compare(
    alpha: int, padding: Padding, n: int = 1000, rounds: int = 5, structures: bool = False
) -> list[Row]:
    """Compare all estimators with SGD on one network."""
    runs, threads = variants(alpha, padding, n, structures), torch.get_num_threads()
    times = interleave(runs, rounds)
    base, rows = times["SGD epoch"], []
    for name, run in runs.items():
        cpu, wall = times[name].cpu / base.cpu, times[name].wall / base.wall
        peak = fresh_peak(__name__, alpha, padding, name, n, threads, structures)
        result = run()
        value = float(result.log_evidence) if isinstance(result, Evidence) else None
        rows.append(Row("8-conv", alpha, padding, name, cpu, wall, peak, value))
    return rows


@dataclass(frozen=True)
class Growth:
    """Cost of one estimate relative to the smallest value of the varied quantity."""

    varies: str
    value: int
    estimator: str
    ratio_cpu: float
    ratio_wall: float


def growth(alpha: int = 4, rounds: int = 5) -> list[Growth]:
    """Measure the growth of the cost with the number of samples and outputs.

    It is linear in the samples. In the outputs it is linear if exact, and constant with one probe.
    """
    cases = [("data", n, n, OUTPUTS) for n in (250, 500, 1000, 2000)]
    cases += [("outputs", k, 500, k) for k in (5, 10, 20, 40)]
    runs: Runs = {}
    for varies, value, n, k in cases:
        model, loader = network(alpha, outputs=k), TensorLoader(*data(n, k), 250)
        for name in ("exact", "one probe"):
            runs[f"{varies} {value} {name}"] = estimate(model, loader, METHODS[name])
    times = interleave(runs, rounds)
    rows = []
    for varies, value, *_ in cases:
        smallest = next(v for name_of_case, v, *_ in cases if name_of_case == varies)
        for name in ("exact", "one probe"):
            time, base = times[f"{varies} {value} {name}"], times[f"{varies} {smallest} {name}"]
            rows.append(Growth(varies, value, name, time.cpu / base.cpu, time.wall / base.wall))
    return rows


@dataclass(frozen=True)
class ProbeError:
    """Relative errors against the exact estimate: mean and standard deviation over seeds.

    The error of the gradient is the length of the difference over the length of the gradient of
    log_det in the log precisions; its mean is therefore not a bias.
    """

    probe: str
    samples: int
    log_evidence: float
    log_evidence_spread: float
    log_det: float
    log_det_spread: float
    gradient: float
    gradient_spread: float


def trained(epochs: int = 5, width: int = 8) -> tuple[nn.Module, TensorLoader]:
    """Return a small convolutional net trained on the embedded digits, and 1000 of them."""
    x, y = digits()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(2 * width, 4 * width, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * width, 10)),
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for xb, yb in TensorLoader(x, y, 64, shuffle=True):
            optimiser.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimiser.step()
    return model, TensorLoader(x[:1000], y[:1000], 250)


def probes(seeds: int = 20, samples: tuple[int, ...] = (1, 2, 4)) -> list[ProbeError]:
    """Measure the errors of spectral and label probes on a trained net."""
    model, loader = trained()
    theta = weights(model)
    prior = GaussianPrior(theta, 1.0)

    def measure(method: Method, seed: int) -> tuple[float, float, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        task = CurvatureTask(model, layers(model), Categorical(), method, generator)
        curvature = collect_curvature(task, loader).prepare()
        evidence = laplace_evidence(curvature, prior, theta)
        gradient = torch.autograd.grad(evidence.log_det, list(prior.parameters()))
        flat = torch.cat([g.reshape(-1) for g in gradient])
        evidence = evidence.detach()
        return float(evidence.log_evidence), float(evidence.log_det), flat

    value, log_det, gradient = measure(Method(), 0)
    rows = []
    for probe in PROBES:
        for count in samples:
            method = Method(estimator="mc", probe=probe, samples=count)
            estimates = [measure(method, seed) for seed in range(seeds)]
            errors = (
                [(v - value) / abs(value) for v, _, _ in estimates],
                [(d - log_det) / log_det for _, d, _ in estimates],
                [float((g - gradient).norm() / gradient.norm()) for *_, g in estimates],
            )
            summary = [f(e) for e in errors for f in (statistics.mean, statistics.stdev)]
            rows.append(ProbeError(probe, count, *summary))
    return rows


@dataclass(frozen=True)
class Options:
    """What to measure.

    Args:
        alphas: Widths of the network.
        paddings: Padding modes.
        rounds: Interleaved repeats.
        threads: Torch threads.
        structures: Measure EKFAC and the kernel form instead of the estimators.
        json: File for the rows.
    """

    alphas: tuple[int, ...] = (10, 4)
    paddings: tuple[Padding, ...] = ("zeros", "circular")
    rounds: int = 5
    threads: int = 2
    structures: bool = False
    json: Path | None = None


def main(options: Options) -> list[Row]:
    """Measure, and write the rows as JSON if a file is given."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    rows = [
        row
        for alpha in options.alphas
        for padding in options.paddings
        for row in compare(alpha, padding, rounds=options.rounds, structures=options.structures)
    ]
    torch.set_num_threads(before)
    write_rows(rows, options.json)
    return rows
