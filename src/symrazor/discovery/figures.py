"""Pictures of what was learned."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symrazor.core.files import write_atomically
from symrazor.symmetry.verdict import LayerReading

if TYPE_CHECKING:
    from symrazor.discovery.answer import Answer

BLUE, GREEN, RED = "#33518f", "#1b7f79", "#c8553d"
"""The structure that is learned, the symmetric one, the free one."""


def evidence_figure(answers: "Sequence[Answer]", path: Path) -> Path:
    """For each question: training loss and evidence of each candidate, and what each layer learned.

    Where both fit, the training loss says nothing about which will generalise; the evidence does.
    The bars are the shares of the paths in the effective parameters of the relaxed network's
    layers (ELLA Fig. 3).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 3.1 * len(answers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(answers), 3, squeeze=False, width_ratios=(1, 1, 0.8))
    for (left, right, bars), found in zip(axes, answers, strict=True):
        _draw_shares(bars, found.shown.reading.layers)
        names = [structure.name for structure in found.family.structures]
        colours = dict(zip(names, (BLUE, GREEN, RED), strict=False))
        for candidate in found.candidates:
            history = candidate.fit.history
            measured = [record for record in history if "per_datum" in record]
            style = {"color": colours.get(candidate.name), "label": candidate.name, "lw": 2}
            epochs = [record["epoch"] for record in history]
            left.plot(epochs, [record["nll"] for record in history], **style)
            right.plot(
                [record["epoch"] for record in measured],
                [record["per_datum"] for record in measured],
                marker="o",
                ms=4,
                **style,
            )
        positive = all(r["nll"] > 0 for c in found.candidates for r in c.fit.history)
        scale = "log" if positive else "linear"
        left.set(ylabel="training loss (nats)", xlabel="epoch", yscale=scale)
        right.set(ylabel="log evidence / n", xlabel="epoch")
        question = found.question.partition(" (")[0]
        left.set_title(question, loc="left", fontsize=10, fontweight="bold")
        right.set_title(found.verdict.partition(".")[0], loc="left", fontsize=10)
        for ax in (left, right, bars):
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
        right.legend(frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomically(path, buffer.getvalue())
    return path


def _draw_shares(ax: Any, layers: Sequence[LayerReading]) -> None:
    """A bar for each relaxed layer, split by path: equivariant first, free beside it."""
    relaxed = [layer for layer in layers if layer.relaxed]
    if not relaxed:
        ax.set_axis_off()
        return
    names = [f"layer {number}" for number in range(1, len(relaxed) + 1)]
    free = [layer.free_share for layer in relaxed]
    ax.barh(names, [1 - share for share in free], color=GREEN, height=0.6)
    ax.barh(
        names,
        free,
        left=[1 - share for share in free],
        color=RED,
        height=0.6,
    )
    for name, share in zip(names, free, strict=True):
        ax.text(0.02, name, f"free {100 * share:.0f} %", va="center", color="white", fontsize=8)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1), xlabel="share of effective parameters", xticks=(0, 0.5, 1))
    ax.set_title("What the relaxed layers kept", loc="left", fontsize=10)
