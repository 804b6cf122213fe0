"""Draw figures of Learning Invariant Weights: angles over training, and banks of filters."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from symrazor.core.files import write_atomically
from symrazor.experiments.liw import Options
from symrazor.experiments.results import Run


def draw(options: Options, name: str, panels: Sequence[tuple[str, Sequence[Run]]]) -> None:
    """Draw the learned angle against the step, one panel for each group of runs."""
    if options.json is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(panels), 3.0), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for ax, (title, runs) in zip(axes, panels, strict=True):
        for run_ in runs:
            ax.plot(run_["steps"], run_["degrees"], lw=2, label=f"from {run_['start']:g}°")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set(xlabel="step", ylim=(0, 185), yticks=(0, 45, 90, 135, 180))
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("rotation, ± degrees")
    handles, texts = axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside right center", frameon=False, fontsize=8)
    _write(figure, options.json.parent / name)


def draw_bank(options: Options, banks: Sequence[Tensor], times: Sequence[int]) -> None:
    """Draw two filters: seven rotations across, training time down."""
    if options.json is None:
        return
    from matplotlib.figure import Figure

    loud = banks[-1][len(banks[-1]) // 2].flatten(1).norm(dim=1).topk(2).indices.tolist()
    count = len(banks[-1])
    figure = Figure(figsize=(2 * count * 0.62, 0.7 * len(banks) + 0.4), layout="constrained")
    axes = figure.subplots(len(banks), 2 * count, squeeze=False)
    for row, (bank, step) in enumerate(zip(banks, times, strict=True)):
        for column, ax in enumerate(axes[row]):
            picture = bank[column % count, loud[column // count]]
            bound = float(picture.abs().max())
            ax.imshow(picture, cmap="RdBu", vmin=-bound, vmax=bound)
            ax.set(xticks=(), yticks=())
        axes[row, 0].set_ylabel(f"{step}", fontsize=8)
    _write(figure, options.json.parent / "figure3.png")


def _write(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomically(path, buffer.getvalue())
