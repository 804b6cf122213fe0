"""Pictures: phase portraits, learned generators, and flows, at rest or in motion."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.files import write_atomically
from symrazor.dynamics.analysis import Spectrum, spectrum
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.mechanics import Field

FRAMES, TAIL, PAUSE = 48, 12, 60
"""Pictures of an animation, those that a tail lasts, and milliseconds from one to the next."""
COLOURS = ("#33518f", "#c8553d", "#1b7f79", "#8a6d3b")


def generators_figure(conserved: Quadratic, path: Path | str, most: int = 8) -> Path:
    """Singular values of the learned generators, and the largest directions as matrices.

    Args:
        conserved: learned quantities.
        path: of the PNG.
        most: directions to show.
    """
    found = spectrum(conserved)
    shown = min(most, len(found.values))
    figure = _figure((2.2 * (shown + 1), 2.4))
    axes = figure.subplots(1, shown + 1, squeeze=False)[0]
    _draw_values(axes[0], found)
    for k in range(shown):
        G = found.directions[k]
        size = float(G.abs().max())
        axes[k + 1].imshow(G, cmap="RdBu", vmin=-size, vmax=size)
        axes[k + 1].set_title(f"G{k + 1}: {float(found.values[k]):.2f}", fontsize=9)
        axes[k + 1].set(xticks=(), yticks=())
    return _save(figure, path)


def _draw_values(ax: Any, found: Spectrum) -> None:
    numbers = range(1, len(found.values) + 1)
    colours = [COLOURS[0 if k <= found.dimension else 3] for k in numbers]
    ax.bar(list(numbers), found.values.tolist(), color=colours)
    ax.set_title(f"{found.dimension} learned", fontsize=9)
    ax.set(ylabel="singular value")
    ax.spines[["top", "right"]].set_visible(False)


def phase_portrait(
    fields: dict[str, Field], path: Path | str, extent: float = 2.0, states: Tensor | None = None
) -> Path:
    """Stream lines of one degree of freedom, a panel for each field.

    Args:
        fields: name -> [m, 2] -> [m, 2].
        path: of the PNG.
        extent: largest position and momentum.
        states: [B, T, 2], trajectories to draw on top.
    """
    figure = _figure((3.2 * len(fields), 3.2))
    axes = figure.subplots(1, len(fields), squeeze=False)[0]
    line = torch.linspace(-extent, extent, 30, dtype=torch.float64)
    q, p = torch.meshgrid(line, line, indexing="xy")
    for ax, (name, field) in zip(axes, fields.items(), strict=True):
        speed = field(torch.stack([q.flatten(), p.flatten()], -1)).detach().cpu().double()
        dq, dp = (part.reshape(q.shape).numpy() for part in speed.unbind(-1))
        ax.streamplot(q.numpy(), p.numpy(), dq, dp, color=COLOURS[0], linewidth=0.6, density=0.9)
        for one in () if states is None else states.cpu().numpy():
            ax.plot(one[:, 0], one[:, 1], "o-", ms=2.5, lw=1.5, color=COLOURS[1])
        ax.set(
            xlim=(-extent, extent), ylim=(-extent, extent), xlabel="q", ylabel="p", aspect="equal"
        )
        ax.set_title(name, fontsize=10)
    return _save(figure, path)


def flow_figure(
    conserved: Quadratic, start: Tensor, path: Path | str, axes_shown: tuple[int, int] = (0, 1)
) -> Path:
    """Orbits of states under the flow of each learned direction.

    Args:
        conserved: learned quantities.
        start: [m, 2n], where orbits start.
        path: of the PNG.
        axes_shown: the two entries of a state to draw.
    """
    orbits = _orbits(conserved, start, torch.linspace(-1.5, 1.5, 121, dtype=torch.float64))
    figure = _figure((3.0 * len(orbits), 3.0))
    i, j = axes_shown
    axes = figure.subplots(1, len(orbits), squeeze=False)[0]
    starts = start.cpu().numpy()
    for ax, (name, moved) in zip(axes, orbits.items(), strict=True):
        for one in moved.transpose(0, 1).numpy():
            ax.plot(one[:, i], one[:, j], lw=1.2, color=COLOURS[0])
        ax.plot(starts[:, i], starts[:, j], "o", ms=3, color=COLOURS[1])
        ax.set_title(name, fontsize=10)
    return _save(figure, path)


def _orbits(
    conserved: Quadratic, start: Tensor, times: Float[Tensor, "t"]
) -> dict[str, Float[Tensor, "t m d"]]:
    """States under the flow of each learned direction, by its name."""
    found = spectrum(conserved)
    states = torch.nn.functional.pad(start.double().cpu(), (0, 1), value=1.0)
    orbits = {}
    for k in range(max(1, found.dimension)):
        square = torch.nn.functional.pad(found.directions[k], (0, 0, 0, 1))
        maps = torch.linalg.matrix_exp(times[:, None, None] * square)
        orbits[f"flow of C{k + 1}"] = (states @ maps.mT)[..., :-1]
    return orbits


def flow_animation(
    conserved: Quadratic, start: Tensor, path: Path | str, axes_shown: tuple[int, int] = (0, 1)
) -> Path:
    """States that move along the flow of each learned direction, as an animated GIF.

    Args:
        conserved: learned quantities.
        start: [m, 2n], where they start.
        path: of the GIF.
        axes_shown: the two entries of a state to draw.
    """
    times = torch.linspace(0.0, 2 * torch.pi, FRAMES, dtype=torch.float64)
    return motion_animation(_orbits(conserved, start, times), path, axes_shown)


def motion_animation(
    motions: Mapping[str, Float[Tensor, "t m d"]],
    path: Path | str,
    axes_shown: tuple[int, int] = (0, 1),
) -> Path:
    """Moving states with their tails, a panel for each motion, as an animated GIF.

    All panels show the same part of the plane: where the motions are, or at most twice the width of
    the first.

    Args:
        motions: name -> states at T times, such as true and learned trajectories; all of one T.
        path: of the GIF.
        axes_shown: the two entries of a state to draw.

    Raises:
        ValueError: no motion, or motions of different lengths.
    """
    lengths = sorted({len(states) for states in motions.values()})
    if len(lengths) != 1:
        raise ValueError(f"expected motions of one length, got {lengths or 'none'}")
    figure = _figure((3.0 * len(motions), 3.0))
    shown = [states.detach().cpu()[..., list(axes_shown)].double() for states in motions.values()]
    lines = []
    axes = figure.subplots(1, len(motions), squeeze=False)[0]
    xlim, ylim = _window(shown)
    for ax, name in zip(axes, motions, strict=True):
        ax.set(xlim=xlim, ylim=ylim, aspect="equal")
        ax.set_title(name, fontsize=10)
        (tails,) = ax.plot([], [], lw=1.2, color=COLOURS[0])
        (heads,) = ax.plot([], [], "o", ms=4, color=COLOURS[1])
        lines.append((tails, heads))
    figure.canvas.draw()
    figure.set_layout_engine("none")  # once is enough
    frames = []
    for time in range(lengths[0]):
        for (tails, heads), states in zip(lines, shown, strict=True):
            recent = states[max(0, time - TAIL) : time + 1]
            apart = torch.nn.functional.pad(recent, (0, 0, 0, 0, 0, 1), value=torch.nan)
            tails.set_data(*apart.transpose(0, 1).flatten(0, 1).unbind(1))
            heads.set_data(*recent[-1].unbind(1))
        frames.append(_picture(figure))
    return _save_frames(frames, path)


def _window(shown: Sequence[Float[Tensor, "t m 2"]]) -> list[tuple[float, float]]:
    """From where to where a square reaches around the first motion, and others near it."""
    points = shown[0].flatten(0, 1)
    low, high = points.amin(0), points.amax(0)
    middle, own = (low + high) / 2, float((high - low).max()) / 2
    every = max(float((states - middle).abs().max()) for states in shown)
    reach = 1.1 * (min(every, 2 * own) or every or 1.0)
    return [(centre - reach, centre + reach) for centre in middle.tolist()]


def _picture(figure: Any) -> Any:
    """What a figure looks like now, with few colours."""
    from PIL import Image

    figure.canvas.draw()
    pixels = figure.canvas.buffer_rgba()
    size = pixels.shape[1], pixels.shape[0]
    return Image.frombytes("RGBA", size, bytes(pixels)).convert("RGB").quantize(32)


def _save_frames(frames: Sequence[Any], path: Path | str) -> Path:
    buffer = io.BytesIO()
    first, *others = frames
    first.save(buffer, format="GIF", save_all=True, append_images=others, duration=PAUSE, loop=0)
    write_atomically(Path(path), buffer.getvalue())
    return Path(path)


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path | str) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomically(Path(path), buffer.getvalue())
    return Path(path)
