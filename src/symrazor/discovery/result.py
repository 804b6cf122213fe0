"""Define the result of `discover`: verdict, candidates, plain network, document and files."""

import copy
import io
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.files import write_atomically
from symrazor.core.validation import json_ready
from symrazor.data import Dataset, Tensors
from symrazor.data.arrays import Preparation
from symrazor.data.batches import is_frame
from symrazor.data.categories import encode_as, frame_columns, stack
from symrazor.data.shapes import as_kind, plural
from symrazor.discovery.answer import Answer, Candidate
from symrazor.discovery.document import code_for, document_of, dtype_name
from symrazor.discovery.final import delivered_posterior
from symrazor.discovery.invariances import LearnedInvariances
from symrazor.discovery.trajectories import Dynamics, save_animation
from symrazor.inference.last_layer import LastLayer, predict
from symrazor.inference.posterior import Prediction
from symrazor.invariance.learned_augmentation import RandomAugmentation
from symrazor.layers.path import is_symrazor_module, traced
from symrazor.report.page import verdict_html, write_page
from symrazor.report.summary import question_html
from symrazor.runs.writing import (
    ANIMATION,
    FIGURE,
    Owner,
    inside,
    owned_folder,
    write_discovery,
)
from symrazor.symmetry.reading import Reading
from symrazor.symmetry.verdict import LayerReading

MAX_LISTED_CLASSES = 12
BLUE, GREEN, OCHRE, RED = "#33518f", "#1b7f79", "#b8860b", "#c8553d"
"""Colours of the relaxed structure, the symmetric one, the others, and the last one."""


@dataclass(frozen=True)
class QuestionResult:
    """The data and the answer of one question.

    Args:
        data: the training data.
        answer: the ranked candidates.
        preparation: standardisation of inputs and targets; None if networks take the data as is.
        test: held-out data, not standardised.
    """

    data: Dataset
    answer: Answer
    preparation: Preparation | None = None
    test: Tensors | None = None

    @cached_property
    def network(self) -> nn.Module:
        """The recommended network as plain torch modules, on data that are not standardised."""
        fit = self.answer.recommended_fit
        is_plain = not any(is_symrazor_module(module) for module in fit.model.modules())
        plain = copy.deepcopy(fit.model).eval() if is_plain else fit.collapse()
        temperature, dims = self.answer.delivered.temperature, self.data.x.ndim
        if self.preparation is None and temperature == 1:
            return plain.cpu()
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        preparation = self.preparation or Preparation(zero, one, zero, one)
        return with_standardisation(plain.cpu(), preparation, dims, temperature)

    @cached_property
    def posterior(self) -> LastLayer | None:
        """The posterior of the last layer of `network`; None if it does not end with one."""
        scale: Tensor | float = 1 / self.answer.delivered.temperature
        if self.data.task == "regression":
            scale = 1.0 if self.preparation is None else self.preparation.target_scale
        x, likelihood = self.data.x, self.answer.recommended_fit.razor.likelihood
        return delivered_posterior(self.network, x, likelihood, scale, self.answer.calibration)

    def prepared_test(self) -> Tensors | None:
        """Return held-out data as the trained networks take them."""
        if self.test is None or self.preparation is None:
            return self.test
        return self.preparation.data(self.test)

    @property
    def code(self) -> str:
        """Python code that puts the answer into a network of your own; "" for none."""
        return code_for(self.answer, self.data)

    def usage(self, file: str) -> str:
        """Return Python code that loads the network from a file and calls it."""
        shape = ", ".join(map(str, self.data.x.shape[1:]))
        is_scaled = self.data.kind in ("image", "volume", "series")
        scale = ", bytes divided by 255" if is_scaled else ""
        output = "targets, float64"
        if self.data.task == "classification":
            names = self.data.names
            more = f", ... ({len(names)} classes)" if len(names) > MAX_LISTED_CLASSES else ""
            output = f"logits of the classes {', '.join(names[:MAX_LISTED_CLASSES])}{more}"
        return (
            f'network = torch.export.load("{file}").module()\n'
            f"outputs = network(x)  # x: {dtype_name(self.data)} [n, {shape}]{scale}\n"
            f"# outputs: {output}"
        )


@dataclass(frozen=True)
class Discovery:
    """Result of `discover`.

    Args:
        results: one result per question; the properties below refer to the first.
        dynamics: result for trajectories, instead of `results`.
        command: the command that made it.
        data: the trajectories.
    """

    results: Sequence[QuestionResult] = ()
    dynamics: Dynamics | None = None
    command: str = field(default_factory=lambda: command_line(sys.orig_argv))
    data: Dataset | None = None

    @property
    def verdict(self) -> str:
        """The result in words; one paragraph per question."""
        if self.dynamics is not None:
            return self.dynamics.verdict
        return "\n".join(result.answer.verdict for result in self.results)

    @property
    def _first(self) -> QuestionResult:
        if not self.results:
            raise ValueError("A discovery on trajectories has no candidates. Use .dynamics.")
        return self.results[0]

    @property
    def candidates(self) -> list[Candidate]:
        """All trained networks, best evidence first."""
        return self._first.answer.candidates

    @property
    def best(self) -> Candidate:
        """The candidate with the highest evidence."""
        return self._first.answer.best

    @property
    def chosen(self) -> Candidate:
        """The recommended candidate; usually the best, see docs/how-to/discover.md."""
        return self._first.answer.recommended

    @property
    def reading(self) -> Reading:
        """Reading of the network that the verdict describes."""
        return self._first.answer.subject_fit.reading

    def network(self) -> nn.Module:
        """Return the recommended network as plain torch modules.

        It maps data that are not standardised to logits or targets; for trajectories, states to
        states one time step later.
        """
        return self._first.network if self.dynamics is None else self.dynamics.network()

    def predict(self, x: Any) -> Prediction:
        """Return probabilities of the classes, or means of the targets, with their uncertainty.

        `std` is the standard deviation of the targets, noise included, or that of the
        probabilities over the posterior of the last layer; `epistemic` leaves out the noise.
        Whether probabilities are averaged over the posterior was chosen by left-out samples.

        Args:
            x: inputs in the shape of the training data, not standardised; or a frame of pandas or
                polars with their columns, in any order.

        Raises:
            ValueError: inputs of another shape.
        """
        data = self._first.data
        if is_frame(x):
            columns = frame_columns(x)
            chosen = encode_as(columns, data.columns or tuple(columns), "x")
            x = stack(chosen, data.columns or tuple(columns))
        values = as_kind(torch.as_tensor(x), data.kind, "x")
        if values.shape[1:] != data.x.shape[1:]:
            raise ValueError(
                f"x contains {plural(data.kind)} of shape {list(values.shape[1:])}, the training "
                f"data have the shape {list(data.x.shape[1:])}. Prepare x in the same way."
            )
        is_classifier = data.task == "classification"
        posterior = self._first.posterior
        return predict(self.network(), values.to(data.x.dtype), posterior, is_classifier)

    def augmentation(self) -> RandomAugmentation:
        """Return the learned transformations as a torch module, for images as they were given.

        It is the identity in evaluation mode. ValueError if there are none; it says why.
        """
        learned = self._first.answer.invariances
        if not isinstance(learned, LearnedInvariances):
            raise ValueError(learned or "Invariances were not learned: only those of images are.")
        if not learned.supported:
            raise ValueError(learned.verdict)
        return learned.for_images(self._first.data.x).augmentation()

    @property
    def code(self) -> str:
        """Python code that puts the answer into a network of your own; "" for none."""
        return self._first.code

    @property
    def loading_code(self) -> str:
        """Python code that loads the networks of the run folder and calls them."""
        blocks = ["import torch  # in the run folder"]
        if (dynamics := self.dynamics) is not None:
            comment = f"float64 [n, {dynamics.size}] -> the same after a time of {dynamics.dt:g}"
            blocks.append('step = torch.export.load("network.pt2").module()')
            blocks[-1] += f"\nlater = step(states)  # {comment}"
        for result in self.results:
            subfolder = f"{result.answer.name}/" if len(self.results) > 1 else ""
            blocks.append(result.usage(f"{subfolder}network.pt2"))
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        """Return the document: all numbers, ready for JSON (docs/how-to/discover.md)."""
        document: dict[str, Any] = json_ready(document_of(self))
        return document

    def report(self, file: str | Path) -> Path:
        """Write the report as one HTML file."""
        return write_page(self.to_dict(), file)

    def save(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write a run folder: document, report, figures and networks (`symrazor.runs.folder`).

        Args:
            folder: the run folder.
            overwrite: whether to delete a run that is in the folder.

        Raises:
            ValueError: the folder has a run, or another process writes to it.
        """
        with owned_folder(Path(folder), Owner("discover"), overwrite):
            return self._write(Path(folder))

    def _write(self, folder: Path) -> Path:
        networks: dict[str, tuple[nn.Module, Tensor]] = {}
        if self.dynamics is not None:
            simulator = self.dynamics.discovered.simulator()
            save_animation(simulator, self.dynamics.observed, inside(folder, ANIMATION))
            generator = torch.Generator().manual_seed(0)
            states = torch.rand(8, self.dynamics.size, generator=generator, dtype=torch.float64)
            networks[""] = (self.network(), states)
        else:
            save_evidence_figure([result.answer for result in self.results], inside(folder, FIGURE))
        posteriors = {}
        for result in self.results:
            subfolder = result.answer.name if len(self.results) > 1 else ""
            networks[subfolder] = (result.network.cpu(), result.data.x[:8])
            posteriors[subfolder] = result.posterior
        return write_discovery(folder, self.to_dict(), networks, posteriors)

    def __repr__(self) -> str:
        names = [f"{r.answer.name}: {r.answer.recommended.name}" for r in self.results]
        return f"Discovery({', '.join(names) or ' '.join(self.verdict.split())})"

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        """Return verdict and candidates as HTML, for notebooks."""
        tables = [question_html(result.answer.to_dict()) for result in self.results]
        return "".join(tables) or f"<p>{verdict_html(self.verdict)}</p>"


def command_line(arguments: Sequence[str]) -> str:
    """Return the command of a process; without the interpreter if it is `symrazor`."""
    for number, argument in enumerate(arguments[:3]):
        is_module = list(arguments[number : number + 2]) == ["-m", "symrazor"]
        if is_module or (number > 0 and Path(argument).stem == "symrazor"):
            return shlex.join(["symrazor", *arguments[number + 1 + is_module :]])
    return shlex.join(arguments)


def with_standardisation(
    network: nn.Module, preparation: Preparation, dims: int, temperature: float = 1.0
) -> nn.Module:
    """Return a network with standardisation before and after it, as plain torch modules.

    It takes float32 or float64 data that are not standardised, batches with `dims` dimensions, and
    returns targets in float64, or logits divided by the temperature.
    """
    plain = nn.Sequential(
        traced(_Standardised(preparation, network, dims, temperature), "Network")
    ).eval()
    for tensor in [*plain.parameters(), *plain.buffers()]:  # files store no views
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    plain.collapse_report = getattr(network, "collapse_report", None)  # type: ignore[assignment]
    return plain


class _Standardised(nn.Module):
    mean: Tensor
    scale: Tensor
    target_mean: Tensor
    target_scale: Tensor

    def __init__(
        self, preparation: Preparation, network: nn.Module, dims: int, temperature: float
    ) -> None:
        super().__init__()
        shape = (-1, *[1] * (dims - 2))
        self.points = preparation.points
        self.network = network
        self.temperature = temperature
        target_mean, target_scale = preparation.target_mean, preparation.target_scale
        self.real = bool((target_scale != 1).any() or (target_mean != 0).any())
        self.register_buffer("mean", preparation.mean.reshape(shape).clone())
        self.register_buffer("scale", preparation.scale.reshape(shape).clone())
        if self.real:
            self.register_buffer("target_mean", target_mean.clone())
            self.register_buffer("target_scale", target_scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.points:
            x = x.transpose(1, 2)
        f: Tensor = self.network(((x.double() - self.mean) / self.scale).float())
        if self.real:
            return f.double() * self.target_scale + self.target_mean
        return f / self.temperature


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
    colours = dict(zip(names, (BLUE, GREEN, OCHRE, RED), strict=False))
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
