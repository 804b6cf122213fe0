"""What Tables 2 and 3 of Learning Invariant Weights share: a ReLU network and four groups of maps.

The first layer is learned as a point estimate, the output layer has a posterior. Without
transformations (MLP), or with widths that start at almost nothing for rotations, translations,
scalings, or all six affine generators. Models of one version of the data are trained at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symrazor.experiments.liw import Options, Progress, check, load, save, widths_of
from symrazor.experiments.results import Run
from symrazor.invariant import InvariantWeights, Member, Rectified, Schedule, evaluate, train
from symrazor.transforms import AffineLie
from symrazor.transforms.lie import GROUPS

VERSIONS = ("fully rotated", "translated", "scaled", "regular")
ROWS = ("MLP", "rotation", "translation", "scale", "affine")
NAMES = GROUPS["affine"]
START = 0.05
SMALL = Schedule(
    steps=150,
    batch=250,
    samples=8,
    width_rate=0.03,
    weight_rate=0.01,
    rates=(0.3, 0.03),
    every=8,
    note_every=10,
)


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        name: of the command.
        data: name of the data set.
        paper: row -> accuracy in per cent on the four versions.
        schedule: of the training.
        small: of the training on small pictures.
    """

    name: str
    data: str
    paper: Mapping[str, Sequence[float]]
    schedule: Schedule
    small: Schedule = SMALL


def run(table: Table, options: Options) -> str:
    """Train the rows that were asked for, version by version; returns the table as markdown."""
    check(table.name, options)
    runs: list[Run] = []
    for version in VERSIONS:
        plain = [row for row in ROWS[:1] if options.wants(f"{version}/{row}")]
        moving = [row for row in ROWS[1:] if options.wants(f"{version}/{row}")]
        for seed in options.seed:
            for rows in (plain, moving):
                if rows:
                    runs += _train(table, options, version, rows, seed)
    if not runs:
        raise ValueError(f"expected rows like 'regular/affine', got {' '.join(options.rows)}")
    return markdown(table, runs)


def masks(rows: Sequence[str]) -> Tensor:
    """Which of the six generators each row may use; for an MLP none."""
    kept = [GROUPS.get(row, ()) for row in rows]
    return torch.tensor([[float(name in names) for name in NAMES] for names in kept])


def _schedule(table: Table, options: Options, rows: Sequence[str], seed: int) -> Schedule:
    base = table.small if options.small else table.schedule
    samples = 1 if rows == ["MLP"] else base.samples
    steps, batch = options.steps or base.steps, options.batch or base.batch
    return replace(base, steps=steps, batch=batch, samples=samples, seed=seed)


def _train(
    table: Table, options: Options, version: str, rows: Sequence[str], seed: int
) -> list[Run]:
    training, test = load(table.data, (version,), options)
    plan = _schedule(table, options, rows, seed)
    generator = torch.Generator().manual_seed(seed)
    width = 96 if options.small else 1024
    shape = training.x.shape[2:]
    features = Rectified(shape, width, (len(rows),), generator, where="input")
    distribution = AffineLie("affine", torch.full((len(rows), 6), START), masks(rows))
    model = InvariantWeights(features, distribution, 10).to(options.place)
    members = [Member(learn=row != "MLP") for row in rows]
    progress = Progress(f"{table.name} {version}", plan.steps, range(len(rows)))
    train(model, training, members, plan, progress)
    seconds = progress.seconds
    nodes = distribution.nodes(1 if rows == ["MLP"] else 32 if options.small else 128)
    bound, _ = evaluate(model, training, members, nodes, batch=250)
    _, accuracy = evaluate(model, test, members, nodes, batch=250)
    runs: list[Run] = [
        {
            "row": f"{version}/{row}",
            "seed": seed,
            "small": options.small,
            "accuracy": 100 * accuracy[i].item(),
            "elbo_per_datum": bound.per_datum[i].item(),
            "fit_per_datum": (bound.log_likelihood[i] / bound.n_data).item(),
            "widths": widths_of(model, i, shape[-1] / 2),
            "scale": model.scale.value[i].item(),
            "seconds_together": seconds,
            "models_together": len(rows),
        }
        for i, row in enumerate(rows)
    ]
    save(table.name, options, runs)
    return runs


def markdown(table: Table, runs: Sequence[Run]) -> str:
    """Accuracies beside the paper's, mean over seeds; then the learned widths of the affine row."""
    head = ["row"]
    for version in VERSIONS:
        head += [f"{version} %", "paper"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in ROWS:
        cells = [row]
        for version, figure in zip(VERSIONS, table.paper[row], strict=True):
            found = [r["accuracy"] for r in runs if r["row"] == f"{version}/{row}"]
            cells.append(f"{sum(found) / len(found):.2f}" if found else "")
            cells.append(f"{figure:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for r in runs:
        if r["row"].endswith("/affine"):
            widths = ", ".join(f"{name} {value:.3g}" for name, value in r["widths"].items())
            lines.append(f"{r['row']} (seed {r['seed']}): {widths}  ")
    return "\n".join(lines)
