"""Figures 2, 3 and 5 of Learning Invariant Weights: rotations learned over training.

    python -m symrazor.experiments.liw_figures --data DIR --json DIR2/figures.json [--device cuda]
    python -m symrazor.experiments.liw_figures --small --json DIR2/figures.json

Rows: `recovery` (Figure 2: five starting angles, three versions of MNIST, scales fixed as in
Table 1; the other rows learn them), `escape` (the start from which the paper's method fails, 175
degrees on partially rotated images with averaged probabilities: by the gradient alone, and after
`choose_starts`), `methods` (Figure 5: the bound against maximum likelihood and a point estimate
with a prior, 1,000 images), `relu` (the same for a network that learns its filters), `bank`
(Figure 3: one filter under seven rotations over training) and `rings` (the same question in the
plane). Figures are saved next to the JSON file.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from symrazor.data import rings
from symrazor.experiments import liw_table1
from symrazor.experiments.liw import Options, Progress, check, degrees, load, main, save
from symrazor.experiments.liw_drawing import draw, draw_bank
from symrazor.experiments.results import Run
from symrazor.groups.lie import so2
from symrazor.invariance import (
    AffineLie,
    InvariantWeights,
    LieDistribution,
    RandomFourier,
    Rectified,
)
from symrazor.invariance.lie_distributions import midpoints
from symrazor.training.batched_training import (
    BatchedConfig,
    Data,
    History,
    Member,
    Method,
    choose_starts,
    evaluate,
    train,
)

NAME = "liw-figures"
ROWS = ("rings", "recovery", "escape", "methods", "relu", "bank")
METHODS: tuple[Method, ...] = ("vi", "map", "ml")
FILTERS = 7
RESTARTS = (1.0, 0.5, 0.25)
"""Fractions of the starting angle that are tried before the training, see `choose_starts`."""

STEPS, BATCH, SAMPLES = 800, 500, 16
"""A shorter training than for Table 1: a figure only shows where the ranges go."""

BY_HEART = 1000
"""Training images where methods are compared: few enough for maximum likelihood to memorise them.
With 60,000 images 1,024 features cannot fit all, and averages improve the fit as well.
"""

FEW, FEW_AT_ONCE, SHORT = 300, 100, 60
"""With `--small`: training images, images in a batch, steps of a trial."""

Cells = Sequence[tuple[str, float, Method]]
"""Version of the data, starting angle in degrees, method."""


def run(options: Options) -> str:
    """Train the requested rows, draw figures, and return a table of starts and results."""
    check(NAME, options)
    if not any(options.wants(row) for row in ROWS):
        raise ValueError(f"No row matches {' '.join(options.rows)}. Rows: {', '.join(ROWS)}.")
    makers = {
        "rings": _rings,
        "recovery": _recovery,
        "escape": _escape,
        "methods": _methods,
        "relu": _relu,
        "bank": _bank,
    }
    runs: list[Run] = []
    for seed in options.seed:
        for row, make in makers.items():
            if options.wants(row):
                new = make(options, seed)
                save(NAME, options, new)
                runs += new
    return markdown(runs)


def _angles(
    name: str,
    options: Options,
    seed: int,
    versions: Sequence[str],
    cells: Cells,
    restarts: Sequence[float] = (),
) -> list[Run]:
    """Train Table 1's network, or one of rectified units, for all cells at once."""
    training, test = _pictures(versions, options, BY_HEART if name in ("methods", "relu") else None)
    members = [Member(versions.index(version), True, method) for version, _, method in cells]
    how = options if name == "recovery" else _free(options)
    plan = _plan(how, seed)
    starts = [start for _, start, _ in cells]
    model = liw_table1.network(training.x.shape[-1], starts, how, seed, name == "relu")
    if restarts:
        choose_starts(model, training, members, plan, restarts, SHORT if options.small else None)
    history = train(
        model, training, members, plan, Progress(f"{NAME} {name}", plan.steps, range(len(cells)))
    )
    return _runs(name, options, seed, cells, (model, history, training, test, members))


def _free(options: Options) -> Options:
    """Return whether scales are learned: fixed in Figure 2 as in Table 1, learned in the others."""
    return options if options.kept_scale is not None else replace(options, learn_scales=True)


def _pictures(
    versions: Sequence[str], options: Options, most: int | None = None
) -> tuple[Data, Data]:
    training, test = load("mnist", versions, options)
    most = FEW if options.small else most
    return Data(training.x[:, :most], training.y[:, :most]), test


def _plan(options: Options, seed: int) -> BatchedConfig:
    """Return Table 1's training, shortened, with a learning rate for the filters."""
    if options.small:
        options = replace(options, batch=options.batch or FEW_AT_ONCE)
    else:
        steps, batch = options.steps or STEPS, options.batch or BATCH
        samples = options.samples or SAMPLES
        options = replace(options, steps=steps, batch=batch, samples=samples)
    return replace(liw_table1.schedule(options, seed), weight_rate=_weight_rate(options))


def _runs(
    name: str,
    options: Options,
    seed: int,
    cells: Cells,
    found: tuple[InvariantWeights, History, Data, Data, Sequence[Member]],
) -> list[Run]:
    model, history, training, test, members = found
    bound, _ = evaluate(model, training, members)
    _, accuracy = evaluate(model, test, members)
    return [
        {
            "row": options.named(f"{name}/{version}/{start:g}/{method}"),
            "seed": seed,
            "small": options.small,
            "start": start,
            "method": method,
            "degrees": degrees(history, i),
            "steps": history.steps,
            "accuracy": 100 * accuracy[i].item(),
            "elbo_per_datum": bound.per_datum[i].item() if method == "vi" else None,
        }
        for i, (version, start, method) in enumerate(cells)
    ]


def _recovery(options: Options, seed: int) -> list[Run]:
    """Run Figure 2."""
    versions = liw_table1.VERSIONS
    starts = liw_table1.ANGLES[::2] if options.small else liw_table1.ANGLES
    cells: Cells = [(version, start, "vi") for version in versions for start in starts]
    runs = _angles("recovery", options, seed, versions, cells, RESTARTS)
    panels = [[r for r in runs if r["row"].split("/")[1] == version] for version in versions]
    draw(options, "figure2.png", list(zip(versions, panels, strict=True)))
    return runs


def _escape(options: Options, seed: int) -> list[Run]:
    """Start at 175 degrees on partially rotated images, with and without trying other starts."""
    options = replace(options, average="probs")
    cells: Cells = [("partially rotated", 175.0, "vi")]
    ways = {"gradient": (), "chosen start": RESTARTS}
    runs: list[Run] = []
    for way, shares in ways.items():
        (run_,) = _angles("escape", options, seed, ("partially rotated",), cells, shares)
        runs.append(run_ | {"row": options.named(f"escape/{way}/175/vi")})
    draw(options, "escape.png", [(way, [r]) for way, r in zip(ways, runs, strict=True)])
    return runs


def _methods(options: Options, seed: int) -> list[Run]:
    """Run Figure 5."""
    starts = (5.0, 90.0) if options.small else liw_table1.ANGLES
    cells: Cells = [("fully rotated", start, method) for method in METHODS for start in starts]
    runs = _angles("methods", options, seed, ("fully rotated",), cells)
    titles = {"vi": "variational", "map": "point estimate, prior", "ml": "maximum likelihood"}
    panels = [(titles[m], [r for r in runs if r["method"] == m]) for m in METHODS]
    draw(options, "figure5.png", panels)
    return runs


def _relu(options: Options, seed: int) -> list[Run]:
    """Run Figure 5 with a network that learns its filters and can fit anything."""
    methods: tuple[Method, ...] = ("vi", "ml")
    starts = (5.0, 90.0) if options.small else (5.0, 45.0, 90.0)
    cells: Cells = [("fully rotated", start, method) for method in methods for start in starts]
    runs = _angles("relu", options, seed, ("fully rotated",), cells)
    titles = {"vi": "variational", "ml": "maximum likelihood"}
    panels = [(titles[m], [r for r in runs if r["method"] == m]) for m in methods]
    draw(options, "figure5-relu.png", panels)
    return runs


def _weight_rate(options: Options) -> float:
    return 3e-3 if options.small else 1e-3


def _rings(options: Options, seed: int) -> list[Run]:
    """Run Figure 5 in the plane: whole rings, and arcs of 120 degrees."""
    sets = ("rings", "arcs")
    data, test = (
        Data.of([rings(n, angle, seed=seed + s) for angle in (360, 120)], options.place)
        for n, s in ((120, 0), (400, 1000))
    )
    starts = (5.0, 90.0)
    methods: tuple[Method, ...] = ("vi", "ml")
    cells: Cells = [(version, start, m) for version in sets for start in starts for m in methods]
    members = [Member(sets.index(version), True, method) for version, _, method in cells]
    generator = torch.Generator().manual_seed(seed)
    features = RandomFourier((2,), 128, 5.0, (len(cells),), generator)
    widths = torch.tensor([start for _, start, _ in cells]).deg2rad().unsqueeze(1)
    free = _free(options)
    model = InvariantWeights(
        features, LieDistribution(so2(), widths), 2, options.average, free.scale
    ).to(options.place)
    plan = BatchedConfig(
        steps=250, batch=120, samples=16, width_rate=0.03, rates=(0.3, 0.1), every=8, note_every=5
    )
    rate = plan.scale_rate if free.learn_scales else 0.0
    history = train(model, data, members, replace(plan, seed=seed, scale_rate=rate))
    runs = _runs("rings", options, seed, cells, (model, history, data, test, members))
    panels = []
    for version in sets:
        for method in methods:
            chosen = [r for r in runs if f"/{version}/" in r["row"] and r["method"] == method]
            panels.append((f"{version}, {method}", chosen))
    draw(options, "rings.png", panels)
    return runs


def _bank(options: Options, seed: int) -> list[Run]:
    """Run Figure 3: filters of a ReLU network at seven rotations between -eta and eta."""
    training, test = _pictures(("fully rotated",), options)
    size, width = training.x.shape[-1], 96 if options.small else 1024
    generator = torch.Generator().manual_seed(seed)
    features = Rectified((1, size, size), width, (1,), generator, where="weights")
    start = torch.tensor([[5.0]]).deg2rad()
    rotation = AffineLie("rotation", start)
    free = _free(options)
    model = InvariantWeights(features, rotation, 10, options.average, free.scale)
    model = model.to(options.place)
    plan = _plan(free, seed)
    banks: list[Tensor] = []
    times: list[int] = []
    progress = Progress(f"{NAME} bank", plan.steps, [0])

    def note(step: int, seen: InvariantWeights, history: History) -> None:
        progress(step, seen, history)
        if step >= len(banks) * plan.steps / 5 or step == plan.steps - 1:
            banks.append(_filters(seen))
            times.append(step)

    members = [Member()]
    history = train(model, training, members, plan, note)
    cells: Cells = [("fully rotated", 5.0, "vi")]
    draw_bank(options, banks, times)
    return _runs("bank", options, seed, cells, (model, history, training, test, members))


@torch.no_grad()
def _filters(model: InvariantWeights) -> Tensor:
    """Return every filter at seven evenly spaced rotations, [7, width, h, w]."""
    points = midpoints(FILTERS).unsqueeze(1).to(model.distribution.mask)
    assert isinstance(model.features, Rectified)
    banks = model.features.filters(model.distribution.matrices(points))
    return banks[0, :, :, 0].cpu()


def markdown(runs: Sequence[Run]) -> str:
    """Return the start and the result of every run."""
    lines = ["| run | start | end | bound / n | accuracy % |", "|---|---|---|---|---|"]
    for r in runs:
        bound = "" if r["elbo_per_datum"] is None else f"{r['elbo_per_datum']:.3f}"
        lines.append(
            f"| {r['row']} | {r['start']:g}° | {r['degrees'][-1]:.0f}° | {bound} | "
            f"{r['accuracy']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(NAME, run)
