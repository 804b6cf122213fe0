"""Table 1 of Learning Invariant Weights: does the bound know how much rotation there is?

    python -m symrazor.experiments.liw_table1 --data DIR --json FILE [--device cuda]
    python -m symrazor.experiments.liw_table1 --small

Random Fourier features, 1,024 of them, averaged over rotations; fully rotated, partially rotated
and regular MNIST; the width fixed at five angles, or learned from 5 degrees. All eighteen models
are trained at once.
"""

import torch

from symrazor.experiments.liw import (
    Options,
    Progress,
    check,
    degrees,
    load,
    main,
    save,
    widths_of,
)
from symrazor.experiments.results import Run
from symrazor.invariant import (
    Features,
    InvariantWeights,
    Member,
    RandomFourier,
    Rectified,
    Schedule,
    evaluate,
    train,
)
from symrazor.transforms import AffineLie

NAME = "liw-table1"
VERSIONS = ("fully rotated", "partially rotated", "regular")
ANGLES = (5.0, 45.0, 90.0, 135.0, 175.0)
START = 5.0

PAPER: dict[str, tuple[tuple[float, float], ...]] = {
    "fixed 5": ((79.29, -1.07), (86.71, -0.80), (96.00, -0.36)),
    "fixed 45": ((87.35, -0.63), (91.13, -0.49), (95.93, -0.26)),
    "fixed 90": ((90.33, -0.52), (91.69, -0.44), (94.69, -0.30)),
    "fixed 135": ((91.19, -0.45), (91.04, -0.45), (92.13, -0.36)),
    "fixed 175": ((91.57, -0.43), (90.47, -0.47), (90.97, -0.45)),
    "learned": ((91.72, -0.43), (92.34, -0.42), (96.40, -0.26)),
}
"""Row -> (accuracy in per cent, bound per datum) on the three versions."""

SCHEDULE = Schedule(
    steps=5000, batch=1000, samples=32, width_rate=0.03, rates=(0.2, 0.002), note_every=20
)
SMALL = Schedule(
    steps=150,
    batch=250,
    samples=16,
    width_rate=0.08,
    rates=(0.5, 0.05),
    settle=0.25,
    every=8,
    note_every=3,
)


def schedule(options: Options, seed: int) -> Schedule:
    """The training, with what the options change."""
    base = SMALL if options.small else SCHEDULE
    steps, batch = options.steps or base.steps, options.batch or base.batch
    return Schedule(**(vars(base) | {"steps": steps, "batch": batch, "seed": seed}))


def network(
    size: int, angles: list[float], options: Options, seed: int, relu: bool = False
) -> InvariantWeights:
    """Models side by side, one for each starting angle in degrees."""
    generator = torch.Generator().manual_seed(seed)
    width, sigma = (96, 0.6) if options.small else (1024, 0.3)
    shape, lead = (1, size, size), (len(angles),)
    features: Features = RandomFourier(shape, width, sigma, lead, generator)
    if relu:
        features = Rectified(shape, width, lead, generator, where="input")
    start = torch.tensor(angles).deg2rad().unsqueeze(1)
    model = InvariantWeights(features, AffineLie("rotation", start), 10)
    return model.to(options.place)


def run_seed(options: Options, seed: int) -> list[Run]:
    """Train the rows that were asked for, all at once."""
    cells = [
        (row, place, version)
        for row in PAPER
        for place, version in enumerate(VERSIONS)
        if options.wants(f"{version}/{row}")
    ]
    if not cells:
        raise ValueError(f"expected rows like 'regular/learned', got {' '.join(options.rows)}")
    training, test = load("mnist", VERSIONS, options)
    learned = [row == "learned" for row, _, _ in cells]
    angles = [
        START if new else float(row[6:]) for (row, _, _), new in zip(cells, learned, strict=True)
    ]
    members = [Member(place, new) for (_, place, _), new in zip(cells, learned, strict=True)]
    plan = schedule(options, seed)
    model = network(training.x.shape[-1], angles, options, seed)
    progress = Progress(NAME, plan.steps, [i for i, new in enumerate(learned) if new])
    history = train(model, training, members, plan, progress)
    trained = progress.seconds
    bound, _ = evaluate(model, training, members)
    _, accuracy = evaluate(model, test, members)
    assert isinstance(model.features, RandomFourier)
    sigma = model.features.frequency()
    runs: list[Run] = []
    for i, (row, _, version) in enumerate(cells):
        runs.append(
            {
                "row": f"{version}/{row}",
                "seed": seed,
                "small": options.small,
                "accuracy": 100 * accuracy[i].item(),
                "elbo_per_datum": bound.per_datum[i].item(),
                "fit_per_datum": (bound.log_likelihood[i] / bound.n_data).item(),
                "widths": widths_of(model, i, training.x.shape[-1] / 2),
                "scale": model.scale.value[i].item(),
                "sigma": sigma[i].item(),
                "degrees": degrees(history, i) if learned[i] else [],
                "steps": history.steps if learned[i] else [],
                "seconds_together": trained,
                "models_together": len(cells),
            }
        )
    save(NAME, options, runs)
    return runs


def run(options: Options) -> str:
    """Train, and return the table as markdown."""
    check(NAME, options)
    runs = [new for seed in options.seed for new in run_seed(options, seed)]
    return markdown(runs)


def markdown(runs: list[Run]) -> str:
    """Accuracy and bound of every row beside the paper's, mean over seeds."""
    head = ["row"]
    for version in VERSIONS:
        head += [f"{version} %", "paper", "bound / n", "paper"]
    lines = [f"| {' | '.join(head)} | learned degrees |", "|" + "---|" * (len(head) + 1)]
    for row, figures in PAPER.items():
        cells, angles = [row], []
        for version, (accuracy, bound) in zip(VERSIONS, figures, strict=True):
            found = [r for r in runs if r["row"] == f"{version}/{row}"]
            cells.append(_mean([r["accuracy"] for r in found], 2))
            cells.append(f"{accuracy:.2f}")
            cells.append(_mean([r["elbo_per_datum"] for r in found], 3))
            cells.append(f"{bound:.2f}")
            angles.append(_mean([r["widths"]["rotation (degrees)"] for r in found], 0))
        lines.append(f"| {' | '.join(cells)} | {' / '.join(angles)} |")
    seconds = {r["seed"]: r["seconds_together"] for r in runs}
    total = ", ".join(f"{value:.0f}" for value in seconds.values())
    return "\n".join(lines) + f"\n\n{len(runs)} models, trained together in {total} s"


def _mean(values: list[float], digits: int) -> str:
    return f"{sum(values) / len(values):.{digits}f}" if values else ""


if __name__ == "__main__":
    main(NAME, run)
