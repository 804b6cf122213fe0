"""Train many architectures on small real data, and compare evidence with held-out NLL.

Two questions. Does the evidence rank architectures as their held-out NLL does (Kendall's tau)? And
do evidence steps with a more exact curvature learn better prior precisions? Every architecture is
trained from the same seed with each structure of the curvature in the evidence steps. The evidence
of each trained state is then computed in several structures, for the same weights and precisions.

    python benchmarks/ranking.py DIR --jobs 16 --json RUNS.json
    python benchmarks/ranking.py --read RUNS.json --out benchmarks/results

DIR holds the files that small_data.py writes. The first command writes one record for each trained
network, the second the tables.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import symrazor as sr
from small_data import prepared
from symrazor.layers.conv import CONVOLUTIONS
from symrazor.symmetry.collapse import path_shares

IMAGES = ("digits", "mnist", "fashion-mnist", "cifar-10")
SERIES = ("OSULeaf", "ArrowHead", "ItalyPowerDemand", "GunPoint")
N_IMAGES = 300
"""Training images; series have the official training set."""
STEPS = 1500
"""Optimiser steps, in whole epochs."""
EVIDENCE_STEPS = 12
BATCH_SIZE = 32
LEARNING_RATE = 5e-3
TRAINED_WITH = ("kron", "ekfac", "auto")
COMPARED_BY = ("kron", "ekfac", "auto")

Shape = Sequence[int]
Make = Callable[[Shape, int], nn.Module]


def dense(*widths: int) -> Make:
    """Return a maker of networks of linear layers on the flattened input."""

    def make(shape: Shape, classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for width in widths:
            layers += [nn.LazyLinear(width), nn.ReLU()]
        return initialised(nn.Sequential(*layers, nn.LazyLinear(classes)), shape)

    return make


def cnn(width: int, depth: int, head: str = "max", activation: type[nn.Module] = nn.ReLU) -> Make:
    """Return a maker of CNNs that double their channels and halve the resolution in each layer.

    Args:
        width: channels of the first convolution.
        depth: number of convolutions.
        head: pooling over the remaining positions, "max" or "mean", or "flat" for none.
        activation: type of the activations.
    """

    def make(shape: Shape, classes: int) -> nn.Module:
        dims = len(shape) - 1
        kernel = 5 if dims == 1 else 3
        pool, mean = (nn.MaxPool1d, nn.AdaptiveAvgPool1d), nn.AdaptiveMaxPool1d
        if dims == 2:
            pool, mean = (nn.MaxPool2d, nn.AdaptiveAvgPool2d), nn.AdaptiveMaxPool2d
        channels, layers = shape[0], list[nn.Module]()
        for number in range(depth):
            out = width * 2**number
            conv = CONVOLUTIONS[dims](
                channels, out, kernel, padding=kernel // 2, padding_mode="circular"
            )
            layers += [conv, activation(), pool[0](2)]
            channels = out
        if head == "flat":
            layers += [nn.Flatten()]
        else:
            layers[-1:] = [{"max": mean, "mean": pool[1]}[head](1), nn.Flatten()]
        return initialised(nn.Sequential(*layers, nn.LazyLinear(classes)), shape)

    return make


def relaxed(make_cnn: Make) -> Make:
    """Return a maker of CNNs with a free path beside every convolution."""

    def make(shape: Shape, classes: int) -> nn.Module:
        return sr.relax(make_cnn(shape, classes), torch.zeros(2, *shape))

    return make


def initialised(network: nn.Module, shape: Shape) -> nn.Module:
    """Create the weights of lazy layers."""
    network(torch.zeros(2, *shape))
    return network


ARCHITECTURES: dict[str, Make] = {
    "linear": dense(),
    "dense 16": dense(16),
    "dense 64": dense(64),
    "dense 32, 32": dense(32, 32),
    "dense 32, 32, 32": dense(32, 32, 32),
    "CNN 8": cnn(8, 1),
    "CNN 4, 8": cnn(4, 2),
    "CNN 8, 16": cnn(8, 2),
    "CNN 16, 32": cnn(16, 2),
    "CNN 8, 16, 32": cnn(8, 3),
    "CNN 8, 16, mean": cnn(8, 2, "mean"),
    "CNN 8, 16, flat": cnn(8, 2, "flat"),
    "CNN 4, 8, tanh": cnn(4, 2, activation=nn.Tanh),
    "relaxed CNN 4, 8": relaxed(cnn(4, 2)),
    "relaxed CNN 8, 16": relaxed(cnn(8, 2)),
}


@dataclass(frozen=True)
class Job:
    """One training."""

    data: str
    seed: int
    architecture: str
    trained_with: str


def run(folder: Path, job: Job, structures: Sequence[str]) -> dict[str, Any]:
    """Train one network and return its figures."""
    torch.set_num_threads(1)
    started = time.process_time()
    train, test = prepared(folder / f"{job.data}.npz", job.seed, N_IMAGES)
    torch.manual_seed(job.seed)
    model = ARCHITECTURES[job.architecture](train[0].shape[1:], int(train[1].max()) + 1)
    epochs = max(20, STEPS // -(-len(train[0]) // BATCH_SIZE))
    fit = sr.fit(
        *(model, train),
        test=test,
        epochs=epochs,
        every=max(1, epochs // EVIDENCE_STEPS),
        batch_size=BATCH_SIZE,
        lr=LEARNING_RATE,
        seed=job.seed,
        structure=job.trained_with,
        progress=False,
    )
    trained = time.process_time() - started
    evidences = {s: fit.razor.evidence(fit.data, structure=s) for s in structures}
    shares = path_shares(model, evidences["auto"].effective_parameters)
    test_scores = fit.reading.test
    return {
        **asdict(job),
        "weights": sum(p.numel() for p in model.parameters()),
        "accuracy": test_scores["accuracy"],
        "nll": test_scores["nll"],
        "nll_posterior": posterior_nll(fit, test),
        "evidence": {s: float(e.log_evidence) for s, e in evidences.items()},
        "structure": evidences["auto"].structure,
        "gap": evidences["auto"].gap,
        "effective_parameters": {
            s: sum(e.effective_parameters.values()) for s, e in evidences.items()
        },
        "shares": shares,
        "seconds": [round(trained, 1), round(time.process_time() - started - trained, 1)],
    }


def posterior_nll(fit: sr.Fit, test: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the held-out NLL of the linearised posterior predictive with Kronecker factors."""
    return float("nan")


def run_all(folder: Path, jobs: Iterable[Job], workers: int, file: Path) -> list[dict[str, Any]]:
    """Run all jobs in parallel processes of one thread each; write the file as jobs finish."""
    records: list[dict[str, Any]] = []
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run, folder, job, COMPARED_BY): job for job in jobs}
        for future in as_completed(futures):
            error = future.exception()
            record = asdict(futures[future]) | {"error": str(error)}
            records.append(future.result() if error is None else record)
            file.write_text(json.dumps(records, indent=0) + "\n")
            last = records[-1]
            print(len(records), {k: v for k, v in last.items() if k != "shares"}, flush=True)
    return records


def main() -> None:
    """Train all networks, or write the tables of trained networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--data", nargs="+", default=[*IMAGES, *SERIES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--architectures", nargs="+", default=[*ARCHITECTURES])
    parser.add_argument("--trained-with", nargs="+", default=TRAINED_WITH)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jobs = [
        Job(data, seed, architecture, structure)
        for structure in sorted(arguments.trained_with)  # "auto", the slowest, first
        for architecture in reversed(arguments.architectures)
        for seed in arguments.seeds
        for data in reversed(arguments.data)
    ]
    started = time.time()
    run_all(arguments.folder, jobs, arguments.jobs, arguments.json)
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
