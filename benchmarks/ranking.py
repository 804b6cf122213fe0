# Over 400 lines: one measurement with its tables.
"""Train many architectures on small real data, and compare evidence with held-out NLL.

Two questions. Does the evidence rank architectures as their held-out NLL does (Kendall's tau)? And
do evidence steps with a more exact curvature learn better prior precisions? Every architecture is
trained from the same seed with each structure of the curvature in the evidence steps. The evidence
of each trained state is then computed in several structures, for the same weights and precisions.

    python benchmarks/ranking.py DIR --jobs 16 --json RUNS.json
    python benchmarks/ranking.py --read RUNS.json --out benchmarks/results

DIR holds the files that small_data.py writes. The first command writes one record for each trained
network, and continues if the file exists; the second writes the tables.

A trained network has two held-out NLLs: that of its weights, and that of the Laplace predictive,
in which the weights are integrated out. The evidence is the probability of data under the second.
"""

import argparse
import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import nan
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

import symrazor as sr
from small_data import SERIES, development, prepared
from symrazor.layers.conv import CONVOLUTIONS
from symrazor.symmetry.collapse import path_shares
from symrazor.training.predictive import log_predictive

IMAGES = ("digits", "mnist", "fashion-mnist", "cifar-10")
N_IMAGES = 300
STEPS = 1500
EVIDENCE_STEPS = 12
BATCH_SIZE = 32
LEARNING_RATE = 5e-3
PREDICTED = 200
"""Held-out samples for the Laplace predictive, which needs their Jacobians."""
REFINED, REFINEMENTS = "refined", 20
"""Name of trainings with refinement, and its largest number of rounds."""
TRAINED_WITH = ("kron", "ekfac", "auto", REFINED)
SCORES = {"nll": "weights", "nll_predictive": "predictive"}
"""Held-out NLL of the trained weights, and of the Laplace predictive."""
COMPARED_BY = ("kron", "auto")

POOLS: dict[int, tuple[type[nn.Module], dict[str, type[nn.Module]]]] = {
    1: (nn.MaxPool1d, {"max": nn.AdaptiveMaxPool1d, "mean": nn.AdaptiveAvgPool1d}),
    2: (nn.MaxPool2d, {"max": nn.AdaptiveMaxPool2d, "mean": nn.AdaptiveAvgPool2d}),
}
"""Dimensions -> pooling by a factor, and pooling over all positions."""

Record = dict[str, Any]
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
        max_pool, pools = POOLS[dims]
        channels, layers = shape[0], list[nn.Module]()
        for number in range(depth):
            out = width * 2**number
            conv = CONVOLUTIONS[dims](
                channels, out, kernel, padding=kernel // 2, padding_mode="circular"
            )
            layers += [conv, activation(), max_pool(2)]
            channels = out
        if head == "flat":
            layers += [nn.Flatten()]
        else:
            layers[-1:] = [pools[head](1), nn.Flatten()]
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
    """One training.

    Args:
        data: name of the data set.
        seed: seed of weights and batches, and number of the part of the images.
        architecture: name of the network.
        trained_with: structure of the curvature in the evidence steps, or "refined": Kronecker
            factors, then rounds of refinement with the exact matrix.
        is_development: whether to use the data on which settings may be chosen.
        images: training images; series have the official training set.
        steps: optimiser steps, in whole epochs.
    """

    data: str
    seed: int
    architecture: str
    trained_with: str
    is_development: bool = False
    images: int = N_IMAGES
    steps: int = STEPS


def run(folder: Path, job: Job, structures: Sequence[str]) -> dict[str, Any]:
    """Train one network and return its figures."""
    torch.set_num_threads(1)
    started = time.process_time()
    read = development if job.is_development else prepared
    train, test = read(folder / f"{job.data}.npz", job.seed, job.images)
    torch.manual_seed(job.seed)
    model = ARCHITECTURES[job.architecture](train[0].shape[1:], int(train[1].max()) + 1)
    epochs = max(20, job.steps // -(-len(train[0]) // BATCH_SIZE))
    is_refined = job.trained_with == REFINED
    fit = sr.fit(
        *(model, train),
        test=test,
        epochs=epochs,
        every=max(1, epochs // EVIDENCE_STEPS),
        batch_size=BATCH_SIZE,
        lr=LEARNING_RATE,
        seed=job.seed,
        structure="kron" if is_refined else job.trained_with,
        refine=REFINEMENTS if is_refined else 0,
        progress=False,
    )
    trained = time.process_time() - started
    evidences = {s: fit.razor.evidence(fit.data, structure=s) for s in structures}
    shares = path_shares(model, evidences["auto"].effective_parameters)
    test_scores = fit.reading.test
    part = test[0][:PREDICTED], test[1][:PREDICTED]
    fit.razor.method = replace(fit.razor.method, structure="auto")  # of the posterior
    predictive = {how: -float(log_predictive(fit, *part, how).mean()) for how in ("map", "mc")}
    auto = evidences["auto"]
    steps = [r for r in fit.history if "log_evidence" in r]
    return {
        **asdict(job),
        "weights": sum(p.numel() for p in model.parameters()),
        "accuracy": test_scores["accuracy"],
        "nll": test_scores["nll"],
        "nll_of_part": predictive["map"],
        "nll_predictive": predictive["mc"],
        "is_pruned": fit.is_pruned,
        "evidence": {s: float(e.log_evidence) for s, e in evidences.items()},
        "log_likelihood": float(auto.log_likelihood),
        "log_prior": float(auto.log_prior),
        "course": [[r["epoch"], r["log_evidence"], r["test_nll"]] for r in steps],
        "structure": auto.structure,
        "gap": auto.gap,
        "effective_parameters": {
            s: sum(e.effective_parameters.values()) for s, e in evidences.items()
        },
        "shares": shares,
        "seconds": [round(trained, 1), round(time.process_time() - started - trained, 1)],
    }


def run_all(
    folder: Path, jobs: Iterable[Job], workers: int, minutes: float, file: Path
) -> list[Record]:
    """Run the jobs that the file lacks, in processes of one thread each; add to the file."""
    records: list[Record] = json.loads(file.read_text()) if file.exists() else []
    empty = asdict(Job("", 0, "", ""))
    done = [{k: r.get(k, v) for k, v in empty.items()} for r in records if "error" not in r]
    os.environ["OMP_NUM_THREADS"] = "1"
    started = time.time()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        missing = [job for job in jobs if asdict(job) not in done]
        futures = {pool.submit(run, folder, job, COMPARED_BY): job for job in missing}
        for future in as_completed(futures):
            if future.cancelled():
                continue
            error = future.exception()
            record = asdict(futures[future]) | {"error": repr(error)}
            records.append(future.result() if error is None else record)
            file.write_text(json.dumps(records) + "\n")
            seconds = time.time() - started
            print(f"{len(records)} records, {seconds:.0f} s", records[-1], flush=True)
            if seconds > 60 * minutes:
                pool.shutdown(wait=False, cancel_futures=True)
    return records


# Tables


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Kendall's rank correlation: 1 if all pairs have the same order in both."""
    pairs = list(combinations(zip(a, b, strict=True), 2))
    signs = [(x[0] > y[0]) - (x[0] < y[0]) for x, y in pairs]
    others = [(x[1] > y[1]) - (x[1] < y[1]) for x, y in pairs]
    return sum(i * j for i, j in zip(signs, others, strict=True)) / len(pairs)


def select(records: Iterable[Record], **values: object) -> list[Record]:
    """Return the records with these values."""
    return [r for r in records if all(r.get(k) == v for k, v in values.items())]


def by_group(records: Sequence[Record], trained_with: str) -> list[list[Record]]:
    """Return the records of one structure, one list for each data set and seed."""
    keys = dict.fromkeys((r["data"], r["seed"]) for r in records)
    groups = [select(records, data=d, seed=s, trained_with=trained_with) for d, s in keys]
    return [group for group in groups if group]


def tau(
    records: Sequence[Record], trained_with: str, compared_by: str, score: str = "nll"
) -> float:
    """Return the mean over data sets and seeds of Kendall's tau of evidence and held-out NLL."""
    groups = by_group(records, trained_with)
    values = [
        kendall([r["evidence"][compared_by] for r in g], [-r[score] for r in g]) for g in groups
    ]
    return mean(values) if values else nan


def regret(records: Sequence[Record], trained_with: str, compared_by: str) -> float:
    """Return how much higher the NLL of the network of highest evidence is than the lowest."""
    groups = by_group(records, trained_with)
    best = [max(g, key=lambda r: float(r["evidence"][compared_by]))["nll"] for g in groups]
    lowest = [min(r["nll"] for r in group) for group in groups]
    return mean(b - c for b, c in zip(best, lowest, strict=True)) if groups else nan


def ranking_table(records: Sequence[Record]) -> tuple[list[str], list[list[Any]]]:
    """Return Kendall's tau and the regret by data set and structure."""
    wanted = [(REFINED, "auto"), (REFINED, "kron"), ("auto", "auto"), ("kron", "auto")]
    wanted += [("kron", "kron")]
    names = list(dict.fromkeys(r["data"] for r in records))
    complete = {s for s in TRAINED_WITH if all(by_group(select(records, data=n), s) for n in names)}
    pairs = [pair for pair in wanted if pair[0] in complete]
    columns = ["data", "seeds", "networks"]
    for name in SCORES.values():
        columns += [f"tau, {name}: trained with {t}, compared by {c}" for t, c in pairs]
    columns += [f"regret in NLL: {t}, {c}" for t, c in pairs]
    rows: list[list[Any]] = []
    for name in names:
        some = [r for r in select(records, data=name) if r["trained_with"] in complete]
        seeds, networks = ({r[key] for r in some} for key in ("seed", "architecture"))
        figures = [round(tau(some, *pair, score), 2) for score in SCORES for pair in pairs]
        figures += [round(regret(some, *pair), 3) for pair in pairs]
        rows.append([name, len(seeds), len(networks), *figures])
    means = [mean(row[index] for row in rows) for index in range(3, len(columns))]
    digits = [2] * len(SCORES) * len(pairs) + [3] * len(pairs)
    rows.append(["mean", "", "", *map(round, means, digits)])
    return columns, rows


def training_table(records: Sequence[Record]) -> tuple[list[str], list[list[Any]]]:
    """Return means by structure in the evidence steps: of each data set, network, and of all."""
    columns = ["trainings of", "trained with", "trainings", "log evidence (auto)", "held-out NLL"]
    columns += ["held-out NLL, predictive", "accuracy %", "evidence above kron", "NLL below kron"]
    columns += ["predictive NLL below kron", "share of free paths %", "CPU s of training"]
    structures = {r["trained_with"] for r in records}
    counts = Counter(map(key, records))
    compared = [r for r in records if counts[key(r)] == len(structures) > 1]
    kron = {key(r): r for r in select(compared, trained_with="kron")}
    rows: list[list[Any]] = []
    groups = [(r["data"], r["architecture"], "all") for r in compared]
    for name in (name for names in zip(*groups, strict=True) for name in dict.fromkeys(names)):
        for structure in TRAINED_WITH:
            some = select(compared, trained_with=structure)
            some = [r for r in some if name in (r["data"], r["architecture"], "all")]
            if not some:
                continue
            pairs = [(r, kron[key(r)]) for r in some]
            wins = [
                sum(r["evidence"]["auto"] > k["evidence"]["auto"] for r, k in pairs),
                *(sum(r[score] < k[score] for r, k in pairs) for score in SCORES),
            ]
            free = [share[-1] for r in some for share in r["shares"].values()]
            figures = [
                round(mean(r["evidence"]["auto"] for r in some), 1),
                *(round(mean(r[score] for r in some), 3) for score in SCORES),
                round(100 * mean(r["accuracy"] for r in some), 1),
                *("" if structure == "kron" else f"{count} of {len(some)}" for count in wins),
                round(100 * mean(free)) if free else "",
                round(mean(r["seconds"][0] for r in some), 1),
            ]
            rows.append([name, structure, len(some), *figures])
    return columns, rows


def key(record: Record) -> tuple[str, int, str]:
    """Return what two records of different structures have in common."""
    return record["data"], record["seed"], record["architecture"]


def command(records: Sequence[Record]) -> str:
    """Return the command that trains the networks of some records."""
    options = ("data", "seed", "architecture", "trained_with", "images", "steps")
    names = ("data", "seeds", "architectures", "trained-with", "images", "steps")
    text = "python benchmarks/ranking.py DIR"
    for option, name in zip(options, names, strict=True):
        text += f" --{name} {shlex.join(dict.fromkeys(str(r[option]) for r in records))}"
    return f"{text} --json RUNS.json"


def write_tables(
    files: Sequence[Path], names: Sequence[str], out: Path, machine: str, notes: Sequence[str]
) -> None:
    """Write some of the tables of the records in some files."""
    every = [record for file in files for record in json.loads(file.read_text())]
    records = [{"images": N_IMAGES, "steps": STEPS} | r for r in every if "error" not in r]
    print(f"{len(every) - len(records)} of {len(every)} trainings failed")
    for name in names:
        title, question, table, note = TABLES[name]
        columns, rows = table(records)
        settings = (
            f"Images: {records[0]['images']} for training. Every network: about "
            f"{records[0]['steps']} optimiser steps, {EVIDENCE_STEPS} evidence steps. Settings "
            "were chosen on other training images and on other series."
        )
        content = {
            "title": title,
            "question": question,
            "command": [command(records)],
            "machine": machine,
            "notes": [settings, note, *notes],
            "columns": columns,
            "rows": rows,
        }
        (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        print(name, *rows, sep="\n")


TABLES = {
    "evidence-ranking": (
        "Ranking of architectures by evidence on small real data",
        "Does the evidence order architectures as their held-out NLL does (Kendall's tau)?",
        ranking_table,
        "Held-out NLL is that of the trained weights. The regret is the held-out NLL of the "
        "network of highest evidence minus the lowest one.",
    ),
    "evidence-training": (
        "Evidence steps with three structures of the curvature",
        "Does a more exact curvature in the evidence steps learn better prior precisions?",
        training_table,
        "Means over networks that were trained with every structure. The predictive integrates "
        f"the weights out; its NLL is over {PREDICTED} held-out samples.",
    ),
}


def main() -> None:
    """Train all networks, or write the tables of trained networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--data", nargs="+", default=[*IMAGES, *SERIES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--architectures", nargs="+", default=[*ARCHITECTURES])
    parser.add_argument("--trained-with", nargs="+", default=TRAINED_WITH)
    parser.add_argument("--images", type=int, default=N_IMAGES)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--development", action="store_true", help="only data for development")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no job after this time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", help="write the tables of these files")
    parser.add_argument("--tables", nargs="+", default=[*TABLES], choices=TABLES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--notes", nargs="+", default=[], help="more notes for the tables")
    parser.add_argument("--machine", default="16 CPU cores, one thread for each training")
    arguments = parser.parse_args()
    if arguments.read:
        machine = arguments.machine
        write_tables(arguments.read, arguments.tables, arguments.out, machine, arguments.notes)
        return
    size = arguments.images, arguments.steps
    jobs = [
        Job(data, seed, architecture, structure, arguments.development, *size)
        for seed in arguments.seeds
        for data in arguments.data
        for architecture in arguments.architectures
        for structure in arguments.trained_with
    ]
    run_all(arguments.folder, jobs, arguments.jobs, arguments.minutes, arguments.json)


if __name__ == "__main__":
    main()
