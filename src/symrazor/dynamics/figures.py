"""Figures: phase portraits, learned generators and flows, as images and animations."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.files import write_atomically
from symrazor.dynamics.algebra import square_generators
from symrazor.dynamics.analysis import spectrum
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.mechanics import Field

ANIMATION_FRAMES = 48
TAIL_FRAMES = 12
"""Number of past frames that the tail behind a moving state shows."""
FRAME_MILLISECONDS = 60
COLOURS = ("#33518f", "#c8553d", "#1b7f79", "#8a6d3b")


def generators_figure(conserved: Quadratic, path: Path | str, max_shown: int = 8) -> Path:
    """Plot the singular values of the learned generators, and the main directions as matrices.

    Writes a PNG file with at most `max_shown` directions.
    """
    learned = spectrum(conserved)
    shown = min(max_shown, len(learned.values))
    figure, (values_axis, *axes) = _panels(shown + 1, 2.2, 2.4)
    numbers = range(1, len(learned.values) + 1)
    colours = [COLOURS[0 if k <= learned.dimension else 3] for k in numbers]
    values_axis.bar(list(numbers), learned.values.tolist(), color=colours)
    values_axis.set_title(f"{learned.dimension} learned", fontsize=9)
    values_axis.set(ylabel="singular value")
    values_axis.spines[["top", "right"]].set_visible(False)
    for k, ax in enumerate(axes):
        G = learned.directions[k]
        size = float(G.abs().max())
        ax.imshow(G, cmap="RdBu", vmin=-size, vmax=size)
        ax.set_title(f"G{k + 1}: {float(learned.values[k]):.2f}", fontsize=9)
        ax.set(xticks=(), yticks=())
    return _save(figure, path)


def phase_portrait(
    fields: dict[str, Field], path: Path | str, extent: float = 2.0, states: Tensor | None = None
) -> Path:
    """Plot stream lines of systems with one degree of freedom, a panel for each field.

    Args:
        fields: name -> vector field [m, 2] -> [m, 2].
        path: of the PNG file.
        extent: largest position and momentum.
        states: [B, T, 2], trajectories to plot on top.
    """
    figure, axes = _panels(len(fields), 3.2, 3.2)
    limits = (-extent, extent)
    line = torch.linspace(-extent, extent, 30, dtype=torch.float64)
    q, p = torch.meshgrid(line, line, indexing="xy")
    for ax, (name, field) in zip(axes, fields.items(), strict=True):
        speed = field(torch.stack([q.flatten(), p.flatten()], -1)).detach().cpu().double()
        dq, dp = (part.reshape(q.shape).numpy() for part in speed.unbind(-1))
        ax.streamplot(q.numpy(), p.numpy(), dq, dp, color=COLOURS[0], linewidth=0.6, density=0.9)
        for trajectory in () if states is None else states.cpu().numpy():
            ax.plot(trajectory[:, 0], trajectory[:, 1], "o-", ms=2.5, lw=1.5, color=COLOURS[1])
        ax.set(xlim=limits, ylim=limits, xlabel="q", ylabel="p", aspect="equal")
        ax.set_title(name, fontsize=10)
    return _save(figure, path)


def flow_figure(
    conserved: Quadratic, start: Tensor, path: Path | str, axes_shown: tuple[int, int] = (0, 1)
) -> Path:
    """Plot orbits of states [m, 2n] under the flow of each learned direction, as a PNG file.

    `axes_shown` are the two entries of a state to plot.
    """
    orbits = _orbits(conserved, start, torch.linspace(-1.5, 1.5, 121, dtype=torch.float64))
    figure, axes = _panels(len(orbits), 3.0, 3.0)
    i, j = axes_shown
    starts = start.cpu().numpy()
    for ax, (name, moved) in zip(axes, orbits.items(), strict=True):
        for orbit in moved.transpose(0, 1).numpy():
            ax.plot(orbit[:, i], orbit[:, j], lw=1.2, color=COLOURS[0])
        ax.plot(starts[:, i], starts[:, j], "o", ms=3, color=COLOURS[1])
        ax.set_title(name, fontsize=10)
    return _save(figure, path)


def _orbits(
    conserved: Quadratic, start: Tensor, times: Float[Tensor, "t"]
) -> dict[str, Float[Tensor, "t m d"]]:
    """Return states under the flow of each learned direction, by its name."""
    learned = spectrum(conserved)
    states = torch.nn.functional.pad(start.double().cpu(), (0, 1), value=1.0)
    orbits = {}
    for k in range(max(1, learned.dimension)):
        generator = square_generators(learned.directions[k])
        maps = torch.linalg.matrix_exp(times[:, None, None] * generator)
        orbits[f"flow of C{k + 1}"] = (states @ maps.mT)[..., :-1]
    return orbits


def flow_animation(
    conserved: Quadratic, start: Tensor, path: Path | str, axes_shown: tuple[int, int] = (0, 1)
) -> Path:
    """Animate states [m, 2n] that move along the flow of each learned direction, as a GIF.

    `axes_shown` are the two entries of a state to plot.
    """
    times = torch.linspace(0.0, 2 * torch.pi, ANIMATION_FRAMES, dtype=torch.float64)
    return motion_animation(_orbits(conserved, start, times), path, axes_shown)


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


def _save(figure: Any, path: Path | str) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return _write(buffer, path)


def _write(buffer: io.BytesIO, path: Path | str) -> Path:
    write_atomically(Path(path), buffer.getvalue())
    return Path(path)
