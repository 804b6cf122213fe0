"""Figures 2, 3 and 5 of Learning Invariant Weights: rotations learned over training.

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
from symrazor.experiments.figures import new_figure, save_figure
from symrazor.experiments.liw import Options, Progress, check, degrees, load, save
from symrazor.experiments.results import Run, table
from symrazor.groups.lie import so2
from symrazor.invariance import (
    AffineLie,
    InvariantWeights,
    LieDistribution,
    RandomFourier,
    Rectified,
)
from symrazor.invariance.lie_distributions import midpoints
from symrazor.training.batched_starts import choose_starts
from symrazor.training.batched_training import (
    BatchedConfig,
    Data,
    History,
    Member,
    Method,
    evaluate,
    train,
)

NAME = "liw-figures"
METHODS: dict[Method, str] = {
    "vi": "variational",
    "map": "point estimate, prior",
    "ml": "maximum likelihood",
}
FILTERS = 7
RESTARTS = (1.0, 0.5, 0.25)
"""Fractions of the starting angle that are tried before the training, see `choose_starts`."""

STEPS, BATCH, SAMPLES = 800, 500, 16
"""A shorter training than for Table 1: a figure only shows where the ranges go."""

MEMORISED_IMAGES = 1000
"""Training images where methods are compared: few enough for maximum likelihood to memorise them.
With 60,000 images 1,024 features cannot fit all, and averages improve the fit as well.
"""

SMALL_IMAGES, SMALL_BATCH, SMALL_TRIAL_STEPS = 300, 100, 60
"""With `--small`: training images, images in a batch, steps of a trial."""

Cells = Sequence[tuple[str, float, Method]]
"""Version of the data, starting angle in degrees, method."""

Panels = Sequence[tuple[str, Sequence[Run]]]
"""Title and runs of each panel of a figure."""


def run(options: Options) -> str:
    """Reproduce Learning Invariant Weights figures 2, 3 and 5: rotations during training."""
    check(NAME, options)
    experiments = {
        "rings": _rings,
        "recovery": _recovery,
        "escape": _escape,
        "methods": _methods,
        "relu": _relu,
        "bank": _bank,
    }
    rows = options.choose(experiments)
    runs: list[Run] = []
    for seed in options.seed:
        for row in rows:
            new = experiments[row](options, seed)
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
    most = MEMORISED_IMAGES if name in ("methods", "relu") else None
    training, test = _pictures(versions, options, most)
    members = [Member(versions.index(version), True, method) for version, _, method in cells]
    scaled = options if name == "recovery" else _learn_scales(options)
    plan = _plan(scaled, seed)
    starts = [start for _, start, _ in cells]
    model = liw_table1.network(training.x.shape[-1], starts, scaled, seed, name == "relu")
    if restarts:
        choose_starts(
            model, training, members, plan, restarts, SMALL_TRIAL_STEPS if options.small else None
        )
    progress = Progress(f"{NAME} {name}", plan.steps, range(len(cells)))
    history = train(model, training, members, plan, progress)
    return _runs(name, options, seed, cells, (model, history, training, test, members))


def _learn_scales(options: Options) -> Options:
    """Learn the scales unless they are given: all figures but Figure 2 do so."""
    return options if options.kept_scale is not None else replace(options, learn_scales=True)


def _pictures(
    versions: Sequence[str], options: Options, most: int | None = None
) -> tuple[Data, Data]:
    training, test = load("mnist", versions, options)
    most = SMALL_IMAGES if options.small else most
    return Data(training.x[:, :most], training.y[:, :most]), test


def _plan(options: Options, seed: int) -> BatchedConfig:
    """Return Table 1's training, shortened, with a learning rate for the filters."""
    if options.small:
        options = replace(options, batch=options.batch or SMALL_BATCH)
    else:
        steps, batch = options.steps or STEPS, options.batch or BATCH
        samples = options.samples or SAMPLES
        options = replace(options, steps=steps, batch=batch, samples=samples)
    weight_rate = 3e-3 if options.small else 1e-3
    return replace(liw_table1.schedule(options, seed), weight_rate=weight_rate)


def _runs(
    name: str,
    options: Options,
    seed: int,
    cells: Cells,
    trained: tuple[InvariantWeights, History, Data, Data, Sequence[Member]],
) -> list[Run]:
    model, history, training, test, members = trained
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
    panels = [(v, [r for r in runs if r["row"].split("/")[1] == v]) for v in versions]
    draw(options, "figure2.png", panels)
    return runs


def _escape(options: Options, seed: int) -> list[Run]:
    """Start at 175 degrees on partially rotated images, with and without trying other starts."""
    options = replace(options, average="probs")
    version = "partially rotated"
    runs: list[Run] = []
    for name, shares in (("gradient", ()), ("chosen start", RESTARTS)):
        (new,) = _angles("escape", options, seed, (version,), [(version, 175.0, "vi")], shares)
        runs.append(new | {"row": options.named(f"escape/{name}/175/vi")})
    draw(options, "escape.png", [("gradient", runs[:1]), ("chosen start", runs[1:])])
    return runs


def _methods(options: Options, seed: int) -> list[Run]:
    """Run Figure 5."""
    starts = (5.0, 90.0) if options.small else liw_table1.ANGLES
    return _compare(options, seed, "methods", tuple(METHODS), starts, "figure5.png")


def _relu(options: Options, seed: int) -> list[Run]:
    """Run Figure 5 with a network that learns its filters and can fit anything."""
    starts = (5.0, 90.0) if options.small else (5.0, 45.0, 90.0)
    return _compare(options, seed, "relu", ("vi", "ml"), starts, "figure5-relu.png")


def _compare(
    options: Options,
    seed: int,
    row: str,
    methods: Sequence[Method],
    starts: Sequence[float],
    file: str,
) -> list[Run]:
    """Train on fully rotated images by several methods and draw one panel for each."""
    cells: Cells = [("fully rotated", start, method) for method in methods for start in starts]
    runs = _angles(row, options, seed, ("fully rotated",), cells)
    draw(options, file, [(METHODS[m], [r for r in runs if r["method"] == m]) for m in methods])
    return runs


def _rings(options: Options, seed: int) -> list[Run]:
    """Run Figure 5 in the plane: whole rings, and arcs of 120 degrees."""
    sets = ("rings", "arcs")
    data, test = (
        Data.of([rings(n, angle, seed=seed + s) for angle in (360, 120)], options.resolved_device)
        for n, s in ((120, 0), (400, 1000))
    )
    starts = (5.0, 90.0)
    methods: tuple[Method, ...] = ("vi", "ml")
    cells: Cells = [(version, start, m) for version in sets for start in starts for m in methods]
    members = [Member(sets.index(version), True, method) for version, _, method in cells]
    generator = torch.Generator().manual_seed(seed)
    features = RandomFourier((2,), 128, 5.0, (len(cells),), generator)
    widths = torch.tensor([start for _, start, _ in cells]).deg2rad().unsqueeze(1)
    scaled = _learn_scales(options)
    model = InvariantWeights(
        features, LieDistribution(so2(), widths), 2, options.average, scaled.scale
    ).to(options.resolved_device)
    plan = BatchedConfig(
        steps=250, batch=120, samples=16, width_rate=0.03, rates=(0.3, 0.1), every=8, note_every=5
    )
    rate = plan.scale_rate if scaled.learn_scales else 0.0
    history = train(model, data, members, replace(plan, seed=seed, scale_rate=rate))
    runs = _runs("rings", options, seed, cells, (model, history, data, test, members))
    panels = {
        f"{version}, {method}": [
            r for r in runs if f"/{version}/" in r["row"] and r["method"] == method
        ]
        for version in sets
        for method in methods
    }
    draw(options, "rings.png", list(panels.items()))
    return runs


def _bank(options: Options, seed: int) -> list[Run]:
    """Run Figure 3: filters of a ReLU network at seven rotations between -eta and eta."""
    training, test = _pictures(("fully rotated",), options)
    size, width = training.x.shape[-1], 96 if options.small else 1024
    generator = torch.Generator().manual_seed(seed)
    features = Rectified((1, size, size), width, (1,), generator, where="weights")
    rotation = AffineLie("rotation", torch.tensor([[5.0]]).deg2rad())
    scaled = _learn_scales(options)
    model = InvariantWeights(features, rotation, 10, options.average, scaled.scale)
    model = model.to(options.resolved_device)
    plan = _plan(scaled, seed)
    banks: list[Tensor] = []
    times: list[int] = []
    progress = Progress(f"{NAME} bank", plan.steps, [0])

    def note(step: int, model: InvariantWeights, history: History) -> None:
        progress(step, model, history)
        if step >= len(banks) * plan.steps / 5 or step == plan.steps - 1:
            banks.append(_filters(model))
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


def draw(options: Options, name: str, panels: Panels) -> None:
    """Draw the learned angle against the step, one panel for each group of runs."""
    if options.json is None:
        return
    figure, axes = new_figure((3.6 * len(panels), 3.0), columns=len(panels), share_y=True)
    for ax, (title, runs) in zip(axes, panels, strict=True):
        for run in runs:
            ax.plot(run["steps"], run["degrees"], lw=2, label=f"from {run['start']:g}°")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set(xlabel="step", ylim=(0, 185), yticks=(0, 45, 90, 135, 180))
        ax.grid(alpha=0.25)
    axes[0].set_ylabel("rotation, ± degrees")
    handles, texts = axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside right center", frameon=False, fontsize=8)
    save_figure(figure, options.json.parent / name)


def draw_bank(options: Options, banks: Sequence[Tensor], times: Sequence[int]) -> None:
    """Draw the two filters of largest norm: seven rotations across, training time down."""
    if options.json is None:
        return
    count = len(banks[-1])
    largest = banks[-1][count // 2].flatten(1).norm(dim=1).topk(2).indices.tolist()
    size = (2 * count * 0.62, 0.7 * len(banks) + 0.4)
    figure, axes = new_figure(size, len(banks), 2 * count, frame=True)
    for number, ax in enumerate(axes):
        row, column = divmod(number, 2 * count)
        picture = banks[row][column % count, largest[column // count]]
        bound = float(picture.abs().max())
        ax.imshow(picture, cmap="RdBu", vmin=-bound, vmax=bound)
        ax.set(xticks=(), yticks=())
        if column == 0:
            ax.set_ylabel(f"{times[row]}", fontsize=8)
    save_figure(figure, options.json.parent / "figure3.png")


def markdown(runs: Sequence[Run]) -> str:
    """Return the start and the result of every run."""
    rows = []
    for r in runs:
        bound = "" if r["elbo_per_datum"] is None else f"{r['elbo_per_datum']:.3f}"
        ends = f"{r['start']:g}°", f"{r['degrees'][-1]:.0f}°"
        rows.append((r["row"], *ends, bound, f"{r['accuracy']:.2f}"))
    return table(["run", "start", "end", "bound / n", "accuracy %"], rows)
