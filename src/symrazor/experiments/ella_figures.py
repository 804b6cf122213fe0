"""Draw figures of ELLA's tables from their JSON results: Fig. 3 and the curves of App. D.

    symrazor experiment ella-table2 --rows --json FILE --figure DIR     # from existing results

For every row with relaxed layers, as PNG and SVG:

- ROW-shares: the share of each layer's effective parameters by path (Fig. 3). Mean over seeds,
  whiskers from the smallest to the largest.
- ROW-training: prior precision (App. D.1) and effective parameters (App. D.2) of each path at every
  evidence step. One colour per path, from light (first layer) to dark (last layer); one seed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from symrazor.experiments.figures import new_figure, save_figure
from symrazor.experiments.results import Run

MAPS = {"Conv": "Blues", "SConv": "GnBu", "FFC": "Oranges", "FC": "Reds", "SFC": "RdPu"}
"""Type of path -> colour map."""


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw every row that has relaxed layers and return the files."""
    files = []
    for row, row_runs in _rows(runs):
        name = row.replace("/", "-").replace("+", "_")
        figures = {"shares": shares_figure(row, row_runs)}
        if any("precisions" in record for record in row_runs[0].get("history", ())):
            figures["training"] = training_figure(row, row_runs[0])
        for content, figure in figures.items():
            for kind in ("png", "svg"):
                files.append(save_figure(figure, folder / f"{name}-{content}.{kind}", dpi=150))
    return files


def _rows(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Yield rows with relaxed layers and their runs sorted by seed, without diverged runs."""
    for row in dict.fromkeys(run["row"] for run in runs):
        row_runs = [run for run in runs if run["row"] == row and "reading" in run]
        row_runs.sort(key=lambda run: run["seed"])
        if row_runs and any(len(layer["paths"]) > 1 for layer in relaxed(row_runs[0])):
            yield row, row_runs


def relaxed(run: Run) -> list[dict[str, Any]]:
    """Return the relaxed layers in the reading of a run."""
    return [layer for layer in run["reading"]["layers"] if layer["relaxed"]]


def shares(runs: Sequence[Run]) -> dict[str, list[list[float]]]:
    """Return, for each type of path and each relaxed layer, the shares over seeds."""
    path_types = [path["path"] for path in relaxed(runs[0])[0]["paths"]]
    return {
        kind: [
            [layer["paths"][index]["share"] for layer in layers]
            for layers in zip(*map(relaxed, runs), strict=True)
        ]
        for index, kind in enumerate(path_types)
    }


def curves(run: Run, quantity: str) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Return (epoch, value) at every evidence step, by type of path and relaxed layer.

    Args:
        run: A run with a history.
        quantity: "precisions": the mean over the prior groups of a path, without paths that are
            switched off. "effective_parameters": the sum over the tensors of a path.
    """
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for number, layer in enumerate(relaxed(run), 1):
        for index, path in enumerate(layer["paths"]):
            prefix = f"{layer['name']}.paths.{index}".lstrip(".")
            for record in run["history"]:
                values = [
                    value
                    for name, value in record.get(quantity, {}).items()
                    if f"{name}.".startswith(f"{prefix}.")
                ]
                off = quantity == "precisions" and prefix in record.get("off", ())
                if values and not off:
                    value = mean(values) if quantity == "precisions" else sum(values)
                    points.setdefault((path["path"], number), []).append((record["epoch"], value))
    return points


def shares_figure(row: str, runs: Sequence[Run]) -> Any:
    """Draw one bar per layer, split by path."""
    by_path = shares(runs)
    layers = range(1, 1 + len(relaxed(runs[0])))
    figure, [ax] = new_figure((1.6 + 0.55 * len(layers), 3.0))
    bottom = [0.0] * len(layers)
    for kind, by_layer in by_path.items():
        heights = [mean(values) for values in by_layer]
        ax.bar(layers, heights, 0.75, bottom, color=_colour(kind, 0.7), label=kind)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    if len(runs) > 1:  # whiskers at the upper end of the first path
        first_path = next(iter(by_path.values()))
        middle = [mean(values) for values in first_path]
        below = [m - min(values) for m, values in zip(middle, first_path, strict=True)]
        above = [max(values) - m for m, values in zip(middle, first_path, strict=True)]
        ax.errorbar(layers, middle, [below, above], fmt="none", color="black", capsize=3, lw=1)
    ax.set(ylim=(0, 1), xlabel="layer", ylabel="share of effective parameters", xticks=list(layers))
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else "one seed"
    ax.set_title(f"{row}, {seeds}", loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(1.0, 0.0))
    return figure


def training_figure(row: str, run: Run) -> Any:
    """Draw precisions and effective parameters of every path over training, on logarithmic axes."""
    figure, (left, right) = new_figure((9.5, 3.4), columns=2)
    count = max(1, len(relaxed(run)) - 1)
    for ax, quantity in ((left, "precisions"), (right, "effective_parameters")):
        for (kind, number), points in curves(run, quantity).items():
            epochs, values = zip(*points, strict=True)
            drawn = [max(value, 1e-3) for value in values] if ax is right else values
            colour = _colour(kind, 0.35 + 0.6 * (number - 1) / count)
            ax.plot(epochs, drawn, color=colour, lw=1.6, label=f"{kind} {number}")
        ax.set(xlabel="epoch", ylabel=quantity.replace("_", " "), yscale="log")
        ax.grid(alpha=0.25)
    left.set_title(f"{row}, seed {run['seed']}", loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _colour(kind: str, depth: float) -> Any:
    import matplotlib

    return matplotlib.colormaps[MAPS.get(kind, "Greys")](depth)
