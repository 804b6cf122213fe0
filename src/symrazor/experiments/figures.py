"""Create and save matplotlib figures without a display."""

import io
from pathlib import Path
from typing import Any

from symrazor.core.files import write_atomically


def new_figure(
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    share_y: bool = False,
    frame: bool = False,
) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, row by row; `frame` keeps the lines at the top and right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat)
    for ax in [] if frame else axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, file: Path, dpi: int = 130) -> Path:
    """Save a figure in the format of the file name and return the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file.suffix[1:] or "png", dpi=dpi)
    write_atomically(file, buffer.getvalue())
    return file
