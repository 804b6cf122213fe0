"""Train the network of ELLA's Table 3 with two structures, and compare the shares of its paths.

Each layer is the sum of a free path (F-FC), a convolution and a convolution that commutes with
quarter turns; channels as in `symrazor experiment ella-table3` (width 2). On a GPU, the exact
matrix in kernel form is affordable for 1,000 images. The shares of each trained network are
computed by all structures.

    python benchmarks/table3_structures.py DIR --device cuda --json FILE

DIR holds mnist-28.npz and cifar-10-32.npz, which small_data.py writes with --images.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import symrazor as sr
from small_data import full_size
from symrazor.data.transforms import normalised, resized, rotated
from symrazor.layers.ella import ella_network
from symrazor.symmetry.collapse import path_shares

FILES = {"mnist": "mnist-28.npz", "cifar-10": "cifar-10-32.npz"}
TASKS = ("rotated mnist", "rotated cifar-10", "cifar-10")
PATHS = ("F-FC", "CONV", "GCONV")
STRUCTURES = ("kron", "ekfac", "kernel")
COLUMNS = [
    *("data", "seed", "trained with", "shares by", "log evidence"),
    *(f"{path} %, mean (min-max) over layers" for path in PATHS),
    *("test accuracy %", "test nll", "seconds of training", "seconds of one estimate"),
]


def summary(shares: list[float]) -> str:
    """Return mean and range of the shares over layers, in per cent."""
    low, high = 100 * min(shares), 100 * max(shares)
    return f"{100 * mean(shares):.0f} ({low:.0f}-{high:.0f})"


def rows(folder: Path, task: str, seed: int, options: argparse.Namespace) -> list[list[Any]]:
    """Train the network with each structure; return one row for each estimate."""
    name = task.rsplit(maxsplit=1)[-1]
    train, test = full_size(folder / FILES[name], options.images)
    sets = []
    for transform_seed, (x, y) in zip((1, 0), (train, test), strict=True):
        turned = rotated(x, 180, transform_seed) if task.startswith("rotated") else x
        image = resized(normalised(turned, name), 32)
        sets.append((image.to(options.device), y.to(options.device)))
    table = []
    for trained_with in options.trained_with:
        torch.manual_seed(seed)
        model = ella_network("f-fc+conv+gconv", train[0].shape[1], 10, 2, 32)
        started = time.time()
        fit = sr.fit(
            *(model.to(options.device), sets[0]),
            test=sets[1],
            epochs=options.epochs,
            every=max(1, options.epochs // 12),
            batch_size=64,
            lr=4e-3,
            seed=seed,
            structure=trained_with,
            progress=False,
        )
        seconds = time.time() - started
        scores = fit.reading.test
        for structure in STRUCTURES:
            started = time.time()
            evidence = fit.razor.evidence(fit.data, structure=structure)
            took = time.time() - started
            by_layer = path_shares(fit.model, evidence.effective_parameters).values()
            paths = zip(*([share or 0.0 for share in layer] for layer in by_layer), strict=True)
            table.append(
                [task, seed, trained_with, structure, round(float(evidence.log_evidence), 1)]
                + [summary(list(path)) for path in paths]
                + [round(100 * scores["accuracy"], 1), round(scores["nll"], 3)]
                + [round(seconds, 1), round(took, 2)]
            )
            print(table[-1], flush=True)
    return table


def main() -> None:
    """Run all tasks and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--trained-with", nargs="+", default=["kron", "kernel"])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    table: list[list[Any]] = []
    for seed in options.seeds:
        for task in options.tasks:
            table += rows(options.folder, task, seed, options)
            content = {
                "title": "Shares of the paths of Table 3 by structure of the curvature",
                "question": "Does an exact curvature use rotations where images are rotated?",
                "command": ["python benchmarks/table3_structures.py DIR --device cuda --json FILE"],
                "machine": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
                "columns": COLUMNS,
                "rows": table,
                "notes": [f"{options.images} training images, {options.epochs} epochs."],
            }
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
