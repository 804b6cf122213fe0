"""Measure the benefit of learned augmentation for small data sets.

    python -m symrazor.experiments.lila_small_data --data DIR --json FILE [--rows "mnist/*"]

312, 1,250 and 5,000 images of MNIST or CIFAR-10. All six affine generators, for CIFAR-10 also
flips, are learned by the evidence (for CIFAR-10 from two starts, of which the evidence chooses
one), by Augerino's regularised training loss, with one width for all from a grid on held-out data,
or there is no augmentation. Test figures are for the whole test set. With `--json FILE` a figure is
drawn next to the file.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean

import symrazor as sr
from symrazor.experiments import lila
from symrazor.experiments.results import Run, add_runs, merged

NAME = "lila-small-data"
SIZES = (312, 1250, 5000)
METHODS = ("learned", "augerino", "grid", "none")
FAMILIES = {"mnist": "affine", "cifar-10": lila.FLIPPED}
"""Generators to learn: a mirrored digit is another digit, a mirrored cat is a cat."""
STARTS = {"mnist": (False,), "cifar-10": (False, True)}
"""Starts; True for a wide one."""
STEPS = 1500
"""Training steps of every network, for any number of images."""


def config(n: int, options: lila.Options) -> sr.FitConfig:
    """Return training options with equal numbers of training and evidence steps."""
    batch = min(128, max(16, n // 8))
    steps = 400 if options.small else STEPS
    epochs = options.epochs or max(20, steps * batch // n)
    every = max(1, epochs // 40)
    base = sr.FitConfig(epochs=epochs, batch_size=batch, lr=4e-3, every=every)
    large = base.change(evidence_batch=500, pieces=1, device=options.place)
    return large.change(estimator="mc", subset=1000, progress=False)


def run(options: lila.Options) -> str:
    """Train the requested rows and return the table as markdown."""
    runs: list[Run] = add_runs(NAME, options.json, []) if options.json is not None else []
    sets = ("mnist",) if options.small else ("mnist", "cifar-10")
    sizes = (100, 300) if options.small else SIZES
    rows = [(s, n, m) for s in sets for n in sizes for m in METHODS]
    for name, n, method in rows:
        row = f"{name}/{n}/{method}"
        for seed in options.seed if options.wants(row) else ():
            train, test = (
                (x.to(options.place), y.to(options.place))
                for x, y in lila.pictures(name, options, n, seed)
            )
            average = options.average or "joint"
            job = lila.Job(FAMILIES[name], method, train, test, seed, config(n, options))
            job = replace(job, average=average, starts=STARTS[name])
            found = {"row": row, "seed": seed, "small": options.small, "average": average}
            found |= lila.run(job)
            runs = merged(runs, [found])
            if options.json is not None:
                runs = merged(runs, add_runs(NAME, options.json, [found]))
    if options.json is not None and runs:
        figure(runs, options.json.with_suffix(".png"))
    return markdown([r for r in runs if r["small"] == options.small])


def _rows(runs: list[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for one in runs:
        found.setdefault(one["row"], []).append(one)
    return dict(sorted(found.items(), key=lambda item: _key(item[0])))


def _key(row: str) -> tuple[str, int, int]:
    name, n, method = row.split("/")
    return name, int(n), METHODS.index(method)


def markdown(runs: list[Run]) -> str:
    """Return accuracy and NLL by number of images and method."""
    lines = [
        "| data | pictures | method | accuracy % | test NLL | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for row, found in _rows(runs).items():
        name, n, method = row.split("/")
        lines.append(
            f"| {name} | {n} | {method} | {mean(r['accuracy'] for r in found):.2f} | "
            f"{mean(r['nll'] for r in found):.4f} | {len(found)} |"
        )
    return "\n".join(lines)


def figure(runs: list[Run], file: Path) -> None:
    """Draw test NLL against the number of images, one panel for each data set."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    rows = _rows(runs)
    names = sorted({row.split("/")[0] for row in rows})
    panels, axes = plt.subplots(1, len(names), figsize=(4.5 * len(names), 3.5), squeeze=False)
    value: Callable[[list[Run]], float] = lambda found: mean(r["nll"] for r in found)  # noqa: E731
    for axis, name in zip(axes[0], names, strict=True):
        for method in METHODS:
            points = [
                (_key(r)[1], value(f))
                for r, f in rows.items()
                if r.startswith(name) and r.endswith(method)
            ]
            axis.loglog(*zip(*points, strict=True), "o-", label=method) if points else None
        axis.set(title=name, xlabel="training pictures", ylabel="test NLL")
        sizes = sorted({_key(row)[1] for row in rows})
        axis.set_xticks(sizes, labels=[f"{n:,}" for n in sizes], minor=False)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.legend(frameon=False)
    panels.tight_layout()
    panels.savefig(file, dpi=120)
    plt.close(panels)


if __name__ == "__main__":
    lila.main(NAME, run)
