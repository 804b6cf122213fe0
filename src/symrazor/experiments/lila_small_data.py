"""Measure the benefit of learned augmentation for small data sets.

312, 1,250 and 5,000 images of MNIST or CIFAR-10. All six affine generators, for CIFAR-10 also
flips, are learned by the evidence (for CIFAR-10 from two starts, of which the evidence chooses
one), by Augerino's regularised training loss, with one width for all from a grid on held-out data,
or there is no augmentation. Test figures are for the whole test set. With `--json FILE` a figure is
drawn next to the file.
"""

from dataclasses import replace
from pathlib import Path
from statistics import mean

from symrazor.experiments import lila
from symrazor.experiments.figures import new_figure, save_figure
from symrazor.experiments.results import Run, run_rows, table

NAME = "lila-small-data"
SIZES = (312, 1250, 5000)
METHODS = ("learned", "augerino", "grid", "none")
FAMILIES = {"mnist": "affine", "cifar-10": lila.FLIPPED}
"""Generators to learn: a mirrored digit is another digit, a mirrored cat is a cat."""
STARTS = {"mnist": (False,), "cifar-10": (False, True)}
"""Starts; True for a wide one."""
STEPS = 1500
"""Training steps of every network, for any number of images."""


def run_row(row: str, seed: int, options: lila.Options) -> Run:
    """Train one network, with equal numbers of training and evidence steps for any data."""
    name, size, method = row.split("/")
    n = int(size)
    train, test = lila.pictures(name, options, n, seed)
    batch = min(128, max(16, n // 8))
    steps = 400 if options.small else STEPS
    epochs = options.epochs or max(20, steps * batch // n)
    config = lila.fit_config(options, epochs, every=max(1, epochs // 40), lr=4e-3, batch=batch)
    job = lila.Job(FAMILIES[name], method, train, test, seed, config)
    job = replace(job, average=options.average or "joint", starts=STARTS[name])
    return {"average": job.average} | lila.train(job)


def run(options: lila.Options) -> str:
    """Compare learned augmentation with Augerino and no augmentation on small data sets."""
    names = ("mnist",) if options.small else ("mnist", "cifar-10")
    sizes = (100, 300) if options.small else SIZES
    rows = (f"{name}/{n}/{method}" for name in names for n in sizes for method in METHODS)
    runs = run_rows(NAME, options, rows, run_row)
    if options.json is not None and runs:
        draw(runs, options.json.with_suffix(".png"))
    return markdown(runs)


def _by_row(runs: list[Run]) -> dict[tuple[str, int, str], list[Run]]:
    """Return the runs by data set, number of images and method."""
    rows: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        name, n, method = run["row"].split("/")
        rows.setdefault((name, int(n), method), []).append(run)
    return dict(sorted(rows.items(), key=lambda item: (*item[0][:2], METHODS.index(item[0][2]))))


def markdown(runs: list[Run]) -> str:
    """Return accuracy and NLL by number of images and method."""
    rows = []
    for row, row_runs in _by_row(runs).items():
        accuracy, nll = (mean(r[key] for r in row_runs) for key in ("accuracy", "nll"))
        rows.append((*row, f"{accuracy:.2f}", f"{nll:.4f}", len(row_runs)))
    return table(["data", "pictures", "method", "accuracy %", "test NLL", "seeds"], rows)


def draw(runs: list[Run], file: Path) -> None:
    """Draw test NLL against the number of images, one panel for each data set."""
    from matplotlib.ticker import NullLocator

    rows = _by_row(runs)
    names, sizes = (sorted({row[i] for row in rows}) for i in range(2))
    figure, axes = new_figure((4.5 * len(names), 3.5), columns=len(names), frame=True)
    for ax, name in zip(axes, names, strict=True):
        for method in METHODS:
            points = {
                row[1]: mean(r["nll"] for r in row_runs)
                for row, row_runs in rows.items()
                if (row[0], row[2]) == (name, method)
            }
            if points:
                ax.loglog(points.keys(), points.values(), "o-", label=method)
        ax.set(title=name, xlabel="training pictures", ylabel="test NLL")
        ax.set_xticks(sizes, labels=[f"{n:,}" for n in sizes], minor=False)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.legend(frameon=False)
    save_figure(figure, file, dpi=120)
