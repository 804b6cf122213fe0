"""Table 1 of Learning Invariant Weights: learn how much rotation the data have.

1,024 random Fourier features averaged over rotations, on fully rotated, partially rotated and
regular MNIST, with the range fixed at five angles or learned. A learned range starts at the best of
the same five angles by the bound after a short training of the posterior. The prior scale of the
outputs and the standard deviation of the frequencies are fixed as in the paper: averages over wide
angles have smaller features, which a fixed scale penalises. With `--learn-scales` the bound is
higher and tolerates a range that is too large. All eighteen models are trained at once. Figures of
unfinished models are written to the file every quarter of the steps.
"""

from collections.abc import Sequence
from statistics import mean

import torch

from symrazor.experiments.liw import Options, Progress, check, degrees, load, save, widths_of
from symrazor.experiments.results import Run, table
from symrazor.invariance import AffineLie, Features, InvariantWeights, RandomFourier, Rectified
from symrazor.training.batched_starts import choose_starts
from symrazor.training.batched_training import (
    BatchedConfig,
    Data,
    History,
    Member,
    evaluate,
    train,
)

NAME = "liw-table1"
VERSIONS = ("fully rotated", "partially rotated", "regular")
ANGLES = (5.0, 45.0, 90.0, 135.0, 175.0)
START = 5.0
TRIED = tuple(angle / START for angle in ANGLES)
"""Fractions of the starting angle that learned rows compare first, see `choose_starts`."""

PAPER: dict[str, tuple[tuple[float, float], ...]] = {
    "fixed 5": ((79.29, -1.07), (86.71, -0.80), (96.00, -0.36)),
    "fixed 45": ((87.35, -0.63), (91.13, -0.49), (95.93, -0.26)),
    "fixed 90": ((90.33, -0.52), (91.69, -0.44), (94.69, -0.30)),
    "fixed 135": ((91.19, -0.45), (91.04, -0.45), (92.13, -0.36)),
    "fixed 175": ((91.57, -0.43), (90.47, -0.47), (90.97, -0.45)),
    "learned": ((91.72, -0.43), (92.34, -0.42), (96.40, -0.26)),
}
"""Row -> (accuracy in per cent, bound per sample) on the three versions."""

SCHEDULE = BatchedConfig(
    steps=5000, batch=1000, samples=32, width_rate=0.03, rates=(0.2, 0.002), note_every=20
)
SMALL = BatchedConfig(
    steps=150,
    batch=250,
    samples=16,
    width_rate=0.08,
    rates=(0.5, 0.05),
    settle=0.25,
    every=8,
    note_every=3,
)

PROBS = {"batch": 500, "samples": 16}
SMALL_PROBS = {"batch": 125, "samples": 8}
"""Settings for averaged probabilities, where a step costs several times as much."""

PARTS = 4
SUBSET = 5000
"""Number of samples on which the fit of unfinished models is measured."""


def schedule(options: Options, seed: int) -> BatchedConfig:
    """Return the training with the changes of the options."""
    base = vars(SMALL if options.small else SCHEDULE)
    if options.average == "probs":
        base = base | (SMALL_PROBS if options.small else PROBS)
    if not options.learn_scales:
        base = base | {"scale_rate": 0.0}
    options_given = {"steps": options.steps, "batch": options.batch, "samples": options.samples}
    changes = {key: value for key, value in options_given.items() if value is not None}
    return BatchedConfig(**(base | changes | {"seed": seed}))


def network(
    size: int, angles: list[float], options: Options, seed: int, relu: bool = False
) -> InvariantWeights:
    """Return models side by side, one for each starting angle in degrees."""
    generator = torch.Generator().manual_seed(seed)
    width = 96 if options.small else 1024
    shape, lead = (1, size, size), (len(angles),)
    features: Features = RandomFourier(shape, width, options.frequency, lead, generator)
    if relu:
        features = Rectified(shape, width, lead, generator, where="input")
    start = torch.tensor(angles).deg2rad().unsqueeze(1)
    rotation = AffineLie("rotation", start)
    model = InvariantWeights(features, rotation, 10, options.average, options.scale)
    return model.to(options.resolved_device)


def run_seed(options: Options, seed: int) -> list[Run]:
    """Train the requested rows, all at once."""
    names = options.choose(f"{version}/{row}" for row in PAPER for version in VERSIONS)
    cells = [name.split("/") for name in names]
    data = load("mnist", VERSIONS, options, seed)
    angles = [START if row == "learned" else float(row.split()[1]) for _, row in cells]
    members = [Member(VERSIONS.index(version), row == "learned") for version, row in cells]
    plan = schedule(options, seed)
    model = network(data[0].x.shape[-1], angles, options, seed)
    progress = Progress(NAME, plan.steps, [i for i, member in enumerate(members) if member.learn])
    choose_starts(model, data[0], members, plan, TRIED)
    parts = 1

    def runs(history: History, most: int | None = None) -> list[Run]:
        """Return and save the figures of all models."""
        settings: Run = {"seed": seed, "small": options.small, "average": options.average}
        settings |= {"seconds_together": progress.seconds}
        results = figures(model, data, members, history, most)
        new = [
            {"row": options.named(name), **settings, **result}
            for name, result in zip(names, results, strict=True)
        ]
        save(NAME, options, new)
        return new

    def note(step: int, model: InvariantWeights, history: History) -> None:
        nonlocal parts
        progress(step, model, history)
        if options.json is not None and parts < PARTS and step >= parts * plan.steps / PARTS:
            parts += 1
            runs(history, SUBSET)

    return runs(train(model, data[0], members, plan, note))


def figures(
    model: InvariantWeights,
    data: tuple[Data, Data],
    members: Sequence[Member],
    history: History,
    most: int | None = None,
) -> list[Run]:
    """Return bound, accuracy and ranges of every model.

    Args:
        model: Trained or unfinished models.
        data: Training and test data.
        members: Description of each model.
        history: History of the training.
        most: Number of training samples to measure the fit on; by default all.
    """
    training, test = data
    part = Data(training.x[:, :most], training.y[:, :most])
    bound, _ = evaluate(model, part, members)
    _, accuracy = evaluate(model, test, members)
    assert isinstance(model.features, RandomFourier)
    sigma = model.features.frequency()
    fit = bound.log_likelihood / bound.n_data
    return [
        {
            "accuracy": 100 * accuracy[i].item(),
            "elbo_per_datum": (fit[i] - bound.complexity[i] / training.size).item(),
            "fit_per_datum": fit[i].item(),
            "widths": widths_of(model, i, training.x.shape[-1] / 2),
            "scale": model.scale.value[i].item(),
            "sigma": sigma[i].item(),
            "degrees": degrees(history, i) if member.learn else [],
            "steps": history.steps if member.learn else [],
            "trained_steps": history.steps[-1] + 1,
            "models_together": len(members),
        }
        for i, member in enumerate(members)
    ]


def run(options: Options) -> str:
    """Reproduce Learning Invariant Weights table 1: does the bound find the range of rotations?"""
    check(NAME, options)
    return markdown([new for seed in options.seed for new in run_seed(options, seed)])


def markdown(runs: list[Run]) -> str:
    """Return accuracy and bound of every row next to the paper's, mean over seeds."""
    head = [t for v in VERSIONS for t in (f"{v} %", "paper", "bound / n", "paper")]
    rows = []
    for row, paper in PAPER.items():
        cells, angles = [row], []
        for version, (accuracy, bound) in zip(VERSIONS, paper, strict=True):
            cell_runs = [r for r in runs if r["row"].split(" (")[0] == f"{version}/{row}"]
            cells += [_mean([r["accuracy"] for r in cell_runs], 2), f"{accuracy:.2f}"]
            cells += [_mean([r["elbo_per_datum"] for r in cell_runs], 3), f"{bound:.2f}"]
            angles.append(_mean([r["widths"]["rotation (degrees)"] for r in cell_runs], 0))
        rows.append([*cells, " / ".join(angles)])
    seconds = {r["seed"]: r["seconds_together"] for r in runs}
    total = ", ".join(f"{value:.0f}" for value in seconds.values())
    text = table(["row", *head, "learned degrees"], rows)
    return f"{text}\n\nrows trained together: {len(runs)}, in {total} s"


def _mean(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f}" if values else ""
