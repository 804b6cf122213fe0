"""What was learned, as numbers: precisions, effective parameters, fit and calibration."""

import json
import platform
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from symrazor.evidence.value import Evidence
from symrazor.hyper import weights
from symrazor.layers.relaxed import Relaxed
from symrazor.learner import Razor
from symrazor.likelihood import Bernoulli, Categorical, Likelihood

SCHEMA = 1


def calibration_error(
    probabilities: Float[Tensor, "n k"], labels: Int[Tensor, " n"], bins: int = 15
) -> float:
    r"""Expected calibration error.

    $\sum_b \frac{n_b}{n} |\mathrm{accuracy}_b - \mathrm{confidence}_b|$ over bins b of equal width
    in confidence, the probability of the predicted class.
    """
    confidence, predicted = probabilities.double().max(1)
    correct = (predicted == labels).double()
    index = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    gaps.index_add_(0, index, correct - confidence)
    return float(gaps.abs().sum() / len(labels))


def scores(likelihood: Likelihood, f: Float[Tensor, "n k"], y: Tensor) -> dict[str, float]:
    """Test figures of outputs f: accuracy and calibration of a classifier, else squared error."""
    with torch.no_grad():
        nll = float(likelihood.nll(f.double(), y).mean())
        match likelihood:
            case Categorical():
                p = likelihood.mean(f.double())
                accuracy = float((p.argmax(1) == y).double().mean())
                return {"accuracy": accuracy, "nll": nll, "ece": calibration_error(p, y)}
            case Bernoulli():
                hits = (f > 0) == (y.reshape(f.shape) > 0.5)
                return {"accuracy": float(hits.double().mean()), "nll": nll}
            case _:
                error = likelihood.mean(f.double()) - y.reshape(f.shape).double()
                return {"mse": float(error.square().mean()), "nll": nll}


@dataclass(frozen=True)
class PathReading:
    """One path of a layer: what the evidence gave it."""

    path: str
    group: str | None
    share: float
    effective_parameters: float
    parameters: int
    precision: dict[str, float]


@dataclass(frozen=True)
class LayerReading:
    """One layer; a plain layer has one path."""

    name: str
    paths: list[PathReading]
    equivariance_error: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """Everything a run learned, ready for a table, a page or JSON (see `to_json`)."""

    verdict: str
    evidence: dict[str, float]
    train: dict[str, float]
    test: dict[str, float]
    layers: list[LayerReading]
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The reading as a JSON document."""
        return json.dumps(asdict(self), indent=1, default=str)

    def __str__(self) -> str:
        """A table for the terminal."""
        width = max([5, *(len(layer.name) for layer in self.layers)])
        lines = [
            f"{'layer':<{width}}  {'path':<12}{'share':>7}{'effective':>11} {'of':>9}   precision"
        ]
        for layer in self.layers:
            for path in layer.paths:
                precisions = ", ".join(f"{k} {v:.3g}" for k, v in path.precision.items())
                lines.append(
                    f"{layer.name:<{width}}  {path.path:<12}{100 * path.share:>5.0f} %"
                    f"{path.effective_parameters:>11.1f} "
                    f"{path.parameters:>9,}   {precisions}"
                )
        if self.test:
            lines.append("test: " + ", ".join(f"{k} {v:.4f}" for k, v in self.test.items()))
        return "\n".join([*lines, self.verdict])


def read(
    razor: Razor,
    evidence: Evidence,
    train: dict[str, float] | None = None,
    test: dict[str, float] | None = None,
) -> Reading:
    """The reading of a model as its razor sees it."""
    found = _layers(razor, evidence.effective_parameters)
    total = sum(path.parameters for layer in found for path in layer.paths)
    used = sum(evidence.effective_parameters.values())
    verdict = (
        f"log evidence {float(evidence.log_evidence):,.1f} ({float(evidence.per_datum):.3f} per "
        f"datum): fit {float(evidence.log_likelihood):,.1f}, complexity "
        f"{float(evidence.complexity):,.1f}; the data determine {used:,.0f} of {total:,} parameters"
    )
    if razor.at_bound:
        verdict += f"; precision at its bound: {', '.join(razor.at_bound)}"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    config = asdict(razor.config)
    return Reading(verdict, evidence.to_dict(), train or {}, test or {}, found, config, versions)


def _layers(razor: Razor, gamma: dict[str, float]) -> list[LayerReading]:
    """One entry per relaxed layer with its paths, and per plain layer with one path."""
    modules = dict(razor.model.named_modules())
    relaxed = {name for name, module in modules.items() if isinstance(module, Relaxed)}
    found: dict[str, dict[str, list[str]]] = {}
    for layer in razor.layers:
        owner = next((r for r in relaxed if layer.name.startswith(f"{r}.paths.")), None)
        place = layer.name
        if owner is not None:
            place = ".".join(layer.name.split(".")[: owner.count(".") + 3])
        names = layer.tensors
        paths = found.setdefault(owner if owner is not None else layer.name, {})
        paths.setdefault(place, []).extend(names)
    return [
        LayerReading(name, _paths(razor, modules, paths, gamma)) for name, paths in found.items()
    ]


def _paths(
    razor: Razor,
    modules: dict[str, nn.Module],
    paths: dict[str, list[str]],
    gamma: dict[str, float],
) -> list[PathReading]:
    theta = weights(razor.model)
    used = {place: sum(gamma[name] for name in names) for place, names in paths.items()}
    total = sum(used.values())
    return [
        PathReading(
            type(modules[place]).__name__,
            getattr(modules[place], "group", None),
            used[place] / total if total > 0 else 1 / len(paths),
            used[place],
            sum(theta[name].numel() for name in names),
            {
                name.removeprefix(f"{place}."): float(
                    razor.prior.precision_of(name).detach().mean()
                )
                for name in names
            },
        )
        for place, names in paths.items()
    ]
