"""Pictures and files of what was learned."""

import io
import os
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from symrazor.discover import CANDIDATES, QUESTIONS, Answer

COLOURS = dict(zip(CANDIDATES, ("#1b7f79", "#c8553d"), strict=True))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def evidence_figure(answers: Sequence[Answer], path: Path) -> Path:
    """For each task: the evidence of each candidate over training, beside its training loss.

    Where both fit, the training loss says nothing about which will generalise; the evidence does.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.9 * len(answers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(answers), 2, squeeze=False)
    for (left, right), found in zip(axes, answers, strict=True):
        for candidate in found.candidates:
            history = candidate.fit.history
            measured = [record for record in history if "per_datum" in record]
            style = {"color": COLOURS[candidate.name], "label": candidate.name, "lw": 2}
            epochs = [record["epoch"] for record in history]
            left.plot(epochs, [record["nll"] for record in history], **style)
            right.plot(
                [record["epoch"] for record in measured],
                [record["per_datum"] for record in measured],
                marker="o",
                ms=4,
                **style,
            )
        left.set(ylabel="training loss (nats)", xlabel="epoch", yscale="log")
        right.set(ylabel="log evidence / n", xlabel="epoch")
        left.set_title(QUESTIONS[found.task], loc="left", fontsize=10, fontweight="bold")
        right.set_title(textwrap.fill(found.verdict, 52), loc="left", fontsize=9)
        for ax in (left, right):
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
        right.legend(frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomically(path, buffer.getvalue())
    return path
