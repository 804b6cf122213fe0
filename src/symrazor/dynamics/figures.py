"""Pictures: phase portraits, learned generators, and the flows they belong to."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symrazor.dynamics.analysis import Spectrum, spectrum
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.phase import Field
from symrazor.files import write_atomically

COLOURS = ("#33518f", "#c8553d", "#1b7f79", "#8a6d3b")


def generators_figure(conserved: Quadratic, path: Path, most: int = 8) -> Path:
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
    fields: dict[str, Field], path: Path, extent: float = 2.0, states: Tensor | None = None
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
        for one in () if states is None else states.cpu():
            ax.plot(one[:, 0], one[:, 1], "o-", ms=2.5, lw=1.5, color=COLOURS[1])
        ax.set(
            xlim=(-extent, extent), ylim=(-extent, extent), xlabel="q", ylabel="p", aspect="equal"
        )
        ax.set_title(name, fontsize=10)
    return _save(figure, path)


def flow_figure(
    conserved: Quadratic, start: Tensor, path: Path, axes_shown: tuple[int, int] = (0, 1)
) -> Path:
    """Orbits of states under the flow of each learned direction.

    Args:
        conserved: learned quantities.
        start: [m, 2n], where orbits start.
        path: of the PNG.
        axes_shown: the two entries of a state to draw.
    """
    found = spectrum(conserved)
    shown = max(1, found.dimension)
    figure = _figure((3.0 * shown, 3.0))
    i, j = axes_shown
    times = torch.linspace(-1.5, 1.5, 121, dtype=torch.float64)
    for k, ax in enumerate(figure.subplots(1, shown, squeeze=False)[0]):
        square = torch.nn.functional.pad(found.directions[k], (0, 0, 0, 1))
        maps = torch.linalg.matrix_exp(times[:, None, None] * square)
        one = torch.ones(len(start), 1, dtype=torch.float64)
        orbits = torch.cat([start.double().cpu(), one], 1) @ maps.mT
        for number in range(len(start)):
            ax.plot(orbits[:, number, i], orbits[:, number, j], lw=1.2, color=COLOURS[0])
        ax.plot(start[:, i].cpu(), start[:, j].cpu(), "o", ms=3, color=COLOURS[1])
        ax.set_title(f"flow of C{k + 1}", fontsize=10)
    return _save(figure, path)


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomically(path, buffer.getvalue())
    return path
