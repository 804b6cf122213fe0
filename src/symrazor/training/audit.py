"""Audit a trained network: which symmetries it has, where it loses them, and what the data support.

For every transformation of the inputs, three questions are answered:

1. How much do the outputs of the whole network change? (`equivariance_error`)
2. Which layers change, on the inputs that they get inside the network?
3. How much worse does the network explain the labels of transformed inputs? A network may depend on
   a transformation without using it for the labels.

For convolutional networks, a short evidence run then compares the network with one that has a small
free path beside every convolution. Both continue from the trained weights, so that most of the
noise between trainings cancels (see `symmetry.nested`).
"""

import copy
import html
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.files import write_atomically
from symrazor.core.likelihood import Likelihood, as_likelihood
from symrazor.core.parameters import eval_mode
from symrazor.core.validation import counted
from symrazor.curvature.estimate import AUTO
from symrazor.data import Tensors
from symrazor.layers.relaxed import free_groups
from symrazor.symmetry.equivariance import Action, equivariance_error, translations
from symrazor.symmetry.relax import relax
from symrazor.training.fit import fit
from symrazor.training.options import AFFORDABLE, FitConfig

EXACT = 0.01
"""Error below which a map counts as equivariant."""
SMALL_COST = 0.01
"""Nats per sample below which a change of the likelihood of labels has no consequence."""
DECISIVE_NATS = 20.0
"""Difference of two evidences below which a single pair of runs does not decide."""
BATCH_SIZE = 256
NEARLY_CLOSED_PRECISION = 1e6
"""Prior precision that free paths are drawn from: they start at about 1/1000 of their usual size,
so that both networks of the comparison start from the same outputs."""

Transformations = Callable[[Tensor, Tensor], list[Action]]
"""Maps inputs and outputs of a map to the elements of a group, as they act on both."""


@dataclass
class SymmetryAudit:
    """Findings for one transformation.

    Args:
        name: name of the transformation.
        error: equivariance error of the whole network.
        layers: equivariance errors of its layers, on their own inputs, in the order of calls.
        cost: how many nats per sample the labels of transformed inputs are less likely.
        cost_error: standard error of `cost`.
    """

    name: str
    error: float
    layers: dict[str, float]
    cost: float
    cost_error: float

    @property
    def breaking(self) -> list[str]:
        """Names of the layers that change."""
        return [name for name, error in self.layers.items() if error >= EXACT]

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.error < EXACT:
            return "The network has this symmetry."
        where = f" Lost in {', '.join(self.breaking[:4])}." if self.breaking else ""
        if self.cost <= max(2 * self.cost_error, SMALL_COST):
            return f"The outputs change, but the labels stay as likely.{where}"
        return f"The network uses it, or has not learned to ignore it.{where}"


@dataclass
class Audit:
    """Result of `audit`; `print` it.

    Args:
        n: number of samples on which errors were measured.
        symmetries: findings by transformation.
        free_path_gain: log evidence with free paths beside the convolutions minus without, in nats;
            None if it was not measured.
        free_path_share: share of the free paths in the effective parameters of that network.
        epochs: epochs of the evidence run.
        reading: what the evidence run found in each layer, in words.
    """

    n: int
    symmetries: list[SymmetryAudit]
    free_path_gain: float | None = None
    free_path_share: float | None = None
    epochs: int = 0
    reading: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """What the evidence run decided, in one sentence."""
        gain = self.free_path_gain
        if gain is None:
            return "No evidence run was made, or the network has no convolution to relax."
        share = self.free_path_share or 0.0
        about = f"({gain:+.0f} nats, free paths have {share:.0%} of the effective parameters)"
        if gain >= DECISIVE_NATS:
            return f"The data support layers that depend on position {about}."
        if gain <= -DECISIVE_NATS:
            return f"The data support the convolutions as they are {about}."
        return (
            f"{counted(self.epochs, 'epoch')} found no support for layers that depend on position "
            f"{about}. A longer run may find some."
        )

    def __repr__(self) -> str:
        lines = [
            f"Audit of {self.n} samples",
            self._row("transformation", "error", "nats / sample"),
        ]
        for symmetry in self.symmetries:
            cost = f"{symmetry.cost:+.3f} ± {symmetry.cost_error:.3f}"
            lines.append(
                f"{self._row(symmetry.name, f'{symmetry.error:.1%}', cost)}  {symmetry.verdict}"
            )
        return "\n".join([*lines, self.verdict, *self.notes])

    @staticmethod
    def _row(name: str, error: str, cost: str) -> str:
        return f"{name:<24}{error:>9}{cost:>18}"

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as plain values."""
        return {**asdict(self), "verdict": self.verdict}

    def report(self, file: str | Path) -> Path:
        """Write a self-contained HTML page, and return its path."""
        head = "<tr><th>transformation<th>layer<th>error<th>nats per sample<th>verdict</tr>"
        rows = []
        for symmetry in self.symmetries:
            cost = f"{symmetry.cost:+.3f} &plusmn; {symmetry.cost_error:.3f}"
            cells = (symmetry.name, "whole network", f"{symmetry.error:.1%}")
            escaped = "".join(f"<td>{html.escape(cell)}" for cell in cells)
            rows.append(f"<tr>{escaped}<td>{cost}<td>{html.escape(symmetry.verdict)}</tr>")
            rows += [
                f"<tr><td><td>{html.escape(name)}<td>{error:.1%}<td><td></tr>"
                for name, error in symmetry.layers.items()
            ]
        style = (
            "body{font-family:sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .8em}"
        )
        page = (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>Audit</title>"
            f"<style>{style}</style><h1>Audit of a trained network</h1>"
            f"<p><b>{html.escape(self.verdict)}</b></p><table>{head}{''.join(rows)}</table>"
            f"<pre>{html.escape(self.reading)}</pre></html>\n"
        )
        write_atomically(Path(file), page.encode())
        return Path(file)


def audit(
    model: nn.Module,
    data: Tensors,
    likelihood: str | Likelihood = "categorical",
    *,
    transformations: Mapping[str, Transformations] | None = None,
    samples: int = 256,
    epochs: int = 0,
    config: FitConfig | None = None,
    seed: int = 0,
) -> Audit:
    """Measure the symmetries of a trained network, and which of them the data support.

    Args:
        model: any trained network of images [n, c, h, w], volumes or series [n, c, t]; unchanged.
        data: inputs and labels, preferably ones that the network was not trained on.
        likelihood: likelihood of the labels.
        transformations: name -> function from inputs and outputs of a map to `Action`s. By default
            shifts, mirrors, and for square images quarter turns.
        samples: number of samples on which errors are measured.
        epochs: epochs of the evidence run; 0 for none. It needs the training data and a network
            that `relax` accepts.
        config: options of the evidence run.
        seed: seed of the choice of samples.

    Raises:
        ValueError: the inputs have no positions, or the network cannot process them.
    """
    x, y = data
    if x.dim() < 3:
        raise ValueError(
            f"audit needs inputs with positions, [n, c, *size], got {list(x.shape)}. Pass "
            "transformations= for other data to equivariance_error."
        )
    rule = as_likelihood(likelihood)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(x), generator=generator)[:samples].to(x.device)
    x_some, y_some = x[index], y[index.to(y.device)]
    chosen = default_transformations(x) if transformations is None else transformations
    with eval_mode(model), torch.no_grad():
        calls = _calls(model, x_some)
        symmetries = [
            SymmetryAudit(
                name,
                _error(model, x_some, elements),
                {layer: _error(call, inputs, elements) for layer, call, inputs in calls},
                *_cost(model, rule, x_some, y_some, elements),
            )
            for name, elements in chosen.items()
        ]
    result = Audit(len(x_some), symmetries)
    if epochs:
        _compare_evidence(result, model, data, rule, (config or FitConfig()).change(epochs=epochs))
    return result


def default_transformations(x: Tensor) -> dict[str, Transformations]:
    """Return shifts, mirrors and, for square images, quarter turns."""
    size = x.shape[2:]
    names = {1: ("reversal",), 2: ("mirror up-down", "mirror left-right")}
    axes = names.get(len(size), tuple(f"mirror along axis {d + 1}" for d in range(len(size))))
    result: dict[str, Transformations] = {"shifts": _shifts}
    for axis, name in enumerate(axes):
        result[name] = partial(_map_wise, [partial(torch.flip, dims=(2 + axis,))])
    if len(size) == 2 and size[0] == size[1]:
        turns = [partial(torch.rot90, k=k, dims=(2, 3)) for k in (1, 2, 3)]
        result["quarter turns"] = partial(_map_wise, turns)
    return result


def _shifts(x: Tensor, y: Tensor) -> list[Action]:
    return translations(tuple(x.shape[2:]), tuple(y.shape[2:]) if y.dim() > 2 else None)


def _map_wise(moves: Sequence[Callable[[Tensor], Tensor]], x: Tensor, y: Tensor) -> list[Action]:
    """Return moves that act on maps, and leave vectors as they are."""
    is_map = y.dim() == x.dim()
    return [Action(move, (move if is_map else _unchanged,)) for move in moves]


def _unchanged(y: Tensor) -> Tensor:
    return y


def _error(f: Callable[[Tensor], Tensor], x: Tensor, elements: Transformations) -> float:
    y = f(x[:1])
    if y.dim() not in (2, x.dim()):  # tokens, for example: not a map of the same positions
        return math.nan
    return equivariance_error(f, x, elements(x, y))


Call = tuple[str, Callable[[Tensor], Tensor], Tensor]


def _calls(model: nn.Module, x: Tensor) -> list[Call]:
    """Return every module without children that maps positions, with the input it got."""
    leaves = {m: n for n, m in model.named_modules() if n and not next(m.children(), None)}
    calls: dict[str, Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], y: object) -> None:
        name = leaves[module]
        is_map = len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim() == x.dim()
        if name in calls or not is_map or not isinstance(y, Tensor):
            return
        has_positions = math.prod(args[0].shape[2:]) > 1 and args[0].is_floating_point()
        if has_positions and y.dim() in (2, x.dim()) and len(y) == len(x):
            calls[name] = name, module, args[0].clone()

    with ExitStack() as stack:
        for module in leaves:
            stack.enter_context(module.register_forward_hook(record))
        model(x)
    return list(calls.values())


def _cost(
    model: nn.Module, rule: Likelihood, x: Tensor, y: Tensor, elements: Transformations
) -> tuple[float, float]:
    """Return by how much the nll of transformed inputs is higher, and its standard error."""

    def nll(inputs: Tensor) -> Tensor:
        parts = zip(inputs.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)
        return torch.cat([rule.nll(model(part).double(), labels) for part, labels in parts])

    before = nll(x)
    after = [nll(action.inputs(x)) for action in elements(x, model(x[:1]))]
    rises = torch.stack(after).mean(0) - before
    return float(rises.mean()), float(rises.std() / math.sqrt(len(rises)))


def _compare_evidence(
    result: Audit, model: nn.Module, data: Tensors, rule: Likelihood, config: FitConfig
) -> None:
    """Train on with and without free paths, and store the difference of the evidences."""
    config = config.change(start="given", progress=False)
    strict = copy.deepcopy(model)
    try:
        relaxed = relax(strict, data[0][:2], precision=NEARLY_CLOSED_PRECISION)
    except ValueError as error:
        result.notes.append(f"No evidence run: {error}")
        return
    relaxed_fit = fit(relaxed, data, copy.deepcopy(rule), config=config)
    if config.evidence_structure == AFFORDABLE:  # the same structure for both
        structure = AUTO if relaxed_fit.evidence.is_exact else None
        config = replace(config, evidence_structure=structure)
    without = fit(strict, data, copy.deepcopy(rule), config=config)
    result.reading, result.epochs = str(relaxed_fit.reading), config.epochs
    gain = relaxed_fit.evidence.log_evidence - without.evidence.log_evidence
    result.free_path_gain = float(gain)
    free = {name for g in free_groups(relaxed) for name in relaxed_fit.razor.prior.members(g)}
    gamma = relaxed_fit.evidence.effective_parameters
    total = sum(gamma.values())
    result.free_path_share = sum(gamma[name] for name in free) / total if total else 0.0
