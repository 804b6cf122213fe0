"""Compare plug-in and posterior predictions: those of `discover`, and of the quick start's network.

python benchmarks/predictions.py --json benchmarks/results/predictions-discover.json
python benchmarks/predictions.py --quick-start
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import symrazor as sr
from sklearn import datasets
from symrazor.core.likelihood import calibration_error
from symrazor.core.version import __version__
from symrazor.data import digits
from symrazor.inference.last_layer import LastLayer, features_of

SEEDS = (1, 2, 3)
"""Seed 0 was used for development."""
EPOCHS = 40


def sample_digits(n: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that draws n digits."""

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        x, y = digits("train")
        index = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:n]
        return x[index], y[index]

    return draw


def table(load: Callable[..., Any]) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that loads a table of scikit-learn."""

    def read(_: int) -> tuple[Tensor, Tensor]:
        x, y = load(return_X_y=True)
        target = torch.from_numpy(y)
        return torch.from_numpy(x), target if target.is_floating_point() else target.long()

    return read


def friedman(seed: int) -> tuple[Tensor, Tensor]:
    """Draw 200 samples of the first problem of Friedman (1991), with ten features."""
    x, y = datasets.make_friedman1(200, noise=1.0, random_state=seed)
    return torch.from_numpy(x), torch.from_numpy(y)


DATA: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "digits, 150": sample_digits(150),
    "digits, 500": sample_digits(500),
    "iris": table(datasets.load_iris),
    "wine": table(datasets.load_wine),
    "breast cancer": table(datasets.load_breast_cancer),
    "diabetes (targets)": table(datasets.load_diabetes),
    "Friedman 1 (targets)": friedman,
}


def score(posterior: LastLayer, f: Tensor, phi: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the mean NLL; and the ECE, or the share of targets outside of the 95 % interval."""
    prediction = posterior.predict(f, phi)
    if prediction.variance is None:
        p = prediction.mean.gather(1, y.reshape(-1, 1)).clamp(min=1e-12)
        return float(-p.log().mean()), float(calibration_error(prediction.mean, y))
    normal = torch.distributions.Normal(prediction.mean, prediction.variance.sqrt())
    errors = (prediction.mean - y.reshape(f.shape)).abs() / prediction.variance.sqrt()
    nll = -normal.log_prob(y.reshape(f.shape)).mean()
    return float(nll), float((errors > 1.96).double().mean())


def measure(name: str, seed: int) -> dict[str, tuple[float, float]]:
    """Train on one data set; return the scores of each kind of prediction on held-out data."""
    x, y = DATA[name](seed)
    kind = "image" if name.startswith("digits") else "vector"
    found = sr.discover(x, y, kind=kind, epochs=EPOCHS, seed=seed, invariances=False)
    (result,) = found.results
    posterior, test = result.posterior, result.test
    assert posterior is not None and test is not None
    f, phi = features_of(result.network, posterior.head, test[0])
    scores = {
        how: score(replace(posterior, averaged=averaged), f, phi, test[1])
        for how, averaged in (("plug-in", False), ("averaged", True))
    }
    return scores | {"default": score(posterior, f, phi, test[1])}


def discover_rows() -> list[list[Any]]:
    """Return a row per data set: means over seeds."""
    rows = []
    for name in DATA:
        runs = [measure(name, seed) for seed in SEEDS]
        row: list[Any] = [name]
        for part in (0, 1):
            row += [
                round(fmean(run[how][part] for run in runs), 3)
                for how in ("plug-in", "averaged", "default")
            ]
        print(row, flush=True)
        rows.append(row)
    return rows


def write(file: Path) -> None:
    """Measure all data sets and write the result file."""
    rows = discover_rows()
    wins = sum(row[3] <= min(row[1], row[2]) + 0.002 for row in rows)
    document = {
        "title": "Predictions averaged over the posterior of the last layer",
        "question": "Does the choice by left-out samples find the better prediction?",
        "command": ["python benchmarks/predictions.py --json FILE"],
        "machine": "one CPU thread",
        "version": __version__,
        "columns": [
            *("data", "NLL plug-in", "NLL averaged", "NLL default"),
            *("error plug-in", "error averaged", "error default"),
        ],
        "rows": rows,
        "summary": {"better": wins, "all": len(rows)},
        "notes": [
            f"`discover` with {EPOCHS} epochs; held-out data (a fifth); means over seeds "
            f"{SEEDS[0]} to {SEEDS[-1]}. Seed 0 was used for development.",
            "Error: calibration error (ECE) of classes; share of targets outside of the interval "
            "that should hold 95 % of them.",
            "Default: the one of the two that predicts left-out training samples better, which is "
            "what `found.predict` and `symrazor predict` use. All of them have the calibration of "
            "the default: the other one's numbers are therefore not its best.",
        ],
    }
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def quick_start() -> None:
    """Compare predictions of one network by the posterior of all its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    x, y = digits("test")
    fit = sr.fit(model, digits("train"), epochs=20)
    for how in ("map", "probit", "bridge"):
        p = fit.predict(x, how=how).mean.double()
        nll = -p[torch.arange(len(y)), y].log().mean()
        print(f"{how}: NLL {nll:.3f}, ECE {calibration_error(p, y):.3f}")


def main() -> None:
    """Run one of the two parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick-start", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick_start:
        quick_start()
    elif arguments.json is not None:
        write(arguments.json)
    else:
        parser.error("Name a part: --json FILE or --quick-start.")


if __name__ == "__main__":
    main()
