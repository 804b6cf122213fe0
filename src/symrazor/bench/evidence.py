r"""What one evidence estimate costs, in epochs of plain SGD over the same data.

The network is the eight-convolution net of ELLA section 6.2 (channels 3, a, 2a, 2a, 4a, 4a, 8a, 8a,
16a; strides 1, 2, 1, 2, 1, 2, 2, 2; then 16a -> 64a -> 10). An estimate is everything: factors,
float64 eigenvalues, the evidence and its gradient in all log precisions. Variants are timed in
turn, round after round, so that a busy machine slows all of them alike, and medians are compared.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symrazor.curvature import Method, curvature
from symrazor.data import TensorLoader
from symrazor.evidence import Evidence, laplace_evidence
from symrazor.hyper import Prior, weights

OUTPUTS = 10


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


def network(alpha: int, padding: str = "zeros", outputs: int = OUTPUTS, seed: int = 0) -> nn.Module:
    """The eight-convolution net for 32 x 32 colour images."""
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
    """Noise images and labels: the cost does not depend on what is in them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, 32, 32, generator=generator)
    return x, torch.randint(0, outputs, (n,), generator=generator)


def sgd_epoch(model: nn.Module, loader: TensorLoader) -> Callable[[], None]:
    """One epoch of SGD with momentum."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)

    def run() -> None:
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return run


def estimate(model: nn.Module, loader: TensorLoader, method: Method) -> Callable[[], Evidence]:
    """One evidence estimate with its gradient in the log precisions."""
    theta = weights(model)
    prior = Prior(theta, 1.0)
    generator = torch.Generator().manual_seed(0)

    def run() -> Evidence:
        found = curvature(model, "categorical", loader, method, generator=generator).prepare()
        evidence = laplace_evidence(found, prior, theta)
        torch.autograd.grad(evidence.log_evidence, list(prior.parameters()))
        return evidence.detach()

    return run


@dataclass
class Timing:
    """Median seconds over interleaved rounds."""

    cpu: float
    wall: float


def interleave(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time every variant once per round, after one warm-up, and take medians."""
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            c, w = time.process_time(), time.perf_counter()
            run()
            cpu[name].append(time.process_time() - c)
            wall[name].append(time.perf_counter() - w)
    return {n: Timing(statistics.median(cpu[n]), statistics.median(wall[n])) for n in variants}


def peak_memory(run: Callable[[], object]) -> float:
    """Megabytes of resident memory that `run` adds at its peak (Linux; NaN elsewhere)."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def read(field: str) -> float:
        line = next(x for x in status.read_text().splitlines() if x.startswith(field))
        return float(line.split()[1]) / 1024

    try:
        reset.write_text("5")
        before = read("VmRSS")
        run()
        return read("VmHWM") - before
    except OSError:
        return float("nan")


METHODS = {
    "exact": Method(),
    "one probe": Method(estimator="mc"),
    "one sampled label": Method(estimator="mc", probe="label"),
}


def compare(alpha: int, padding: str, n: int = 1000, rounds: int = 5) -> list[Row]:
    """All estimators against SGD on one network."""
    model = network(alpha, padding)
    last = network(alpha, padding).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = data(n)
    loader = TensorLoader(x, y, 250)
    loader_last = TensorLoader(x.contiguous(memory_format=torch.channels_last), y, 250)
    estimates = {name: estimate(model, loader, method) for name, method in METHODS.items()}
    variants: dict[str, Callable[[], object]] = {
        "SGD epoch": sgd_epoch(network(alpha, padding), loader),
        "SGD epoch, channels last": sgd_epoch(last, loader_last),
        **estimates,
    }
    times = interleave(variants, rounds)
    base = times["SGD epoch"]
    return [
        Row(
            "8-conv",
            alpha,
            padding,
            name,
            times[name].cpu / base.cpu,
            times[name].wall / base.wall,
            peak_memory(run),
            float(estimates[name]().log_evidence) if name in estimates else None,
        )
        for name, run in variants.items()
    ]


@dataclass(frozen=True)
class Options:
    """What to measure.

    Args:
        alphas: widths of the network.
        paddings: padding modes.
        rounds: interleaved repeats.
        threads: torch threads.
        json: file for the rows.
    """

    alphas: tuple[int, ...] = (10, 4)
    paddings: tuple[str, ...] = ("zeros", "circular")
    rounds: int = 5
    threads: int = 2
    json: Path | None = None


def main(options: Options) -> list[Row]:
    """Measure, and write the rows as JSON if asked."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    rows = [
        row
        for alpha in options.alphas
        for padding in options.paddings
        for row in compare(alpha, padding, rounds=options.rounds)
    ]
    torch.set_num_threads(before)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows
