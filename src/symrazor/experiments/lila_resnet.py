"""Measure the benefit of learned augmentation for a residual network on transformed CIFAR-10.

Every training and test image is rotated by any angle and shifted by up to 4 pixels, once. A
residual network with group norm is averaged over rotated and shifted copies, with ranges learned by
the evidence from a narrow and a wide start, or trained without copies. Each row is saved as soon as
it is finished; "learned" in the table is the start with the higher evidence.
"""

from statistics import mean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import rotated, translated
from symrazor.experiments import lila
from symrazor.experiments.images import Images, transformed
from symrazor.experiments.results import Run, run_rows, table
from symrazor.invariance import Augment, Augmented, affine

NAME = "lila-resnet"
ROWS = ("learned/narrow", "learned/wide", "none")
SHIFT = 4.0
"""Largest shift in pixels."""
STARTS = {
    "learned/narrow": {"rotation": 0.5, "x-translation": 0.1, "y-translation": 0.1},
    "learned/wide": {"rotation": 2.5, "x-translation": 0.25, "y-translation": 0.25},
}
"""Starting ranges in radians, and in half-widths of the image."""
SAMPLES, FINER = 8, 32
"""Copies of each image in training and in the test."""
WIDTH = 16
"""Channels of the first stage."""


class Block(nn.Module):
    """Two convolutions with group norms and a residual connection."""

    def __init__(self, channels: int, out_channels: int, stride: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, out_channels) for _ in range(2))
        change = stride > 1 or channels != out_channels
        self.short = nn.Conv2d(channels, out_channels, 1, stride) if change else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        h = F.relu(self.norms[0](self.first(x)))
        output: Tensor = F.relu(self.norms[1](self.second(h)) + self.short(x))
        return output


def network(x: Tensor, width: int = WIDTH, classes: int = 10) -> nn.Module:
    """Return three stages of one block each, a mean over positions and one dense layer."""
    groups = min(8, width)
    stem = [nn.Conv2d(x.shape[1], width, 3, 1, 1), nn.ReLU()]
    stages = [
        Block(width, width, 1, groups),
        Block(width, 2 * width, 2, groups),
        Block(2 * width, 4 * width, 2, groups),
    ]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)]
    return nn.Sequential(*stem, *stages, *end)


def data(options: lila.Options, seed: int) -> Images:
    """Return training and test images, each transformed once, on the device."""
    n = options.n or (60 if options.small else 10_000)
    sets = lila.pictures("mnist" if options.small else "cifar-10", options, n, seed)
    return transformed(
        sets, lambda x, s: translated(rotated(x, 180, s), SHIFT, s), (2 * seed, 2 * seed + 1)
    )


def run_row(row: str, seed: int, options: lila.Options) -> Run:
    """Train one network, with about 20 evidence steps after the burn-in."""
    training, test = data(options, seed)
    torch.manual_seed(seed)
    model = network(training[0], 4 if options.small else WIDTH)
    if row in STARTS:
        start = STARTS[row]
        augment = Augment(affine(tuple(start), start), 2 if options.small else SAMPLES)
        model = Augmented(model, augment, average=options.average or "joint")
    epochs = options.epochs or (2 if options.small else 40)
    config = lila.fit_config(options, epochs, every=max(1, epochs // 20), lr=4e-3, batch=128)
    config = config.change(seed=seed, evidence_structure=None)
    fit = sr.fit(model.to(options.resolved_device), training, config=config)
    finer = model.refined(FINER) if isinstance(model, Augmented) else model
    return {
        "n": len(training[1]),
        "epochs": len(fit.history),
        "average": options.average or "joint",
        "evidence": -float(fit.evidence.per_datum),
        **lila.tested(finer, test),
        "coarse": lila.tested(model, test),
        **_costs(fit),
        "widths": {name: str(width) for name, width in fit.reading.invariances.items()},
        "averaged": lila.of_copies(model, tuple(training[0].shape[1:])),
        "seconds": fit.history[-1]["seconds"],
    }


def _costs(fit: sr.Fit) -> dict[str, float]:
    """Return the median seconds of an epoch and of an evidence step."""
    plain, with_evidence, before = list[float](), list[float](), 0.0
    for record in fit.history:
        kind = with_evidence if "log_evidence" in record else plain
        kind.append(record["seconds"] - before)
        before = record["seconds"]
    epoch = median(plain or with_evidence)
    return {"epoch_seconds": epoch, "estimate_seconds": median(with_evidence) - epoch}


def run(options: lila.Options) -> str:
    """Learn the augmentation of a residual network on rotated and shifted CIFAR-10."""
    return markdown(run_rows(NAME, options, ROWS, run_row))


def markdown(runs: list[Run]) -> str:
    """Return accuracy, NLL and evidence of every row, and of the better start of each seed."""
    starts = sorted((r for r in runs if r["row"] in STARTS), key=lambda r: -float(r["evidence"]))
    best = {r["seed"]: r for r in starts}  # the last of a seed: least -log evidence
    by_row = {"learned": list(best.values())}
    by_row |= {row: [r for r in runs if r["row"] == row] for row in ROWS}
    rows = []
    for row, row_runs in by_row.items():
        if row_runs:
            ranges = "; ".join(f"{name} {value}" for name, value in row_runs[0]["widths"].items())
            copies = "; ".join(f"{name} {v:.3g}" for name, v in row_runs[0]["averaged"].items())
            keys = ("accuracy", "nll", "evidence")
            figures = [f"{mean(r[key] for r in row_runs):.4g}" for key in keys]
            seconds = f"{mean(r['seconds'] for r in row_runs):.0f}"
            rows.append([row, ranges, copies, *figures, seconds, len(row_runs)])
    head = ["method", "ranges", "copies", "accuracy %", "test NLL", "-log evidence / N"]
    return table([*head, "s", "seeds"], rows)
