"""Tables 2 and 3 of Learning Invariant Weights: learn which transformations images need.

Fully rotated, translated, scaled and regular MNIST (Table 2) and CIFAR-10 (Table 3). The first
layer of a ReLU network is learned as a point estimate; the output layer has a posterior. The rows
are no transformation (MLP), rotations, translations, scalings, and all six affine generators. Short
trainings first compare starting ranges: almost closed, or one kind of transformation wide open
(`choose_starts`). A first layer that has memorised the images gains nothing from a wide average and
would not open it. Models of one version of the data are trained at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
from torch import Tensor

from symrazor.experiments.liw import Options, Progress, check, load, save, widths_of
from symrazor.experiments.results import Run, table
from symrazor.invariance import AffineLie, InvariantWeights, Rectified
from symrazor.invariance.lie_distributions import AFFINE_SUBGROUPS
from symrazor.training.batched_starts import Share, choose_starts
from symrazor.training.batched_training import (
    BatchedConfig,
    Data,
    Member,
    evaluate,
    train,
)

VERSIONS = ("fully rotated", "translated", "scaled", "regular")
ROWS = ("MLP", "rotation", "translation", "scale", "affine")
NAMES = AFFINE_SUBGROUPS["affine"]
START = 0.1
CLOSED = 0.2
WIDE = (("rotation", 9.0), ("rotation", 30.0), ("translation", 4.0), ("scale", 5.0))
TRIED: tuple[Share, ...] = (
    1.0,
    *(
        [share if name in AFFINE_SUBGROUPS[group] else CLOSED for name in NAMES]
        for group, share in WIDE
    ),
)
"""Fractions of the starting ranges that are compared, see `choose_starts`: a little of all; or
rotations of 52 or 172 degrees, shifts of 0.4 half-widths, factors of 1.65, and less of the others.
"""

SCHEDULE = BatchedConfig(
    steps=10_000,
    batch=500,
    samples=32,
    scheme="mirrored",
    rates=(0.1, 0.002),
    every=40,
    note_every=100,
)
SMALL = BatchedConfig(
    steps=150,
    batch=250,
    samples=8,
    scheme="mirrored",
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
        name: Name of the command.
        data: Name of the data set.
        paper: Row -> accuracy in per cent on the four versions.
        steps: Training steps on images of full size.
    """

    name: str
    data: str
    paper: Mapping[str, Sequence[float]]
    steps: int

    def run(self, options: Options) -> str:
        """Train the requested rows version by version and return the table as markdown."""
        check(self.name, options)
        if options.kept_scale is not None or options.sigma is not None:
            raise ValueError("--kept-scale and --sigma have an effect on Table 1 and figures only.")
        names = options.choose(f"{version}/{row}" for version in VERSIONS for row in ROWS)
        runs: list[Run] = []
        for version in dict.fromkeys(name.split("/")[0] for name in names):
            rows = [row for row in ROWS if f"{version}/{row}" in names]
            # The MLP needs no transformations and is trained on its own.
            groups = [[row for row in rows if (row == "MLP") == plain] for plain in (True, False)]
            for seed in options.seed:
                data = load(self.data, (version,), options, seed)
                for group in filter(None, groups):
                    runs += _train(self, options, version, group, seed, data)
        return markdown(self, runs)

    def schedule(self, options: Options, rows: Sequence[str], seed: int) -> BatchedConfig:
        """Return the training of some rows with the changes of the options."""
        base = SMALL if options.small else replace(SCHEDULE, steps=self.steps)
        samples = 1 if rows == ["MLP"] else options.samples or base.samples
        steps, batch = options.steps or base.steps, options.batch or base.batch
        return replace(base, steps=steps, batch=batch, samples=samples, seed=seed)


def masks(rows: Sequence[str]) -> Tensor:
    """Return which of the six generators each row may use; none for an MLP."""
    generators = [AFFINE_SUBGROUPS.get(row, ()) for row in rows]
    return torch.tensor([[float(name in names) for name in NAMES] for names in generators])


def _train(
    settings: Table,
    options: Options,
    version: str,
    rows: Sequence[str],
    seed: int,
    data: tuple[Data, Data],
) -> list[Run]:
    """Train rows of one version together, and save them."""
    training, test = data
    plan = settings.schedule(options, rows, seed)
    generator = torch.Generator().manual_seed(seed)
    width = 96 if options.small else 1024
    shape = training.x.shape[2:]
    features = Rectified(shape, width, (len(rows),), generator, where="input")
    distribution = AffineLie("affine", torch.full((len(rows), 6), START), masks(rows))
    model = InvariantWeights(features, distribution, 10, options.average).to(
        options.resolved_device
    )
    members = [Member(learn=row != "MLP") for row in rows]
    progress = Progress(f"{settings.name} {version}", plan.steps, range(len(rows)))
    tried = choose_starts(model, training, members, plan, TRIED)
    train(model, training, members, plan, progress)
    seconds = progress.seconds
    nodes = distribution.nodes(1 if rows == ["MLP"] else 32 if options.small else 128)
    bound, _ = evaluate(model, training, members, nodes, batch=250)
    _, accuracy = evaluate(model, test, members, nodes, batch=250)
    runs: list[Run] = [
        {
            "row": options.named(f"{version}/{row}"),
            "seed": seed,
            "small": options.small,
            "average": options.average,
            "accuracy": 100 * accuracy[i].item(),
            "elbo_per_datum": bound.per_datum[i].item(),
            "fit_per_datum": (bound.log_likelihood[i] / bound.n_data).item(),
            "widths": widths_of(model, i, shape[-1] / 2),
            "tried": tried[:, i].tolist(),
            "scale": model.scale.value[i].item(),
            "trained_steps": plan.steps,
            "seconds_together": seconds,
            "models_together": len(rows),
        }
        for i, row in enumerate(rows)
    ]
    save(settings.name, options, runs)
    return runs


def markdown(settings: Table, runs: Sequence[Run]) -> str:
    """Return accuracies next to the paper's, and the learned ranges of the affine row."""
    rows = []
    for row, figures in settings.paper.items():
        cells = [row]
        for version, figure in zip(VERSIONS, figures, strict=True):
            values = [r["accuracy"] for r in runs if _plain(r["row"]) == f"{version}/{row}"]
            cells += [f"{mean(values):.2f}" if values else "", f"{figure:.2f}"]
        rows.append(cells)
    lines = [table(["row", *(t for v in VERSIONS for t in (f"{v} %", "paper"))], rows), ""]
    for r in runs:
        if _plain(r["row"]).endswith("/affine"):
            widths = ", ".join(f"{name} {value:.3g}" for name, value in r["widths"].items())
            lines.append(f"{r['row']} (seed {r['seed']}): {widths}  ")
    return "\n".join(lines)


def _plain(row: str) -> str:
    """Return the name of a row without the average."""
    return row.split(" (", maxsplit=1)[0]


TABLE_2 = Table(
    "liw-table2",
    "mnist",
    {
        "MLP": (90.35, 89.34, 96.61, 98.10),
        "rotation": (98.05, 94.08, 97.62, 98.64),
        "translation": (93.59, 97.87, 97.98, 98.76),
        "scale": (93.80, 94.30, 98.06, 98.35),
        "affine": (98.14, 97.66, 98.31, 98.93),
    },
    10_000,
)
TABLE_3 = Table(
    "liw-table3",
    "cifar-10",
    {
        "MLP": (41.24, 40.75, 46.56, 54.49),
        "rotation": (46.04, 40.71, 46.77, 54.72),
        "translation": (40.99, 45.20, 47.44, 55.79),
        "scale": (40.92, 41.22, 49.28, 54.72),
        "affine": (46.12, 45.77, 48.81, 55.44),
    },
    6000,
)


def run_table2(options: Options) -> str:
    """Reproduce Learning Invariant Weights table 2: transformations of four versions of MNIST."""
    return TABLE_2.run(options)


def run_table3(options: Options) -> str:
    """Reproduce Learning Invariant Weights table 3: transformations of CIFAR-10."""
    return TABLE_3.run(options)
