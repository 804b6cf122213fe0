"""Measure the benefit of learned augmentation for a residual network on transformed CIFAR-10.

    python -m symrazor.experiments.lila_resnet --data DIR --device cuda --json FILE [--n 10000]
    python -m symrazor.experiments.lila_resnet --small

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
from symrazor.data import Tensors, rotated, translated
from symrazor.experiments import lila
from symrazor.experiments.results import Run, add_runs, merged
from symrazor.invariance import Augment, Augmented, Average, affine

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
        """Create the layers."""
        super().__init__()
        self.first = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, out_channels) for _ in range(2))
        change = stride > 1 or channels != out_channels
        self.short = nn.Conv2d(channels, out_channels, 1, stride) if change else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        h = F.relu(self.norms[0](self.first(x)))
        found: Tensor = F.relu(self.norms[1](self.second(h)) + self.short(x))
        return found


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


def data(options: lila.Options, seed: int) -> tuple[Tensors, Tensors]:
    """Return training and test images, each transformed once, on the device."""
    n = options.n or (60 if options.small else 10_000)
    name = "mnist" if options.small else "cifar-10"
    train, test = (
        (translated(rotated(x, 180, 2 * seed + i), SHIFT, 2 * seed + i), y)
        for i, (x, y) in enumerate(lila.pictures(name, options, n, seed))
    )
    place = options.place
    return (train[0].to(place), train[1].to(place)), (test[0].to(place), test[1].to(place))


def config(options: lila.Options, seed: int) -> sr.FitConfig:
    """Return training options with about 20 evidence steps after the burn-in."""
    epochs = options.epochs or (2 if options.small else 40)
    every = max(1, epochs // 20)
    base = sr.FitConfig(epochs=epochs, batch_size=128, lr=4e-3, every=every, seed=seed)
    base = base.change(evidence_batch=500, pieces=1)
    return base.change(estimator="mc", subset=1000, progress=False, device=options.place)


def train(row: str, options: lila.Options, seed: int, average: Average) -> Run:
    """Train one network."""
    pair, test = data(options, seed)
    torch.manual_seed(seed)
    model = network(pair[0], 4 if options.small else WIDTH)
    if row in STARTS:
        start = STARTS[row]
        augment = Augment(affine(tuple(start), start), 2 if options.small else SAMPLES)
        model = Augmented(model, augment, average=average)
    fit = sr.fit(model.to(options.place), pair, config=config(options, seed))
    finer = model.refined(FINER) if isinstance(model, Augmented) else model
    return {
        "n": len(pair[1]),
        "epochs": len(fit.history),
        "average": average,
        "evidence": -float(fit.evidence.per_datum),
        **lila.tested(finer, test),
        "coarse": lila.tested(model, test),
        **_costs(fit),
        "widths": {name: str(one) for name, one in fit.reading.invariances.items()},
        "averaged": lila.of_copies(model, tuple(pair[0].shape[1:])),
        "seconds": fit.history[-1]["seconds"],
    }


def _costs(fit: sr.Fit) -> dict[str, float]:
    """Return the median seconds of an epoch and of an evidence step."""
    plain, both, before = list[float](), list[float](), 0.0
    for record in fit.history:
        kind = both if "log_evidence" in record else plain
        kind.append(record["seconds"] - before)
        before = record["seconds"]
    epoch = median(plain or both)
    return {"epoch_seconds": epoch, "estimate_seconds": median(both) - epoch}


def run(options: lila.Options) -> str:
    """Train the requested rows and return the table as markdown."""
    runs: list[Run] = add_runs(NAME, options.json, []) if options.json is not None else []
    rows = [row for row in ROWS if options.wants(row)]
    if options.rows and not rows:
        raise ValueError(f"No row matches {' '.join(options.rows)}. Rows: {ROWS}.")
    for seed in options.seed:
        for row in rows:
            found: Run = {"row": row, "seed": seed, "small": options.small}
            try:
                found |= train(row, options, seed, options.average or "joint")
            except FloatingPointError as error:  # a run that diverged must not cost the others
                found |= {"error": str(error)}
            runs = merged(runs, [found])
            if options.json is not None:
                runs = merged(runs, add_runs(NAME, options.json, [found]))
    return markdown([r for r in runs if r["small"] == options.small and "error" not in r])


def markdown(runs: list[Run]) -> str:
    """Return accuracy, NLL and evidence of every row, and of the better start of each seed."""
    starts = sorted((r for r in runs if r["row"] in STARTS), key=lambda r: -float(r["evidence"]))
    best = {r["seed"]: r for r in starts}  # the last of a seed: least -log evidence
    by_row = {"learned": list(best.values())}
    by_row |= {row: [r for r in runs if r["row"] == row] for row in ROWS}
    lines = [
        "| method | ranges | copies | accuracy % | test NLL | -log evidence / N | s | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, found in by_row.items():
        if found:
            figures = [f"{mean(r[k] for r in found):.4g}" for k in ("accuracy", "nll", "evidence")]
            ranges = "; ".join(f"{name} {value}" for name, value in found[0]["widths"].items())
            copies = "; ".join(f"{name} {v:.3g}" for name, v in found[0]["averaged"].items())
            seconds = f"{mean(r['seconds'] for r in found):.0f}"
            cells = [row, ranges, copies, *figures, seconds, str(len(found))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    lila.main(NAME, run)
