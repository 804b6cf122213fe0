"""Measure the cost of learning by the evidence relative to plain training of the same network.

Seconds of an epoch and of an estimate, megabytes, and these ratios:

| ratio | goal |
|---|---|
| five epochs of `fit` and one estimate, over five epochs of plain PyTorch | 1.25 at most |
| one estimate over five epochs of `fit`, on a GPU | 0.15 at most |
| peak memory of an epoch and an estimate, over that of a plain epoch | 1.5 at most |
| one estimate by one process, over the same by two, one thread each | 1.7 at least |

The network is F-FC+CONV of ELLA's tables. The estimate is one evidence step of `fit`: one probe per
sample, at most 5,000 samples, precisions updated. Plain training is AdamW on the cross entropy.
Variants are timed in turn, round after round, and medians are compared (CPU time with one thread,
otherwise wall time). The two processes of the last line alternate with a single one while the other
waits; the median of the ratios over all rounds counts.

    python -m symrazor.bench.fit [--device cuda] [--only times memory scaling] [--json FILE]
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from symrazor.accelerate import processes
from symrazor.accelerate.devices import tf32
from symrazor.bench.measure import Runs, fresh_peak, interleave, peak_memory, write_rows
from symrazor.data import TensorLoader
from symrazor.inference.razor import Razor
from symrazor.layers.ella import ella_network
from symrazor.training.evidence_training import EVIDENCE_SUBSET, evidence_batch
from symrazor.training.optimisers import Stepper
from symrazor.training.options import FitConfig

EVERY = 5
"""Epochs between two estimates."""
PARTS = ("times", "memory", "scaling")


@dataclass(frozen=True)
class Options:
    """What to measure, and on which network and data.

    Args:
        device: "cpu" or "cuda".
        alpha: Width of the network.
        images: Number of images.
        batch: Samples per training step.
        rounds: Interleaved repeats.
        threads: Torch threads on a CPU.
        only: Parts to run: "times", "memory", "scaling" (two processes, on a CPU).
        json: File for the rows.
    """

    device: str = "cpu"
    alpha: int = 4
    images: int = 10_000
    batch: int = 256
    rounds: int = 3
    threads: int = 2
    only: tuple[str, ...] = PARTS
    json: Path | None = None

    def __post_init__(self) -> None:
        """Check the sizes and that the device exists."""
        for name in ("alpha", "images", "batch", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not set(self.only) <= set(PARTS) or not self.only:
            raise ValueError(f"--only takes some of {', '.join(PARTS)}, got {' '.join(self.only)}.")
        kind, _, number = self.device.partition(":")
        gpus = torch.cuda.device_count()
        if kind not in ("cpu", "cuda") or (kind == "cuda" and int(number or 0) >= gpus):
            raise ValueError(
                f"Device {self.device!r} is not available ({gpus} CUDA devices). Use --device cpu."
            )
        if kind == "cuda" and self.only == ("scaling",):
            raise ValueError("scaling is measured on a CPU. Use --device cpu.")

    @classmethod
    def on(cls, device: str, **changes: object) -> "Options":
        """Return the sizes of ELLA's second table for a GPU, smaller ones for a CPU."""
        large: dict[str, object] = {"alpha": 10, "images": 50_000}
        sizes = large if device.startswith("cuda") else {}
        return cls(device, **{**sizes, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        figure: Name of the figure.
        value: Seconds, megabytes or a ratio.
        unit: "s", "MB", or "" for a ratio.
        goal: Goal, for example "<= 1.25"; "" for none.
        on: What it was measured on.

    Attributes:
        reached: Whether the value meets the goal.
    """

    figure: str
    value: float
    unit: str = ""
    goal: str = ""
    on: str = ""
    reached: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compare the value with the goal."""
        side, bound = self.goal.split() if self.goal else (">=", "-inf")
        within = self.value <= float(bound) if side == "<=" else self.value >= float(bound)
        object.__setattr__(self, "reached", within)


def network(options: Options) -> nn.Module:
    """Return the F-FC+CONV network of ELLA's tables, for colour images."""
    torch.manual_seed(0)
    return ella_network("f-fc+conv", 3, 10, options.alpha).to(options.device)


def loader(options: Options) -> TensorLoader:
    """Return random images on the device; the cost does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.images, 3, 32, 32, generator=generator).to(options.device)
    y = torch.randint(0, 10, (options.images,), generator=generator).to(options.device)
    return TensorLoader(x, y, options.batch, True, generator)


def plain_epoch(options: Options) -> Callable[[], object]:
    """Return one epoch of plain PyTorch training, without this library."""
    model, data = network(options), loader(options)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        with tf32(True):
            for x, y in data:
                optimiser.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimiser.step()
        _wait(options)

    return run


def fitting(options: Options) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return an epoch of `fit`, and one of its evidence steps."""
    model, data = network(options), loader(options)
    razor = Razor(model, "categorical", options.images, estimator="mc")
    stepper = Stepper(razor, FitConfig(lr=1e-4), 10**6)
    batch_size = evidence_batch(razor, data)
    evidence_data = TensorLoader(data.x, data.y, batch_size, True, data.generator)
    subset = min(options.images, EVIDENCE_SUBSET)

    def epoch() -> None:
        model.train()
        with tf32(True):
            for x, y in data:
                stepper.step(x, y)
        _wait(options)

    def estimate() -> None:
        model.eval()
        sharded = processes.ShardedLoader(evidence_data)
        razor.step(sharded, None if subset == options.images else subset)
        _wait(options)

    return epoch, estimate


def _wait(options: Options) -> None:
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()


def times(options: Options) -> list[Row]:
    """Measure an epoch and an estimate relative to a plain epoch."""
    epoch, estimate = fitting(options)
    runs: Runs = {"plain": plain_epoch(options), "epoch": epoch, "estimate": estimate}
    alone = options.threads == 1 and not options.device.startswith("cuda")  # others may work, too
    timed = interleave(runs, options.rounds)
    seconds = {name: t.cpu if alone else t.wall for name, t in timed.items()}
    total = (EVERY * seconds["epoch"] + seconds["estimate"]) / (EVERY * seconds["plain"])
    share = seconds["estimate"] / (EVERY * seconds["epoch"])
    gpu = options.device.startswith("cuda")
    return [
        Row("plain epoch", seconds["plain"], "s"),
        Row("epoch of fit", seconds["epoch"], "s"),
        Row("estimate", seconds["estimate"], "s"),
        Row("epoch of fit / plain epoch", seconds["epoch"] / seconds["plain"]),
        Row("estimate / plain epoch", seconds["estimate"] / seconds["plain"]),
        Row(f"fit / plain, an estimate in {EVERY} epochs", total, goal="<= 1.25"),
        Row("estimates / training", share, goal="<= 0.15" if gpu else ""),
    ]


def first_peak(options: Options, part: str) -> float:
    """Return the peak memory of a plain epoch, or of an epoch and an estimate, in megabytes."""
    if not options.device.startswith("cuda"):
        torch.set_num_threads(options.threads)
    if part == "plain":
        run = plain_epoch(options)
    else:
        epoch, estimate = fitting(options)

        def run() -> object:
            return epoch(), estimate()

    if not options.device.startswith("cuda"):
        return peak_memory(run)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 2**20


def memory(options: Options) -> list[Row]:
    """Measure both peaks, each in a new process: an old one has memory to reuse."""
    plain, fit = (
        fresh_peak("symrazor.bench.fit", replace(options, json=None), part)
        for part in ("plain", "fit")
    )
    return [
        Row("peak memory, plain", plain, "MB"),
        Row("peak memory, fit", fit, "MB"),
        Row("peak memory, fit / plain", fit / plain, goal="<= 1.5"),
    ]


def scaling(options: Options) -> list[Row]:
    """Measure one estimate by one and by two processes, one thread each, on a CPU.

    The CPU time is reliable on a machine with other load as well.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "symrazor.bench.fit", "--worker"]
    sizes = ("alpha", "images", "batch", "rounds")
    launch += [part for name in sizes for part in (f"--{name}", str(getattr(options, name)))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(launch, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    wall, cpu = map(float, process.stdout.split()[-2:])
    return [
        Row("estimate, 1 process / 2", wall, goal=">= 1.7"),
        Row("its CPU time, 1 process / the busier of 2", cpu),
    ]


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return wall time and CPU time of a call in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def worker(options: Options) -> None:
    """Run one of two processes: estimates by both and by the first alone, in turn."""
    torch.set_num_threads(1)
    process = processes.start("cpu")
    _, estimate = fitting(options)
    joint_times: list[tuple[float, float]] = []
    own_times: list[tuple[float, float]] = []
    for _ in range(options.rounds + 1):  # the first round warms up
        processes.barrier()
        wall, cpu = _timed(estimate)
        cpu_seconds = torch.zeros(process.size, dtype=torch.float64)
        cpu_seconds[process.rank] = cpu
        processes.all_reduce_([cpu_seconds])
        joint_times.append((wall, float(cpu_seconds.max())))
        if process.is_main:
            with processes.single_process():
                own_times.append(_timed(estimate))
    processes.barrier()
    if process.is_main:
        rounds = list(zip(own_times, joint_times, strict=True))[1:]
        wall, cpu = (median(alone[i] / shared[i] for alone, shared in rounds) for i in (0, 1))
        sys.stdout.write(f"{wall} {cpu}\n")
    processes.finish()


def _where(options: Options) -> str:
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    return f"{name}, width {options.alpha}, {options.images} images, batches of {options.batch}"


def main(options: Options) -> list[Row]:
    """Measure, and write the rows as JSON if a file is given."""
    before = torch.get_num_threads()
    if not options.device.startswith("cuda"):
        torch.set_num_threads(options.threads)
    rows: list[Row] = []
    try:
        rows += times(options) if "times" in options.only else []
        rows += memory(options) if "memory" in options.only else []
    finally:
        torch.set_num_threads(before)
    if "scaling" in options.only and not options.device.startswith("cuda"):
        rows += scaling(options)
    rows = [replace(row, on=_where(options)) for row in rows]
    write_rows(rows, options.json)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return one table, below a line with the device and the network."""
    lines = [rows[0].on, "", "| figure | | goal | reached |", "|---|---|---|---|"]
    for row in rows:
        reached = ("yes" if row.reached else "NO") if row.goal else ""
        value = f"{row.value:.4g} {row.unit}".strip()
        lines.append(f"| {row.figure} | {value} | {row.goal} | {reached} |")
    return "\n".join(lines)


def command(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark as a command with argparse."""
    parser = argparse.ArgumentParser(prog="symrazor.bench.fit")
    parser.add_argument("--device", default="cpu")
    for name in ("alpha", "images", "batch", "rounds", "threads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    values = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    as_worker, only = values.pop("worker"), tuple(values.pop("only"))
    try:
        options = Options.on(values.pop("device"), **values, only=only)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if as_worker:
        worker(options)
    else:
        sys.stdout.write(f"{markdown(main(options))}\n")


if __name__ == "__main__":
    command()
