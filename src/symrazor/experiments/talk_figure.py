"""The results of `talk_basis` and their figure: models above, learned hyperparameters below."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symrazor.experiments.figures import new_figure, save_figure

BLUE, TEAL, RED = "#33518f", "#1b7f79", "#c8553d"


@dataclass
class Results:
    """Rows of numbers, and curves for the figure."""

    panels: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[dict[str, Any]] = field(default_factory=list)
    amounts: dict[str, list[float]] = field(default_factory=dict)
    deep: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0


def draw(results: Results, path: Path) -> Path:
    """Draw all results into a PNG file."""
    figure, axes = new_figure((14, 6.6), rows=2, columns=4)
    for ax, row in zip(axes[:4], results.panels, strict=True):
        _fit(ax, results, row)
    _sizes(axes[4], results)
    _amount(axes[5], results, "amount", "symmetry $\\lambda$")
    _amount(axes[6], results, "omega2", "frequency $\\omega^2$")
    _deep(axes[7], results)
    for ax in axes:
        ax.grid(alpha=0.25)
    return save_figure(figure, path)


def _fit(ax: Any, results: Results, row: dict[str, Any]) -> None:
    """Plot data, truth and predictive distribution of one model."""
    name, curves = row["model"], results.curves
    middle, spread = curves[name], curves[f"{name} spread"]
    low = [m - 2 * s for m, s in zip(middle, spread, strict=True)]
    high = [m + 2 * s for m, s in zip(middle, spread, strict=True)]
    best = max(results.panels, key=lambda other: other["log_evidence"])["model"] == name
    colour = TEAL if best else BLUE
    ax.fill_between(curves["grid"], low, high, color=colour, alpha=0.15, lw=0)
    ax.plot(curves["grid"], curves["truth"], color="black", lw=1, ls=":", label="truth")
    ax.plot(curves["grid"], middle, color=colour, lw=2, label="prediction")
    ax.scatter(curves["x"], curves["y"], s=14, color="black", zorder=3, label="data")
    ax.set(ylim=(-2.2, 2.2), xlabel="x")
    ax.set_title(
        f"{name}\nlog evidence {row['log_evidence']:.1f}\n"
        f"train {row['train']:.3f}   test {row['test']:.3f}",
        loc="left",
        fontsize=10,
        fontweight="bold" if best else "normal",
    )
    if row is results.panels[0]:
        ax.legend(frameon=False, fontsize=8, loc="lower left")


def _sizes(ax: Any, results: Results) -> None:
    for symmetric, colour, word in ((False, RED, "free"), (True, TEAL, "symmetric")):
        rows = [row for row in results.sizes if row["symmetric"] == symmetric]
        size = [row["features"] for row in rows]
        ax.plot(size, [row["train"] for row in rows], color=colour, ls="--", label=f"{word}, train")
        ax.plot(size, [row["test"] for row in rows], color=colour, lw=2, label=f"{word}, test")
    ax.set(xscale="log", yscale="log", xlabel="features", ylabel="squared error")
    ax.set(ylim=(ax.get_ylim()[0], 20 * ax.get_ylim()[1]))  # leaves space for the legend
    ax.set_title("More features: training error falls", loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


def _amount(ax: Any, results: Results, quantity: str, label: str) -> None:
    for objective, colour in (("evidence", TEAL), ("likelihood", RED)):
        ax.plot(results.amounts[f"{objective} {quantity}"], color=colour, lw=2, label=objective)
    ax.set(xlabel="step", ylabel=label)
    if quantity == "amount":
        ax.set(ylim=(-0.02, 1.02))
        ax.set_title("The truth is even: $\\lambda$ should be 1", loc="left", fontsize=10)
    else:
        ax.set(yscale="log")
        ax.set_title("... and its frequency moderate", loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8)


def _deep(ax: Any, results: Results) -> None:
    """Plot the frequency of the deep network during training."""
    for row, colour in zip(results.deep, (RED, BLUE, TEAL), strict=False):
        ax.plot(row["path"], color=colour, lw=2, label=f"{row['method']}: test {row['test']:.3f}")
    ax.set(yscale="log", xlabel="step", ylabel="$\\omega^2$")
    ax.set_title("Deep: $W_3$ relu($W_2$ cos($\\omega^2 W_1 x$))", loc="left", fontsize=10)
    if results.deep:
        ax.legend(frameon=False, fontsize=8)
