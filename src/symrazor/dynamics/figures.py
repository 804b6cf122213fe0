"""Figures: phase portraits, learned generators and flows, as images and animations."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.files import write_atomically

ANIMATION_FRAMES = 48
TAIL_FRAMES = 12
"""Number of past frames that the tail behind a moving state shows."""
FRAME_MILLISECONDS = 60
COLOURS = ("#33518f", "#c8553d", "#1b7f79", "#8a6d3b")


def motion_animation(
    motions: Mapping[str, Float[Tensor, "t m d"]],
    path: Path | str,
    axes_shown: tuple[int, int] = (0, 1),
) -> Path:
    """Animate moving states with tails, a panel for each motion, as a GIF.

    All panels have the same axis limits. They contain all motions, but are at most twice as wide as
    the first.

    Args:
        motions: name -> states at T times, such as true and learned trajectories, with equal T.
        path: of the GIF file.
        axes_shown: the two entries of a state to plot.
    """
    lengths = sorted({len(states) for states in motions.values()})
    if len(lengths) != 1:
        raise ValueError(f"All motions must have the same length, got {lengths or 'no motion'}.")
    figure, axes = _panels(len(motions), 3.0, 3.0)
    shown = [states.detach().cpu()[..., list(axes_shown)].double() for states in motions.values()]
    lines = []
    xlim, ylim = _axis_limits(shown)
    for ax, name in zip(axes, motions, strict=True):
        ax.set(xlim=xlim, ylim=ylim, aspect="equal")
        ax.set_title(name, fontsize=10)
        (tails,) = ax.plot([], [], lw=1.2, color=COLOURS[0])
        (heads,) = ax.plot([], [], "o", ms=4, color=COLOURS[1])
        lines.append((tails, heads))
    figure.canvas.draw()
    figure.set_layout_engine("none")  # the layout does not change between frames
    frames = []
    for time in range(lengths[0]):
        for (tails, heads), states in zip(lines, shown, strict=True):
            recent = states[max(0, time - TAIL_FRAMES) : time + 1]
            # NaN breaks the line between the tails of different states.
            separated = torch.nn.functional.pad(recent, (0, 0, 0, 0, 0, 1), value=torch.nan)
            tails.set_data(*separated.transpose(0, 1).flatten(0, 1).unbind(1))
            heads.set_data(*recent[-1].unbind(1))
        frames.append(_render(figure))
    buffer = io.BytesIO()
    options = {"append_images": frames[1:], "duration": FRAME_MILLISECONDS, "loop": 0}
    frames[0].save(buffer, format="GIF", save_all=True, **options)
    return _write(buffer, path)


def _axis_limits(shown: Sequence[Float[Tensor, "t m 2"]]) -> list[tuple[float, float]]:
    """Return the limits of a square around the first motion, and around others near it."""
    points = shown[0].flatten(0, 1)
    low, high = points.amin(0), points.amax(0)
    middle, first = (low + high) / 2, float((high - low).max()) / 2
    largest = max(float((states - middle).abs().max()) for states in shown)
    half_width = 1.1 * (min(largest, 2 * first) or largest or 1.0)
    return [(centre - half_width, centre + half_width) for centre in middle.tolist()]


def _render(figure: Any) -> Any:
    """Render a figure to an image with 32 colours."""
    from PIL import Image

    figure.canvas.draw()
    pixels = figure.canvas.buffer_rgba()
    size = pixels.shape[1], pixels.shape[0]
    return Image.frombytes("RGBA", size, bytes(pixels)).convert("RGB").quantize(32)


def _panels(count: int, width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and its panels side by side, each of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _write(buffer: io.BytesIO, path: Path | str) -> Path:
    write_atomically(Path(path), buffer.getvalue())
    return Path(path)
