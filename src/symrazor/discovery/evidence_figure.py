"""Draw training loss, evidence and symmetry of the layers for every question."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from symrazor.core.files import write_atomically
from symrazor.discovery.answer import Answer
from symrazor.symmetry.verdict import LayerReading

BLUE, GREEN, RED = "#33518f", "#1b7f79", "#c8553d"
"""Colours of the relaxed, the symmetric and the free structure."""


def save_evidence_figure(answers: Sequence[Answer], path: Path) -> Path:
    """Write a PNG with one row per question.

    Training loss and evidence of each candidate are shown side by side: where several networks fit
    the data, the training loss does not say which of them generalises, but the evidence does. The
    bars are the shares of the paths in the effective parameters of each layer (ELLA Fig. 3).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 3.1 * len(answers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(answers), 3, squeeze=False, width_ratios=(1, 1, 0.8))
    for (loss, evidence, shares), answer in zip(axes, answers, strict=True):
        _draw_shares(shares, answer.subject_fit.reading.layers)
        _draw_curves(loss, evidence, answer)
        loss.set_title(answer.question.partition(" (")[0], loc="left", fontsize=10, weight="bold")
        evidence.set_title(answer.headline.partition(":")[0], loc="left", fontsize=10)
        for ax in (loss, evidence, shares):
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomically(path, buffer.getvalue())
    return path


def _draw_curves(loss: Any, evidence: Any, answer: Answer) -> None:
    names = [structure.name for structure in answer.family.structures]
    colours = dict(zip(names, (BLUE, GREEN, RED), strict=False))
    for candidate in answer.candidates:
        history = candidate.fit.history
        measured = [record for record in history if "per_datum" in record]
        style = {"color": colours.get(candidate.name), "label": candidate.name, "lw": 2}
        loss.plot([r["epoch"] for r in history], [r["nll"] for r in history], **style)
        points = [r["epoch"] for r in measured], [r["per_datum"] for r in measured]
        evidence.plot(*points, marker="o", ms=4, **style)
    is_positive = all(r["nll"] > 0 for c in answer.candidates for r in c.fit.history)
    scale = "log" if is_positive else "linear"
    loss.set(ylabel="training loss (nats)", xlabel="epoch", yscale=scale)
    evidence.set(ylabel="log evidence / n", xlabel="epoch")
    evidence.legend(frameon=False, fontsize=9)


def _draw_shares(ax: Any, layers: Sequence[LayerReading]) -> None:
    """Draw a bar per relaxed layer: the share of equivariant paths, then that of free paths."""
    relaxed = [layer for layer in layers if layer.relaxed]
    if not relaxed:
        ax.set_axis_off()
        return
    names = [f"layer {number}" for number in range(1, len(relaxed) + 1)]
    free = [layer.free_share for layer in relaxed]
    equivariant = [1 - share for share in free]
    ax.barh(names, equivariant, color=GREEN, height=0.6)
    ax.barh(names, free, left=equivariant, color=RED, height=0.6)
    for name, share in zip(names, free, strict=True):
        ax.text(0.02, name, f"free {100 * share:.0f} %", va="center", color="white", fontsize=8)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1), xlabel="share of effective parameters", xticks=(0, 0.5, 1))
    ax.set_title("Symmetry of the relaxed layers", loc="left", fontsize=10)
